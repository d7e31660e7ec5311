"""Pages of latent attention (MLA): one vector per token in place of keys and values.

A page holds `page_size` tokens of one layer, plane by plane: the codes of the latents, a row per
token as `pack` makes it; the RoPE parts of the keys, in the model's dtype; the scales, a byte each.

A scale is the norm as a float of five bits of exponent and three of mantissa (e5m3), 0 for zero.
It is rounded before the codes are chosen, so that they make up for its error: the distortion at 4
bits is 0.8% larger than with a float16.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.math.codebook import Codebook, get_codebook
from tightkv.math.quantize import TINY, dot, finite
from tightkv.math.rotation import Rotation, make_rotation
from tightkv.pages.pack import pack, unpack

LATENT_BITS = (2, 3, 4)
RANKS = range(64, 513, 64)
ROPE_DIMS = (16, 32, 64, 128)
SCALE_SHIFT = 20  # drops all but three bits of a float32's mantissa
SCALE_BIAS = 111 << 3  # code 0 is 2**-16, which stands for zero; 255 is 61,440


@dataclass(frozen=True)
class LatentLayout:
    """Sizes and offsets of a page, in bytes. Equal arguments make equal layouts."""

    cfg: KVQuantConfig
    rank: int  # numbers of a latent vector (kv_lora_rank)
    rope_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        cfg = self.cfg
        if self.bits not in LATENT_BITS:
            raise ValueError(
                f"{cfg.name} for a layer with latent attention (MLA): its one vector per token "
                f"takes the larger of key_bits and value_bits, {self.bits}; supported: 2, 3, 4"
            )
        if cfg.codebook != "fp8" or {cfg.key_method, cfg.value_method} != {"mse"}:
            raise ValueError(
                f"latent attention (MLA) with codebook={cfg.codebook!r} and methods "
                f'{cfg.key_method!r}, {cfg.value_method!r}; supported: "fp8" and "mse"'
            )
        if cfg.outlier_share:
            raise ValueError("latent attention (MLA) with outlier channels; set outlier_share=0")
        if self.rank not in RANKS:
            raise ValueError(f"kv_lora_rank={self.rank}; supported: multiples of 64 up to 512")
        if self.rope_dim not in ROPE_DIMS:
            raise ValueError(f"qk_rope_head_dim={self.rope_dim}; supported: 16, 32, 64, 128")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype={self.dtype}; supported: bfloat16, float16, float32")

    @property
    def bits(self) -> int:
        return max(self.cfg.key_bits, self.cfg.value_bits)

    @property
    def page_size(self) -> int:
        return self.cfg.page_size

    @property
    def code_bytes(self) -> int:
        """The bytes of one token's codes."""
        return self.rank * self.bits // 8

    @property
    def rope_bytes(self) -> int:
        return self.rope_dim * self.dtype.itemsize

    @property
    def rope_offset(self) -> int:
        return self.page_size * self.code_bytes

    @property
    def scale_offset(self) -> int:
        return self.rope_offset + self.page_size * self.rope_bytes

    @property
    def page_bytes(self) -> int:
        return self.scale_offset + self.page_size

    @property
    def bytes_per_token(self) -> int:
        return self.page_bytes // self.page_size

    @property
    def exact_bytes_per_token(self) -> int:
        return (self.rank + self.rope_dim) * self.dtype.itemsize

    # --- tokens of pages [pages, page_bytes] ---
    def write(
        self, pages: Tensor, slots: Tensor, codes: Tensor, scale: Tensor, rope: Tensor
    ) -> None:
        """Tokens at slots[t] = page * page_size + place: codes [T, rank], scale [T], rope."""
        page, place = slots // self.page_size, slots % self.page_size
        planes = self._planes(pages)
        planes[0][page, place] = pack(codes, self.bits)
        planes[1][page, place] = rope.to(self.dtype).contiguous().view(torch.uint8)
        planes[2][page, place] = scale

    def read(self, pages: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes [..., rank], scales [...] and RoPE parts of the tokens at `slots`."""
        page, place = slots // self.page_size, slots % self.page_size
        packed, rope, scale = (plane[page, place] for plane in self._planes(pages))
        return unpack(packed, self.bits), scale, rope.contiguous().view(self.dtype)

    def _planes(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the bytes: [pages, page_size, bytes] of codes and RoPE, [pages, page_size]."""
        ends = (self.rope_offset, self.scale_offset, self.page_bytes)
        codes, rope, scale = pages[:, : ends[2]].tensor_split(ends[:2], dim=1)
        shape = (self.page_size, -1)
        return codes.unflatten(1, shape), rope.unflatten(1, shape), scale


def latent_layout(
    cfg: KVQuantConfig, rank: int, rope_dim: int, dtype: torch.dtype = torch.bfloat16
) -> LatentLayout:
    """The layout of every layer of a model; ValueError where `cfg` asks for what has none."""
    if cfg.names_layers:
        raise ValueError(
            "layer_bits and protected layers in a model with latent attention (MLA); all its "
            "layers have the same bits: set protected_first and protected_last to 0 and leave "
            "layer_bits out"
        )
    if cfg.calibration:
        raise ValueError(
            f"calibration={cfg.calibration!r} in a model with latent attention (MLA), for which "
            "there are none; leave it out"
        )
    return LatentLayout(cfg.for_layer(0, 1), rank, rope_dim, dtype)


class LatentCodec:
    """Latent vectors to codes and scales, and back."""

    def __init__(self, layout: LatentLayout) -> None:
        self.layout = layout
        self.rotation: Rotation = make_rotation(layout.cfg.rotation, layout.rank, layout.cfg.seed)
        self.codebook: Codebook = get_codebook("fp8", layout.bits)

    @cached_property
    def gain(self) -> float:
        """The factor that makes up for centroids being shorter than what they stand for."""
        return 1 / (1 - self.codebook.distortion)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., rank] -> codes uint8 [..., rank], scales uint8 [...]."""
        y = self.rotation(finite(x, self.layout.cfg.check_finite))
        code = scale_code(dot(y, y).sqrt())
        unit = y / scale_value(code).clamp_min(TINY)
        codes = self.codebook.encode(unit * math.sqrt(self.layout.rank))
        return codes, code.squeeze(-1)

    def decode_rotated(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Codes and scales -> float32 [..., rank], in the rotated frame."""
        factor = scale_value(scale) * (self.gain / math.sqrt(self.layout.rank))
        return self.codebook.decode(codes) * factor.unsqueeze(-1)

    def decode(self, codes: Tensor, scale: Tensor) -> Tensor:
        return self.rotation.inverse(self.decode_rotated(codes, scale))


def scale_code(norm: Tensor) -> Tensor:
    """float32 norms, rounded to the nearest e5m3 -> uint8."""
    bits = norm.contiguous().view(torch.int32) + (1 << (SCALE_SHIFT - 1))
    return ((bits >> SCALE_SHIFT) - SCALE_BIAS).clamp(0, 255).to(torch.uint8)


def scale_value(code: Tensor) -> Tensor:
    """uint8 -> float32."""
    value = ((code.int() + SCALE_BIAS) << SCALE_SHIFT).view(torch.float32)
    return torch.where(code == 0, 0.0, value)
