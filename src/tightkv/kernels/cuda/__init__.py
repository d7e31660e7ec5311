"""Decode attention in CUDA C++, compiled at run time; everything else is the Triton kernels'.

For NVIDIA GPUs that convert fp8 in hardware (sm_89 on), float16 and bfloat16 models, 2 to 4 bits
and head_dim 64, 128 and 256.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tightkv.codec import Codec
from tightkv.kernels import triton as triton_kernels
from tightkv.kernels.cuda.nvrtc import Module, compile_cubin, nvrtc
from tightkv.kernels.view import CacheView
from tightkv.layout import RING_SLACK, PageLayout

__all__ = ["append", "attend", "unavailable", "unsupported"]

_FOLDER = Path(__file__).parent
_SOURCES = {"append": ("append",), "decode": ("primitives", "pages", "softmax", "decode")}
_MAX_QUERIES = RING_SLACK  # more than this is prefill
_EXACT_TOKENS = 16  # that a warp reads at a time
_MOST_SPLITS = 64
_WARPS = 4  # of a block of decode.cu


def unavailable(device_type: str | None, asked: bool = False) -> str | None:
    """Why these kernels cannot run on a kind of device (None: on any here), or None."""
    if device_type not in (None, "cuda"):
        return f"CUDA kernels do not run on {device_type}"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 9):
        return "the GPU is older than sm_89"
    try:
        nvrtc()
    except OSError as error:
        return f"torch's NVRTC was not found: {error}"
    return triton_kernels.unavailable(device_type, asked)


def unsupported(layout: PageLayout) -> str | None:
    """Why these kernels cannot run a config, or None."""
    cfg = layout.cfg
    for side in ("key", "value"):
        if cfg.bits(side) not in (2, 3, 4):
            return f"{side}_bits={cfg.bits(side)}; they have 2, 3 and 4"
    if layout.head_dim not in (64, 128, 256):
        return f"head_dim={layout.head_dim}; they have 64, 128 and 256"
    if cfg.rotation == "haar":
        return 'rotation="haar"; they have "hadamard" and "none"'
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype={layout.dtype}; they have float16 and bfloat16"
    return triton_kernels.unsupported(layout)


class _Rows(ctypes.Structure):
    """`struct Rows` of decode.cu."""

    _fields_ = (
        [("query", ctypes.c_void_p), ("pages", ctypes.c_void_p)]
        + [(name, ctypes.c_void_p) for name in ("block_table", "lengths", "starts", "ring_starts")]
        + [(name, ctypes.c_void_p) for name in ("sink_counts", "ring_rows", "first")]
        + [(name, ctypes.c_void_p) for name in ("ring_key", "ring_value", "sink_key", "sink_value")]
        + [(name, ctypes.c_void_p) for name in ("signs", "partial", "partial_lse", "out", "lse")]
        + [(name, ctypes.c_longlong) for name in ("query_n", "query_h", "out_n", "out_h")]
        + [(name, ctypes.c_longlong) for name in ("table_b", "page_bytes", "total_rows")]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
        + [(name, ctypes.c_int) for name in ("ring", "sinks", "splits", "exact_shares")]
        + [(name, ctypes.c_int) for name in ("window", "causal")]
    )


class _Append(ctypes.Structure):
    """`struct Append` of append.cu."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("key", "value", "pages", "block_table", "lengths")]
        + [(name, ctypes.c_void_p) for name in ("starts", "ring_rows", "exact_starts", "first")]
        + [(name, ctypes.c_void_p) for name in ("ring_key", "ring_value", "sink_key", "sink_value")]
        + [("signs", ctypes.c_void_p)]
        + [(name, ctypes.c_longlong) for name in ("key_n", "key_h", "value_n", "value_h")]
        + [("table_b", ctypes.c_longlong), ("page_bytes", ctypes.c_longlong)]
        + [(name, ctypes.c_int) for name in ("ring", "sinks", "open")]
    )


def append(
    codec: Codec,
    view: CacheView,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    exact_starts: Tensor,
    *,
    max_new: int,
    open_codes: bool,
) -> None:
    """See `reference.append`."""
    layout = codec.layout
    usual = key.dtype == value.dtype == layout.dtype and not codec.cfg.check_finite
    if max_new > RING_SLACK or not usual or not view.batch:
        triton_kernels.append(
            codec, view, key, value, first, exact_starts, max_new=max_new, open_codes=open_codes
        )
        return
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    signs = triton_kernels.rotation_table(codec, "key", key.device)
    arguments = _Append(
        *[
            x.data_ptr()
            for x in (
                key, value, view.pages, view.block_table, view.lengths, view.starts,
                view.ring_rows, exact_starts, first, view.ring_key, view.ring_value,
                view.sink_key, view.sink_value, signs,
            )
        ],
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        view.block_table.stride(0), view.pages.stride(0),
        view.ring_key.shape[1], view.sink_key.shape[1], int(open_codes),
    )  # fmt: skip
    module = _module("append", layout, layout.num_kv_heads, 1, False, key.device)
    module.launch("append", (view.batch * layout.num_kv_heads, 2, 1), 256, arguments)


def attend(
    codec: Codec,
    query: Tensor,
    view: CacheView,
    first: Tensor,
    *,
    max_queries: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend`."""
    layout, device = codec.layout, query.device
    rows, hq, d = query.shape
    decoding = 0 < max_queries <= _MAX_QUERIES and mask is None and new_key is None
    if not decoding or query.dtype != layout.dtype or not rows or not view.batch:
        return triton_kernels.attend(
            codec, query, view, first, max_queries=max_queries, scale=scale, causal=causal,
            window=window, softcap=softcap, mask=mask, new_key=new_key, new_value=new_value,
            out=out,
        )  # fmt: skip
    if query.stride(-1) != 1:
        query = query.contiguous()
    group = hq // layout.num_kv_heads
    columns = max_queries * group
    tiles_n = 1 if columns <= 8 else 2
    module = _module("decode", layout, hq, tiles_n, softcap is not None, device)
    parts = -(-columns // (8 * tiles_n))
    programs = view.batch * layout.num_kv_heads * parts
    tile = Tile.of(layout, tiles_n)
    slots = _processors(device) * tile.blocks
    splits = share_count(programs, slots, min(_MOST_SPLITS, view.block_table.shape[1] // 4))
    groups = -(-(view.ring_key.shape[1] + view.sink_key.shape[1]) // _EXACT_TOKENS)
    exact_shares = min(splits, groups)
    shares = splits + exact_shares if splits > 1 else 0

    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(rows, hq, dtype=torch.float32, device=device)
    partial = torch.empty(shares, rows, hq, d, dtype=torch.float32, device=device)
    partial_lse = torch.empty(shares, rows, hq, dtype=torch.float32, device=device)
    signs = triton_kernels.rotation_table(codec, "value", device)
    arguments = _Rows(
        *[
            x.data_ptr()
            for x in (
                query, view.pages, view.block_table, view.lengths, view.starts, view.ring_starts,
                view.sink_counts, view.ring_rows, first, view.ring_key, view.ring_value,
                view.sink_key, view.sink_value, signs, partial, partial_lse, out, lse,
            )
        ],
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        view.block_table.stride(0), view.pages.stride(0), rows,
        1 / math.sqrt(d) if scale is None else scale, softcap or 0.0,
        view.ring_key.shape[1], view.sink_key.shape[1], splits, exact_shares,
        window or 0, int(causal),
    )  # fmt: skip
    grid = (view.batch * layout.num_kv_heads, splits, parts)
    module.launch("decode", grid, 32 * _WARPS, arguments, shared=tile.launch_bytes(layout, device))
    if splits == 1:
        return out, lse
    pointers = (partial, partial_lse, signs, first, out, lse)
    module.launch(
        "merge",
        (rows * hq, 1, 1),
        256,
        *[ctypes.c_void_p(x.data_ptr()) for x in pointers],
        *[ctypes.c_longlong(n) for n in (out.stride(0), out.stride(1), rows)],
        *[ctypes.c_int(n) for n in (view.batch, splits, shares)],
    )
    return out, lse


@dataclass(frozen=True)
class Tile:
    """How decode.cu is cut: what a warp works on, what is on its way, what fits a processor."""

    blocks_of_32: int  # tokens a warp works on at a time
    stages: int  # tiles in shared memory, the one being read among them
    blocks: int  # blocks of four warps that a processor holds
    tiles_n: int  # eight queries each

    @staticmethod
    def of(layout: PageLayout, tiles_n: int) -> Tile:
        """What was fastest on an H200 (docs/log.md), as far as registers and memory allow."""
        if layout.head_dim > 128:
            return Tile(1, 2, 1 if tiles_n > 1 else 2, tiles_n)
        few_bits = layout.cfg.key_bits + layout.cfg.value_bits <= 4
        return Tile(2, 2, 3 if few_bits and tiles_n == 1 else 2, tiles_n)

    def shared_bytes(self, layout: PageLayout) -> int:
        """sizeof(Shared) in decode.cu."""
        cfg, d, columns = layout.cfg, layout.head_dim, 8 * self.tiles_n
        both = (cfg.key_bits, cfg.value_bits)
        words = [2 if d == 64 and bits == 4 else bits for bits in both]
        loads = -(-d // 128) * sum(words)  # of 16 bytes a lane
        mean = {16: d // 8, 8: d // 16 + 1}.get(cfg.mean_bits if cfg.centered else 0, 1)
        span = max(1, 32 * self.blocks_of_32 // layout.page_size)  # pages in a tile
        stage = self.blocks_of_32 * (512 * loads + 128) + 16 * mean * span
        found = 2 * 4 * columns * (d + 6)
        warp = _round_up(max(self.stages * stage, found))
        return _round_up(_WARPS * warp + 8 * columns * (d // 2 + 4) + 4 * columns + 16)

    def launch_bytes(self, layout: PageLayout, device: torch.device) -> int:
        """As much as keeps further blocks off a processor: they would be missing on another."""
        share = _shared_memory(device) // self.blocks - 1024  # of each the driver takes 1 KiB
        return max(self.shared_bytes(layout), share // 16 * 16)


def _round_up(size: int) -> int:
    return -(-size // 16) * 16


@functools.lru_cache(maxsize=256)
def _module(
    name: str,
    layout: PageLayout,
    query_heads: int,
    tiles_n: int,
    softcap: bool,
    device: torch.device,
) -> Module:
    """The kernels of one source for one layout, compiled once."""
    major, minor = torch.cuda.get_device_capability(device)
    text = source(name, layout, query_heads, tiles_n, softcap)
    return Module(compile_cubin(text, [], f"sm_{major}{minor}"), device)


def source(
    name: str, layout: PageLayout, query_heads: int, tiles_n: int = 1, softcap: bool = False
) -> str:
    """CUDA C++ with the constants of a layout."""
    heads, d = layout.num_kv_heads, layout.head_dim
    tile = Tile.of(layout, tiles_n)
    constants: dict[str, object] = {
        "D": d,
        "HQ": query_heads,
        "HKV": heads,
        "G": query_heads // heads,
        "NT": tiles_n,
        "TB": tile.blocks_of_32,
        "STAGES": tile.stages,
        "SHARED_BYTES": tile.shared_bytes(layout),
        "SOFTCAP": int(softcap),
        "ROTATED": int(layout.cfg.rotation == "hadamard"),
        "BF16": int(layout.dtype == torch.bfloat16),
        "MIN_BLOCKS": tile.blocks,
        "ROOT": _floats(d**-0.5),
        "WIDTH": _floats(d**0.5),
    }
    shared = triton_kernels.constants(layout)
    for field in ("PAGE", "RECORD", "KEY_BITS", "VALUE_BITS", "VALUE_AT", "KEY_SCALE_AT"):
        constants[field] = shared[field]
    for field in ("VALUE_SCALE_AT", "MEAN_AT", "MEAN_BITS"):
        constants[field] = shared[field]
    encode, decode = triton_kernels.books(layout)
    for side in ("KEY", "VALUE"):
        table = decode[f"{side}_TABLE"]
        constants[f"{side}_LOW"] = f"{table & 0xFFFFFFFF}u"
        constants[f"{side}_HIGH"] = f"{(table >> 32) & 0xFFFFFFFF}u"
        constants[f"{side}_UNIT"] = _floats(decode[f"{side}_UNIT"])
        constants[f"{side}_MODE"] = encode[f"{side}_MODE"]
        thresholds, magnitudes = encode[f"{side}_BOOK"]
        constants[f"{side}_THRESHOLDS"] = _floats(*thresholds)
        constants[f"{side}_MAGNITUDES"] = _floats(*magnitudes)
    defines = "".join(f"#define {field} {value}\n" for field, value in constants.items())
    files = [_FOLDER / f"{part}.cu" for part in _SOURCES[name]]
    return defines + "\n".join(file.read_text(encoding="utf-8") for file in files)


def _floats(*values: float) -> str:
    return ", ".join(f"{value!r}f" for value in values)


def share_count(programs: int, slots: int, most: int) -> int:
    """Into how many shares to cut sequences, so that the last wave of blocks is a full one."""
    best, best_time = 1, math.inf
    for shares in range(1, max(1, most) + 1):
        # waves of blocks, each a share long; joining shares costs a little too
        time = -(-programs * shares // slots) / shares * (1 + 0.004 * shares)
        if time < best_time:
            best, best_time = shares, time
    return best


@functools.lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=16)
def _shared_memory(device: torch.device) -> int:
    """Bytes of a processor."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)
