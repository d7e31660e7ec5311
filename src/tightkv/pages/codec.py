"""Codec: what a config does to the keys and values of one layer."""

from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.math.feedback import QueryMetric
from tightkv.math.per_device import Constant
from tightkv.math.quantize import (
    AbsMax,
    Encoded,
    GroupUniform,
    OutlierMSE,
    Quantizer,
    Raw,
    TurboQuantMSE,
    TurboQuantProd,
    dot,
    finite,
)
from tightkv.pages.layout import PageLayout, outlier_channels


def make_quantizer(cfg: KVQuantConfig, side: str, dim: int, raw_dtype: torch.dtype) -> Quantizer:
    """The quantizer of one side ("key" or "value")."""
    bits, method = cfg.bits(side), cfg.method(side)
    frame: dict[str, Any] = {"rotation": cfg.rotation, "seed": cfg.seed}
    codes: dict[str, Any] = {"scale_mode": cfg.scale_mode(side), "codebook": cfg.codebook, **frame}
    if bits == 16:
        return Raw(dim, raw_dtype)
    if cfg.has_outliers(side):
        channels = outlier_channels(cfg, dim)
        return OutlierMSE(dim, bits, channels, extra_bits=cfg.outlier_extra_bits, **codes)
    if method == "group":
        return GroupUniform(dim, bits, group_size=cfg.group_size)
    if method == "absmax":
        return AbsMax(dim, bits, **frame)
    return (TurboQuantProd if method == "prod" else TurboQuantMSE)(dim, bits, **codes)


class Codec(Constant):
    """Keys and values to page fields and back, page centering included."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout, self.cfg = layout, layout.cfg
        d, raw = layout.head_dim, layout.raw_dtype
        self.key = make_quantizer(self.cfg, "key", d, raw)
        self.value = make_quantizer(self.cfg, "value", d, raw)

    def feedback_factors(self, metric: QueryMetric, device: torch.device) -> Tensor | None:
        """The factors of a queries' metric for this layer's encoder; None if it takes none."""
        if not self.cfg.takes_feedback:
            return None
        return metric.factors(self.key.rotation, self.cfg.key_bits, device)

    def side(self, side: str) -> Quantizer:
        return self.key if side == "key" else self.value

    def encode_rotated(self, side: str, y: Tensor) -> Encoded:
        """Rotated [..., head_dim] -> fields, keys uncentered: what an append writes."""
        return self.side(side).encode_rotated(y)

    def rotate(self, side: str, x: Tensor) -> Tensor:
        """x in the frame that pages are stored in; bad elements as `check_finite` says."""
        return self.side(side).rotation(finite(x, self.cfg.check_finite))

    def encode_keys(self, y: Tensor, feedback: Tensor | None = None) -> Encoded:
        """Rotated keys [..., heads, tokens, head_dim] of a sealed page -> fields.

        `feedback` [heads, head_dim, head_dim] are the `feedback_factors` of their queries.
        """
        if feedback is None:
            return self.key.encode_rotated(y)
        assert isinstance(self.key, TurboQuantMSE)
        return self.key.encode_with_feedback(y, feedback)

    def encode_centered(self, y: Tensor, mean: Tensor, feedback: Tensor | None = None) -> Encoded:
        """Keys as `encode_keys` does it, each relative to the mean if that makes it smaller.

        A centered token has the sign bit of its (first) scale set.
        """
        rest = y - mean
        centered = dot(rest, rest) < dot(y, y)  # [..., 1]
        fields = self.encode_keys(torch.where(centered, rest, y), feedback)
        scale = fields["scale"]
        first = torch.where(centered, -scale[..., :1], scale[..., :1])
        return {**fields, "scale": torch.cat([first, scale[..., 1:]], -1)}

    def decode_keys(self, fields: Encoded, mean: Tensor | None) -> Tensor:
        """Fields -> rotated keys; `mean` [..., head_dim] is added where the flag says so."""
        if mean is None:
            return self.key.decode_rotated(fields)
        scale = fields["scale"]
        centered = torch.signbit(scale[..., :1])
        y = self.key.decode_rotated({**fields, "scale": scale.abs()})
        return torch.where(centered, y + mean, y)
