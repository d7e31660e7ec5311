"""More bits for keys whose layers need them: from a model's weights, or an alarm at its first keys.

See `fit.key_noise` for what is estimated, and why.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from tightkv.config import KVQuantConfig
from tightkv.fit.key_check import CheckedConfig, KeyCheck
from tightkv.fit.key_noise import NOISE_LIMIT, needed_key_bits
from tightkv.integrations.transformers.per_model import MODEL_LOCK, PerModel
from tightkv.math.codebook import get_codebook

_LEAST_TOKENS = 32  # that a first look at keys needs
_MOST_PAGES = 4


class KeyBitsWarning(UserWarning):
    """Keys got more bits than the config says, or would need them; the message has the way out."""


@dataclass(frozen=True)
class LoadedTensor:
    """A parameter of a loaded model (`model_shape.attention_weights.WeightTensor`)."""

    name: str
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def bytes(self) -> int:
        return self.value.numel() * self.value.element_size()

    @property
    def is_float(self) -> bool:
        value = self.value
        if type(value) not in (Tensor, Parameter):  # quantized (torchao), or spread over ranks
            return False
        return value.is_floating_point() and value.element_size() > 1 and not value.is_meta

    def rows(self, first: int, count: int) -> LoadedTensor:
        return LoadedTensor(self.name, self.value[first : first + count])

    def read(self, step: int = 1) -> Tensor:
        if not self.is_float:
            kind = f"{type(self.value).__name__} of {self.value.dtype}"
            raise ValueError(f"{self.name} is a {kind} on {self.value.device}")
        return self.value.detach()[::step]


def protect(cfg: KVQuantConfig, model: PreTrainedModel) -> tuple[KVQuantConfig, bool]:
    """The config with the bits that the model's keys need, and whether its weights were checked.

    What is changed is said once for each model. Weights that say nothing are left to
    `warn_of_noise`, where attention goes through it.
    """
    if not cfg.protect_keys or cfg.key_bits == 16:
        return cfg, True
    checked, first = _check(model).of(cfg)
    known = checked.raised or checked.line is None
    if first and checked.line and (known or model.config._attn_implementation != "tightkv"):
        warnings.warn(checked.line, KeyBitsWarning, stacklevel=3)
    return checked.config, known


class _ModelCheck:
    """What the weights of a model say, looked at once for each config."""

    def __init__(self, model: PreTrainedModel) -> None:
        tensors = {name: LoadedTensor(name, value) for name, value in model.named_parameters()}
        self._check = KeyCheck(model.config, tensors)
        self._known: dict[KVQuantConfig, CheckedConfig] = {}

    def of(self, cfg: KVQuantConfig) -> tuple[CheckedConfig, bool]:
        """The answer, and whether it is a new one."""
        with MODEL_LOCK:
            first = cfg not in self._known
            if first:
                self._known[cfg] = self._check.protect(cfg)
            return self._known[cfg], first


_check = PerModel(_ModelCheck)


def measured_noise(query: Tensor, key: Tensor, scale: float, page_size: int) -> float | None:
    """`key_noise.score_noise` of the worst head, from queries and keys [B, H, T, D] of a prompt.

    Its last pages are looked at: no padding, no sinks. None where it is too short.
    """
    tokens, d = key.shape[2], key.shape[3]
    page = min(page_size, tokens)
    if tokens < _LEAST_TOKENS:
        return None
    count = min(tokens // page, _MOST_PAGES) * page
    pages = key[:, :, -count:].float().unflatten(2, (-1, page))
    rest = (pages - pages.mean(3, keepdim=True)).square().sum(-1).mean((0, 2, 3))  # [Hkv]
    queries = query[:, :, -count:].float().square().sum(-1).mean((0, 2))  # [Hq]
    grouped = queries.unflatten(0, (key.shape[1], -1)).mean(1)
    return float((scale * scale / d * grouped * rest).max())


def warn_of_noise(cfg: KVQuantConfig, layer: int, noise: float | None) -> None:
    """Say that a layer's keys need more bits than it has, before anything is stored."""
    if noise is None or cfg.key_bits == 16 or cfg.key_method != "mse":
        return
    needed = needed_key_bits(cfg, noise)
    if needed <= cfg.key_bits:
        return
    value = 16 if needed == 16 else cfg.value_bits
    variance = noise * get_codebook("fp8", cfg.key_bits).distortion
    warnings.warn(
        f"tightkv {cfg.name}: keys of layer {layer} need more bits: codes put noise of variance "
        f"{variance:,.0f} into its attention scores (limit {NOISE_LIMIT:g}); make a new cache with "
        f'layer_bits="{layer}=k{needed}v{value}", or TightCache(..., model=model) so that the '
        "weights decide; protect_keys=False accepts it",
        KeyBitsWarning,
        stacklevel=2,
    )
