"""An alarm at the first keys of a model whose weights have said nothing about them.

See `fit.key_noise` for what is estimated, and why.
"""

import warnings

from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.fit.key_noise import NOISE_LIMIT, needed_key_bits
from tightkv.math.codebook import get_codebook

_LEAST_TOKENS = 32  # that a first look at keys needs
_MOST_PAGES = 4


class KeyBitsWarning(UserWarning):
    """Keys got more bits than the config says, or would need them; the message has the way out."""


def measured_noise(query: Tensor, key: Tensor, scale: float | None, page_size: int) -> float | None:
    """`LayerScores.noise` of the worst head, from queries and keys [B, H, T, D] of a prompt.

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
    factor = 1 / d if scale is None else scale * scale
    return float((factor / d * grouped * rest).max())


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
