"""What `tightkv.fit` is told of a model of transformers, and how users hear what it says."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, cache_utils

from tightkv.config import KVQuantConfig
from tightkv.fit import Fit, Layer, Layers
from tightkv.fit.attention_weights import NOT_READABLE
from tightkv.fit.calibration import Calibration, find_calibration
from tightkv.fit.decide import Metrics, Scales
from tightkv.fit.fingerprint import model_fingerprint
from tightkv.fit.key_check import KeyCheck
from tightkv.integrations.transformers.attention import KeyBitsWarning
from tightkv.integrations.transformers.query_probe import FeedbackWarning, probed
from tightkv.integrations.transformers.recorder import MODEL_LOCK, PerModel
from tightkv.model_shape import LayerShape, read_model_shape, skip_reason

KINDS: dict[type, str] = {
    cache_utils.DynamicLayer: "full",
    cache_utils.DynamicSlidingWindowLayer: "sliding",
    cache_utils.LinearAttentionLayer: "linear",
    cache_utils.LinearAttentionAndFullAttentionLayer: "full",
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: "sliding",
}
"""The layers of a DynamicCache, and the kinds of LayerShape that they are."""


class CalibrationWarning(UserWarning):
    """A calibration does less than was asked; the message has the way out."""


@dataclass(frozen=True)
class LoadedTensor:
    """A parameter of a loaded model (`fit.attention_weights.WeightTensor`)."""

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


def _tensors(model: PreTrainedModel) -> dict[str, LoadedTensor]:
    return {name: LoadedTensor(name, value) for name, value in model.named_parameters()}


loaded_fingerprint = PerModel(
    lambda model: model_fingerprint(read_model_shape(model.config), _tensors(model))
)
"""`model_fingerprint`, computed once."""
_key_check = PerModel(lambda model: KeyCheck(model.config, _tensors(model)))
_said = PerModel[set[Hashable]](lambda model: set())


@dataclass(frozen=True)
class LoadedModel:
    """A model as the source of a fit: weights are read once, and it is run once to be measured."""

    model: PreTrainedModel

    @property
    def name(self) -> str:
        return self.model.name_or_path or type(self.model).__name__

    @property
    def key_check(self) -> KeyCheck:
        return _key_check(self.model)

    def find_calibration(self, cfg: KVQuantConfig) -> Calibration | None:
        """The calibration that `cfg` names; another model's is refused."""
        model = self.model
        return find_calibration(
            cfg, self.name, lambda: (loaded_fingerprint(model), read_model_shape(model.config))
        )

    def key_scales(self, cfg: KVQuantConfig, layers: Mapping[int, Layer]) -> Scales:
        """Scales by the keys of random tokens, and why there are none."""
        return probed(self.model).scales, probed(self.model).problem

    def query_metrics(self, cfg: KVQuantConfig, layers: Mapping[int, Layer]) -> Metrics:
        """Metrics of the queries of random tokens, and why there are none."""
        return probed(self.model).metrics, probed(self.model).problem


def source_of(
    cfg: KVQuantConfig, model: PreTrainedModel | PreTrainedConfig | None
) -> LoadedModel | None:
    """The model, if its weights are known; a calibration needs them."""
    if isinstance(model, PreTrainedModel):
        return LoadedModel(model)
    if cfg.calibration:
        raise ValueError(
            f"calibration={cfg.calibration!r} needs the model, to check that it was "
            "measured on it: TightCache(quant, model=model)"
        )
    return None


def plain_layers(config: PreTrainedConfig) -> tuple[list[Any], Layers]:
    """The layers of a DynamicCache, and those of them that can be compressed."""
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(config).__name__} is an encoder-decoder model; TightCache is for decoders"
        )
    if getattr(text, "cross_attention_layers", None):
        raise ValueError(
            f"{type(text).__name__} keeps the keys of images in its cache "
            "(cross_attention_layers), and TightCache those of text alone; use DynamicCache"
        )
    plain = DynamicCache(config=config).layers
    shapes = layer_shapes(config, plain)
    reasons = [skip_reason(shape) for shape in shapes]
    full = {i: shapes[i] for i, reason in enumerate(reasons) if reason is None}
    if not full:
        listed = ", ".join(sorted({reason for reason in reasons if reason}))
        raise ValueError(
            f"no layer of {type(text).__name__} can be compressed ({listed or 'it has none'}); "
            "use DynamicCache"
        )

    def refuse(cfg: KVQuantConfig) -> None:
        if unknown := sorted(set(cfg.bits_of_layers()) - set(full)):
            raise ValueError(
                f"layer_bits={cfg.layer_bits!r} names layer {unknown[0]}; layers that can "
                f"be compressed are {', '.join(map(str, full))}"
            )
        flex = getattr(text, "_attn_implementation", None) == "flex_attention"
        if flex and any(own.compresses for own in layers.configs(cfg).values()):
            raise ValueError(
                'attn_implementation="flex_attention" compiles kernels of its own, which '
                'cannot read a TightCache; use "tightkv"'
            )

    layers = Layers(full, refuse)
    return plain, layers


def layer_shapes(config: PreTrainedConfig, layers: Sequence[Any]) -> list[LayerShape]:
    """What each layer of a DynamicCache keeps.

    Its kind is that of the cache layer; head sizes are the config's, and 0 where `read_model_shape`
    does not understand it.
    """
    try:
        known = read_model_shape(config).layers
    except NOT_READABLE:
        known = ()
    latent = bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))
    kinds = ["mla" if latent else KINDS.get(type(layer), "other") for layer in layers]
    return [
        known[i] if i < len(known) and known[i].kind == kind else LayerShape(kind)
        for i, kind in enumerate(kinds)
    ]


def warn_once(source: LoadedModel | None, found: Fit) -> None:
    """Warn of what a fit says, each line once for a model.

    Of keys that could not be checked, the attention "tightkv" warns itself if need be
    (`attention.warn_of_noise`).
    """
    if source is None:
        return
    text = source.model.config.get_text_config(decoder=True)
    quiet = not found.checked and text._attn_implementation == "tightkv"
    lines: list[tuple[type[Warning], str | None, Hashable]] = [
        (CalibrationWarning, found.calibration_line, None),
        (KeyBitsWarning, found.keys_line, found.cfg),
        *((FeedbackWarning, note, None) for note in found.notes),
    ]
    for category, line, about in lines:
        with MODEL_LOCK:
            said = _said(source.model)
            new = line is not None and (line, about) not in said
            said.add((line, about))
        if new and not (quiet and category is KeyBitsWarning):
            warnings.warn(str(line), category, stacklevel=3)
