"""Vector quantizers as small objects: encode, decode, inner_product.

Every quantizer works in a rotated frame; `encode` rotates, `decode` rotates back. What they
return is a dict of the fields a cache stores: uint8 codes and float16 numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tightkv.math.codebook import Codebook, get_codebook
from tightkv.math.feedback import MOST_SCALE, gain
from tightkv.math.per_device import PerDevice
from tightkv.math.random import random_normal
from tightkv.math.rotation import Rotation, make_rotation, split_rotation

Encoded = dict[str, Tensor]
FP16_MAX = 65504.0
_QJL_STREAM = 7
TINY = torch.finfo(torch.float32).tiny


def finite(x: Tensor, check: bool = False) -> Tensor:
    """float32 copy of x with NaN as 0 and Inf as the largest float16, or an error if `check`."""
    x = x.float()
    if check:
        bad = int((~torch.isfinite(x)).sum())
        if bad:
            raise ValueError(
                f"{bad} of {x.numel()} elements are NaN or Inf; "
                "fix the input, or set check_finite=False to store NaN as 0 and Inf as 65504"
            )
    return torch.nan_to_num(x, nan=0.0, posinf=FP16_MAX, neginf=-FP16_MAX)


def to_fp16(x: Tensor) -> Tensor:
    """Rounded to float16, saturating instead of overflowing."""
    return x.clamp(-FP16_MAX, FP16_MAX).to(torch.float16)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum of products over the last dimension: float64 inside, so that devices agree."""
    return (a.double() * b.double()).sum(-1, keepdim=True).float()


class Quantizer(ABC):
    """An encoder of vectors of size `dim`, which it rotates first."""

    def __init__(self, dim: int, rotation: str | Rotation, seed: int = 0) -> None:
        if isinstance(rotation, str):
            rotation = make_rotation(rotation, dim, seed)
        self.dim, self.rotation = dim, rotation

    @abstractmethod
    def encode_rotated(self, y: Tensor) -> Encoded:
        """float32 [..., dim] in the rotated frame -> fields."""

    @abstractmethod
    def decode_rotated(self, fields: Encoded) -> Tensor:
        """Fields -> float32 [..., dim] in the rotated frame."""

    def encode(self, x: Tensor, check: bool = False) -> Encoded:
        """Any float dtype, any leading shape [..., dim] -> fields [..., count]."""
        if x.dim() == 0 or x.shape[-1] != self.dim:
            raise ValueError(f"input of shape {tuple(x.shape)}; expected [..., {self.dim}]")
        return self.encode_rotated(self.rotation(finite(x, check)))

    def decode(self, fields: Encoded) -> Tensor:
        """Fields -> float32 [..., dim]."""
        return self.rotation.inverse(self.decode_rotated(fields))

    def inner_product(self, query: Tensor, fields: Encoded) -> Tensor:
        """<query, x> for query [..., dim] that broadcasts against the encoded vectors."""
        return (self.rotation(query) * self.decode_rotated(fields)).sum(-1)


class TurboQuantMSE(Quantizer):
    """Random rotation, one Lloyd-Max code a coordinate, one scale a vector."""

    def __init__(
        self,
        dim: int,
        bits: int,
        *,
        scale_mode: str = "norm",
        codebook: str = "fp8",
        rotation: str | Rotation = "hadamard",
        seed: int = 0,
    ) -> None:
        super().__init__(dim, rotation, seed)
        self.bits, self.scale_mode = bits, scale_mode
        self.codebook: Codebook = get_codebook(codebook, bits, dim)

    def encode_rotated(self, y: Tensor) -> Encoded:
        norm = dot(y, y).sqrt()
        unit = y / norm.clamp_min(TINY)
        codes = self.codebook.encode(unit * math.sqrt(self.dim))
        direction = self._direction(codes)
        return {"codes": codes, "scale": to_fp16(_SCALES[self.scale_mode](y, norm, direction))}

    def encode_with_feedback(self, y: Tensor, factors: Tensor) -> Encoded:
        """Rotated [..., heads, tokens, dim] -> fields, in the metric of `feedback_factors`.

        Products and sums are rounded one by one, in this order, in every encoder.
        """
        norm, factor = dot(y, y).sqrt(), gain(self.bits)
        x = y / norm.clamp_min(TINY) * (factor * math.sqrt(self.dim))
        missed, projected = torch.zeros_like(x), torch.zeros_like(x)
        codes = torch.empty_like(x, dtype=torch.uint8)
        rest = torch.empty_like(x)  # L^T (x - centroids)
        for i in reversed(range(self.dim)):
            now = x[..., i]
            target = now + missed[..., i]
            codes[..., i] = code = self.codebook.encode(target)
            centroid = self.codebook.decode(code)
            rest[..., i] = target - centroid
            row = factors[:, None, i, :i]
            missed[..., :i] += (now - centroid)[..., None] * row
            projected[..., :i] += now[..., None] * row
        weights = factors.diagonal(dim1=1, dim2=2)[:, None]
        size = (x + projected).double()
        own = weights.double() * size
        whole = (own * size).sum(-1, keepdim=True).float()
        along = (own * (size - rest.double())).sum(-1, keepdim=True).float()
        ratio = (whole / along.clamp_min(TINY)).clamp(1 / MOST_SCALE, MOST_SCALE)
        return {"codes": codes, "scale": to_fp16(norm * (1 / factor) * ratio)}

    def decode_rotated(self, fields: Encoded) -> Tensor:
        return self._direction(fields["codes"]) * fields["scale"].float()

    def _direction(self, codes: Tensor) -> Tensor:
        # A product: dividing by a constant rounds differently on CPU and GPU.
        return self.codebook.decode(codes) * (1 / math.sqrt(self.dim))


_SCALES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # A zero vector has scale zero: at 8 bits its direction is zero too.
    "norm": lambda y, norm, c: norm,
    "corrected": lambda y, norm, c: norm / dot(c, c).sqrt().clamp_min(TINY),
    "least_squares": lambda y, norm, c: dot(y, c) / dot(c, c).clamp_min(TINY),
    "unbiased": lambda y, norm, c: norm.square() / dot(y, c).clamp_min(TINY),
}


class TurboQuantProd(Quantizer):
    """TurboQuantMSE at one bit fewer (of 2 or more), plus a one-bit QJL sketch of what it missed.

    Inner products with any query are unbiased over the draw of the sketch.
    """

    def __init__(self, dim: int, bits: int, *, seed: int = 0, **options: Any) -> None:
        """`options`: those of `TurboQuantMSE`."""
        self.coarse = TurboQuantMSE(dim, bits - 1, seed=seed, **options)
        super().__init__(dim, self.coarse.rotation)
        self._sketch = PerDevice(random_normal(seed, _QJL_STREAM, (dim, dim)).float())

    def sketch(self, device: torch.device) -> Tensor:
        """The [dim, dim] Gaussian matrix S."""
        return self._sketch.on(device)

    def encode_rotated(self, y: Tensor) -> Encoded:
        fields = self.coarse.encode_rotated(y)
        rest = y - self.coarse.decode_rotated(fields)
        signs = (rest @ self.sketch(y.device).T < 0).to(torch.uint8)
        return {**fields, "signs": signs, "residual": to_fp16(dot(rest, rest).sqrt())}

    def decode_rotated(self, fields: Encoded) -> Tensor:
        signs = 1.0 - 2.0 * fields["signs"].float()
        rest = signs @ self.sketch(signs.device)
        factor = math.sqrt(math.pi / 2) / self.dim
        return self.coarse.decode_rotated(fields) + factor * fields["residual"].float() * rest


class GroupUniform(Quantizer):
    """Asymmetric uniform levels between each group's minimum and maximum; no rotation."""

    def __init__(self, dim: int, bits: int, *, group_size: int = 32) -> None:
        super().__init__(dim, "none")
        self.top, self.group_size = 2**bits - 1, group_size

    def encode_rotated(self, y: Tensor) -> Encoded:
        groups = y.unflatten(-1, (-1, self.group_size))
        low = to_fp16(groups.amin(-1, keepdim=True))
        scale = to_fp16((groups.amax(-1, keepdim=True) - low.float()) * (1 / self.top))
        step = scale.float()
        levels = (groups - low.float()) / torch.where(step > 0, step, 1.0)
        codes = levels.round().clamp(0, self.top).to(torch.uint8)
        return {"codes": codes.flatten(-2), "scale": scale.squeeze(-1), "low": low.squeeze(-1)}

    def decode_rotated(self, fields: Encoded) -> Tensor:
        levels = fields["codes"].float().unflatten(-1, (-1, self.group_size))
        return (
            levels * fields["scale"].float()[..., None] + fields["low"].float()[..., None]
        ).flatten(-2)


class AbsMax(Quantizer):
    """Uniform mid-rise levels up to the largest magnitude of the rotated vector."""

    def __init__(
        self, dim: int, bits: int, *, rotation: str | Rotation = "hadamard", seed: int = 0
    ) -> None:
        super().__init__(dim, rotation, seed)
        self.half = 2 ** (bits - 1)

    def encode_rotated(self, y: Tensor) -> Encoded:
        scale = to_fp16(y.abs().amax(-1, keepdim=True) / self.half)
        step = scale.float()
        level = (y.abs() / torch.where(step > 0, step, 1.0)).floor().clamp(max=self.half - 1)
        codes = level.to(torch.uint8) + (y < 0).to(torch.uint8) * self.half  # sign and magnitude
        return {"codes": codes, "scale": scale}

    def decode_rotated(self, fields: Encoded) -> Tensor:
        codes = fields["codes"].float()
        negative = codes >= self.half
        level = torch.where(negative, codes - self.half, codes) + 0.5
        return torch.where(negative, -level, level) * fields["scale"].float()


class OutlierMSE(Quantizer):
    """TurboQuantMSE twice: a static subset of channels with more bits, the rest with fewer.

    Each part has its own rotation and scale. The wide part comes first in the rotated frame.
    """

    def __init__(
        self,
        dim: int,
        bits: int,
        channels: tuple[int, ...],
        *,
        extra_bits: int = 1,
        rotation: str = "hadamard",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """`options`: those of `TurboQuantMSE`."""
        super().__init__(dim, split_rotation(rotation, dim, seed, channels))
        options["rotation"] = "none"  # the frame is already rotated
        self.wide = TurboQuantMSE(len(channels), bits + extra_bits, **options)
        self.narrow = TurboQuantMSE(dim - len(channels), bits, **options)

    def encode_rotated(self, y: Tensor) -> Encoded:
        wide = self.wide.encode_rotated(y[..., : self.wide.dim])
        narrow = self.narrow.encode_rotated(y[..., self.wide.dim :])
        scale = torch.cat([wide["scale"], narrow["scale"]], -1)
        return {"codes_wide": wide["codes"], "codes": narrow["codes"], "scale": scale}

    def decode_rotated(self, fields: Encoded) -> Tensor:
        scale = fields["scale"]
        wide = self.wide.decode_rotated({"codes": fields["codes_wide"], "scale": scale[..., :1]})
        narrow = self.narrow.decode_rotated({"codes": fields["codes"], "scale": scale[..., 1:]})
        return torch.cat([wide, narrow], -1)


class Raw(Quantizer):
    """Sixteen bits: stored as they come."""

    def __init__(self, dim: int, dtype: torch.dtype = torch.float16) -> None:
        super().__init__(dim, "none")
        self.dtype = dtype

    def encode_rotated(self, y: Tensor) -> Encoded:
        return {"raw": to_fp16(y) if self.dtype == torch.float16 else y.to(self.dtype)}

    def decode_rotated(self, fields: Encoded) -> Tensor:
        return fields["raw"].float()
