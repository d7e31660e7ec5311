"""Where every byte of a page lies. No other module knows an offset or a size.

A page holds `page_size` tokens of one layer: one record per KV head, one plane per field
inside a record (docs/layout.md draws it). Planes are ordered for the decoders:

- key codes  [block of 32 tokens][word j][row r][chunk c][i]: token = 32 * block + 8 * i + r
- value codes  [block][word j][chunk r][pair c][i]: tokens come in pairs packed together,
  pair = 16 * block + 4 * i + c
- per-token fp16 numbers [field][block][row r][i]: token = 32 * block + 8 * i + r

so one 16-byte load gives a GPU lane or a CPU vector the same word of four rows.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.math.per_device import Constant
from tightkv.pages.pack import pack, unpack

BLOCK = 32  # tokens whose codes are interleaved
ALIGN = 16  # bytes every plane starts on
SIDES = ("key", "value")
RING_SLACK = 32  # tokens that can be taken back without shortening the window
MAX_TOKENS = 1 << 30  # in a sequence: kernels count in 32 bits


@dataclass(frozen=True)
class TokenField:
    """One thing stored for each token: `count` numbers of `bits` bits."""

    name: str
    bits: int
    count: int

    @property
    def is_codes(self) -> bool:
        return self.bits <= 8


def token_fields(cfg: KVQuantConfig, side: str, head_dim: int) -> tuple[TokenField, ...]:
    """What one token of one head stores."""
    bits, method = cfg.bits(side), cfg.method(side)
    if bits == 16:
        return (TokenField("raw", 16, head_dim),)
    if cfg.has_outliers(side):
        wide = len(outlier_channels(cfg, head_dim))
        return (
            TokenField("codes_wide", bits + cfg.outlier_extra_bits, wide),
            TokenField("codes", bits, head_dim - wide),
            TokenField("scale", 16, 2),
        )
    if method == "prod":
        return (
            TokenField("codes", bits - 1, head_dim),
            TokenField("signs", 1, head_dim),
            TokenField("scale", 16, 1),
            TokenField("residual", 16, 1),
        )
    if method == "group":
        if head_dim % cfg.group_size:
            raise ValueError(
                f"group_size={cfg.group_size} does not divide head_dim={head_dim}; use 16"
            )
        groups = head_dim // cfg.group_size
        return (
            TokenField("codes", bits, head_dim),
            TokenField("scale", 16, groups),
            TokenField("low", 16, groups),
        )
    return (TokenField("codes", bits, head_dim), TokenField("scale", 16, 1))


def ring_tokens(cfg: KVQuantConfig, spare: bool = True) -> int:
    """Tokens a sequence's ring holds: the window, and `spare` ones for speculation."""
    return cfg.exact_pages * cfg.page_size + (RING_SLACK if spare else 0)


def window_step(cfg: KVQuantConfig) -> int:
    """Tokens by which the window moves on: pages with 16 bits, single tokens with 8.

    It ends with the step of the newest token, and has exact_pages * page_size tokens.
    """
    return 1 if cfg.window_bits == 8 else cfg.page_size


def seal_lag(cfg: KVQuantConfig) -> int:
    """Tokens that follow a page when its first one leaves the window: it is sealed then.

    So where open pages have no codes, and no other sequence needs complete ones.
    """
    return (cfg.exact_pages - 1) * cfg.page_size + 1


def outlier_channels(cfg: KVQuantConfig, head_dim: int) -> tuple[int, ...]:
    """The static outlier channels: as configured, else the slowest RoPE channels of each half.

    RoPE turns those least within a context, so they keep the largest mean and range.
    """
    count = round(cfg.outlier_share * head_dim / 16) * 16
    if not 0 < count < head_dim:
        raise ValueError(
            f"outlier_share={cfg.outlier_share} gives {count} of {head_dim} channels; "
            f"it must give a multiple of 16 between 16 and {head_dim - 16}"
        )
    if cfg.outlier_channels:
        if len(cfg.outlier_channels) != count or max(cfg.outlier_channels) >= head_dim:
            raise ValueError(
                f"outlier_channels names {len(cfg.outlier_channels)} channels up to "
                f"{max(cfg.outlier_channels)}; outlier_share={cfg.outlier_share} of head_dim="
                f"{head_dim} needs {count} below {head_dim}"
            )
        return tuple(sorted(cfg.outlier_channels))
    half, each = head_dim // 2, count // 2
    return (*range(half - each, half), *range(head_dim - each, head_dim))


@dataclass(frozen=True)
class Plane(TokenField):
    """Bytes [offset, offset + size) of a record hold this field of `side` for all tokens."""

    side: str
    offset: int
    size: int

    @property
    def is_paired(self) -> bool:
        """Whether the codes of two tokens are packed together."""
        return self.is_codes and self.side == "value"


def _derived() -> Any:
    """A field that follows from the others."""
    return dataclasses.field(init=False, repr=False, compare=False)


@dataclass(frozen=True)
class PageLayout(Constant):
    """The page of one layer: sizes, offsets, and how planes are read and written.

    A value: layouts of equal arguments are equal. Take it from
    `page_layout`, which gives layers that are alike the same object.
    """

    cfg: KVQuantConfig
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    planes: Mapping[tuple[str, str], Plane] = dataclasses.field(
        init=False, repr=False, compare=False
    )
    mean_offset: int = _derived()
    record_bytes: int = _derived()
    _hash: int = _derived()

    def __post_init__(self) -> None:
        cfg, head_dim = self.cfg, self.head_dim
        if head_dim < 16 or head_dim % 16:
            raise ValueError(f"head_dim={head_dim}; supported: multiples of 16 from 16 up")
        if self.num_kv_heads < 1:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}; it must be at least 1")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"dtype={self.dtype}; supported: bfloat16, float16, float32")
        planes = {}
        fields = [(side, f) for side in SIDES for f in token_fields(cfg, side, head_dim)]
        end = 0
        for side, entry in sorted(fields, key=lambda pair: not pair[1].is_codes):
            size = entry.count * entry.bits * cfg.page_size // 8
            planes[side, entry.name] = Plane(entry.name, entry.bits, entry.count, side, end, size)
            end = _align(end + size)
        object.__setattr__(self, "planes", MappingProxyType(planes))
        object.__setattr__(self, "mean_offset", end)
        if cfg.centered:
            end += _align(head_dim * 2 if cfg.mean_bits == 16 else head_dim + 2)
        object.__setattr__(self, "record_bytes", end)
        # Kept: layouts are keys of the caches on the way to every launch.
        object.__setattr__(self, "_hash", hash((cfg, self.num_kv_heads, head_dim, self.dtype)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return page_layout, (self.cfg, self.num_kv_heads, self.head_dim, self.dtype)

    def __repr__(self) -> str:
        return (
            f"PageLayout({self.cfg.name}, heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"page={self.page_size} tokens, {self.page_bytes} bytes)"
        )

    # --- sizes ---
    @property
    def page_size(self) -> int:
        return self.cfg.page_size

    @property
    def raw_dtype(self) -> torch.dtype:
        """The dtype of raw planes: 16 bits means 16, so it is float16 for float32 models."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float16

    @property
    def page_bytes(self) -> int:
        return self.num_kv_heads * self.record_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes a token of this layer takes in pages, scales, means and padding included."""
        return self.page_bytes / self.page_size

    @property
    def exact_bytes_per_token(self) -> int:
        """Bytes of a token's exact key and value, which are kept in `dtype`."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def ring_tokens(self) -> int:
        return ring_tokens(self.cfg)

    @property
    def ring_dtype(self) -> torch.dtype:
        """The dtype of a ring's keys and values."""
        return torch.int8 if self.cfg.window_bits == 8 else self.dtype

    @property
    def ring_bytes_per_token(self) -> int:
        """Bytes of a token's key and value in a ring, their float16 scales included."""
        if self.cfg.window_bits == 16:
            return self.exact_bytes_per_token
        return self.num_kv_heads * (self.ring_key_dim + self.head_dim + 4)

    @property
    def ring_key_dim(self) -> int:
        """Elements of a key in a ring: with 8 bits keys have 12 (`pages.window`)."""
        return self.head_dim * 3 // 2 if self.cfg.window_bits == 8 else self.head_dim

    def new_ring(
        self, rows: int, tokens: int, device: torch.device | str = "cpu"
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Zeroed keys and values [rows, tokens, Hkv, D] of rings, and with 8 bits their scales.

        Then keys are [rows, tokens, Hkv, 3 D / 2], and scales float16 [rows, tokens, Hkv, 2]: of
        the key, of the value.
        """
        shape = (rows, tokens, self.num_kv_heads)
        key, value = (
            torch.zeros(*shape, dim, dtype=self.ring_dtype, device=device)
            for dim in (self.ring_key_dim, self.head_dim)
        )
        if self.cfg.window_bits == 16:
            return key, value, None
        return key, value, torch.zeros(*shape, 2, dtype=torch.float16, device=device)

    def sequence_bytes(self, tokens: int = MAX_TOKENS) -> int:
        """Bytes a sequence holds beside its pages: ring, sinks and five int32 counters."""
        ring = min(tokens, self.ring_tokens) * self.ring_bytes_per_token
        return ring + self.cfg.sinks * self.exact_bytes_per_token + 5 * 4

    def window_bytes(self, window: int, tokens: int = MAX_TOKENS) -> int:
        """Most bytes of a sequence in a layer that keeps the pages of a sliding window alone."""
        most = -(-(window - 1) // self.page_size) + 1  # it may begin anywhere in the first
        pages = min(most, -(-tokens // self.page_size))
        return pages * (self.page_bytes + 4) + self.sequence_bytes(tokens)

    def total_bytes(self, tokens: int, sequences: int = 1, encode_partial_page: bool = True) -> int:
        """Bytes of a layer that holds `sequences` sequences of `tokens` tokens each.

        Pages, block-table entries, rings and sinks. `encode_partial_page` says whether all pages
        have codes or those of the window live in the ring alone.
        """
        pages = -(-tokens // self.page_size)
        if not encode_partial_page:
            pages = max(tokens - seal_lag(self.cfg), 0) // self.page_size
        return sequences * (pages * (self.page_bytes + 4) + self.sequence_bytes(tokens))

    def read_pages(self, max_tokens: int) -> int:
        """Pages of at most `max_tokens` tokens that can be read: the newest stay in the ring."""
        return max(-(-max_tokens // self.page_size) - self.cfg.exact_pages, 0)

    def ring_holds(self, window: int | None) -> bool:
        """Whether the ring has every token that a sliding window shows, so that no page is read."""
        return window is not None and window - 1 <= (self.cfg.exact_pages - 1) * self.page_size

    @property
    def ratio(self) -> float:
        """16-bit bytes over page bytes, for a long sequence."""
        return 4 * self.num_kv_heads * self.head_dim / self.bytes_per_token

    # --- whole planes ---
    def new_pages(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """[count, num_kv_heads, record_bytes] uint8, zeroed."""
        shape = (count, self.num_kv_heads, self.record_bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def read(self, records: Tensor, side: str) -> dict[str, Tensor]:
        """uint8 [..., record_bytes] -> each field of `side` as [..., page_size, count]."""
        out = {}
        for plane in self._side_planes(side):
            rows = records[..., self._index(plane, records.device)]
            if plane.is_codes:
                codes = unpack(rows, plane.bits)
                out[plane.name] = _split_pairs(codes) if plane.is_paired else codes
            else:
                out[plane.name] = _as_dtype(rows, self._number_dtype(plane))
        return out

    def write(self, records: Tensor, side: str, fields: dict[str, Tensor]) -> None:
        """Write whole planes in place: the inverse of `read`."""
        for plane in self._side_planes(side):
            value = fields[plane.name]
            rows = self._row_bytes(plane, _join_pairs(value) if plane.is_paired else value)
            records[..., self._index(plane, records.device)] = rows

    # --- single tokens ---
    def write_tokens(
        self, pages: Tensor, page: Tensor, offset: Tensor, side: str, fields: dict[str, Tensor]
    ) -> None:
        """Write T tokens at (page[t], offset[t]); fields are [T, heads, count]. No neighbor
        changes. Two tokens may share a packed pair; the same slot must not appear twice."""
        for plane in self._side_planes(side):
            value, index = fields[plane.name], self._index(plane, pages.device)
            if not plane.is_paired:
                _scatter(pages, page, index[offset], self._row_bytes(plane, value))
                continue
            for parity in (0, 1):  # pair mates in one call must not race
                pick = (offset % 2 == parity).nonzero().squeeze(-1)
                at = page[pick], index[offset[pick] // 2]
                pair = unpack(_gather(pages, *at), plane.bits)
                codes = pair.unflatten(-1, (-1, 2)).clone()  # [t, heads, count, 2]
                codes[..., parity] = value[pick]
                _scatter(pages, *at, pack(codes.flatten(-2), plane.bits))

    # --- the page mean ---
    def read_mean(self, records: Tensor) -> Tensor:
        """uint8 [..., record_bytes] -> float32 [..., head_dim], in the rotated frame."""
        d = self.head_dim
        if self.cfg.mean_bits == 16:
            data = records[..., self.mean_offset : self.mean_offset + 2 * d]
            return _as_dtype(data, torch.float16).float()
        levels = _as_dtype(records[..., self.mean_offset : self.mean_offset + d], torch.int8)
        scale = records[..., self.mean_offset + d : self.mean_offset + d + 2]
        return levels.float() * _as_dtype(scale, torch.float16).float()

    def write_mean(self, records: Tensor, mean: Tensor) -> None:
        """float32 [..., head_dim]; what `read_mean` gives back is the rounded mean."""
        d = self.head_dim
        if self.cfg.mean_bits == 16:
            data = _as_bytes(mean.to(torch.float16))
            records[..., self.mean_offset : self.mean_offset + 2 * d] = data
            return
        scale = (mean.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
        levels = mean / scale.float().clamp_min(torch.finfo(torch.float16).tiny)
        levels = levels.round().clamp(-127, 127).to(torch.int8)
        records[..., self.mean_offset : self.mean_offset + d] = _as_bytes(levels)
        records[..., self.mean_offset + d : self.mean_offset + d + 2] = _as_bytes(scale)

    # --- orders ---
    def _side_planes(self, side: str) -> list[Plane]:
        return [plane for plane in self.planes.values() if plane.side == side]

    def _number_dtype(self, plane: Plane) -> torch.dtype:
        return self.raw_dtype if plane.name == "raw" else torch.float16

    def _row_bytes(self, plane: Plane, value: Tensor) -> Tensor:
        """Rows [..., count], of pairs [..., 2 count], -> uint8 [..., row bytes]."""
        if plane.is_codes:
            return pack(value, plane.bits)
        return _as_bytes(value.to(self._number_dtype(plane)))

    @lru_cache(maxsize=1024)  # noqa: B019 - layouts are values, and few
    def _index(self, plane: Plane, device: torch.device) -> Tensor:
        """[rows, row bytes]: where in a record the bytes of each token lie, or of each pair."""
        byte, blocks = torch.arange(plane.size, device="cpu"), self.page_size // BLOCK
        if plane.is_paired:  # [block, word j, chunk r, pair c, i, element bytes]
            x = byte.view(blocks, plane.bits, plane.count // 16, 4, 4, 4)
            rows = x.permute(0, 4, 3, 2, 1, 5).flatten(0, 2).flatten(1)
        elif plane.is_codes:  # [block, word j, row r, chunk c, i, element bytes]
            chunk = 32 if plane.count % 32 == 0 else 16
            x = byte.view(blocks, plane.bits, 8, plane.count // chunk, 4, chunk // 8)
            rows = x.permute(0, 4, 2, 3, 1, 5).flatten(0, 2).flatten(1)
        elif plane.name == "raw":
            rows = byte.view(self.page_size, -1)
        else:  # [number, block, row r, i, byte]
            x = byte.view(plane.count, blocks, 8, 4, 2)
            rows = x.permute(1, 3, 2, 0, 4).flatten(0, 2).flatten(1)
        return (plane.offset + rows).to(device)


def page_layout(
    cfg: KVQuantConfig, num_kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16
) -> PageLayout:
    """The layout of these arguments; equal ones give the same object."""
    return _cached_layout(cfg, num_kv_heads, head_dim, dtype)


_cached_layout = lru_cache(maxsize=1024)(PageLayout)


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype of exact tokens in a model that computes in `dtype`."""
    return torch.float16 if dtype == torch.float32 else dtype


def _align(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _as_dtype(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.contiguous().view(dtype)


def _as_bytes(x: Tensor) -> Tensor:
    """[..., n] -> uint8. A single element may be contiguous and have any stride."""
    x = x.contiguous() if x.shape[-1] > 1 else x.clone(memory_format=torch.contiguous_format)
    return x.view(torch.uint8)


def _join_pairs(codes: Tensor) -> Tensor:
    """[..., page_size, n] -> [..., page_size / 2, 2n], mates adjacent."""
    return codes.unflatten(-2, (-1, 2)).transpose(-1, -2).flatten(-2)


def _split_pairs(rows: Tensor) -> Tensor:
    return rows.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-3, -2)


def _scatter(pages: Tensor, page: Tensor, index: Tensor, data: Tensor) -> None:
    """pages[page[t], h, index[t]] = data[t, h]."""
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]
    pages[page[:, None, None], heads, index[:, None, :]] = data


def _gather(pages: Tensor, page: Tensor, index: Tensor) -> Tensor:
    heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]
    return pages[page[:, None, None], heads, index[:, None, :]]
