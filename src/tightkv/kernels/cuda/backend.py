"""Append and decode attention in CUDA C++, compiled at run time; prefill is the Triton kernels'.

For NVIDIA GPUs from sm_80 on, float16 and bfloat16 models and head_dim 64 to 256, and 512 of at
most 4 bits; error feedback for powers of two.
"""

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tightkv.kernels.backend import Takes
from tightkv.kernels.cuda.decode_plan import DecodePlan, DecodeTile, padded_dim, processor_count
from tightkv.kernels.cuda.driver import Module, capture_of
from tightkv.kernels.cuda.nvrtc import compile_cubin, load_torch_nvrtc
from tightkv.kernels.cuda.params import (
    AppendParams,
    DecodeParams,
    PlanParams,
    SealParams,
    StepParams,
)
from tightkv.kernels.cuda.source import SPLIT_PLAN, STATIC_STEP, included, source
from tightkv.kernels.triton import backend as triton_kernels
from tightkv.kernels.triton.device import device_guard, last_contiguous
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView, SealedLayer
from tightkv.math.rotation import Rotation
from tightkv.pages.codec import Codec
from tightkv.pages.layout import RING_SLACK, PageLayout

NAME = "cuda"
TAKES = Takes(centers=True, ragged=True, graphs=True, short_prompts=True, late_sealing=True)

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512)
_MANY_THREADS, _FEW_THREADS = 256, 128  # of a block that appends
_MOST_BLOCKS_Z = 65_535  # of a grid; blocks take further pages in turn
_STEP_THREADS, _PLAN_THREADS = 128, 1024
_PLANNED_BYTES = 16  # that split_plan.cu writes for a block
_SEAL_THREADS, _SEAL_BLOCKS = 128, 4  # of a block that seals with feedback, and blocks a processor
_SEAL_CHANNELS = 2048  # that it encodes at once, of all its tokens
_KEYS_APART, _KEYS_LATER = 2, 3  # `encode` of encode.cuh


def unavailable(device_type: str | None, asked: bool = False) -> str | None:
    """Why these kernels cannot run on a kind of device (None: on any here), or None."""
    if device_type not in (None, "cuda"):
        return f"CUDA kernels do not run on {device_type}"
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80"
    try:
        load_torch_nvrtc()
    except OSError as error:
        return f"torch's NVRTC was not found: {error}"
    return triton_kernels.unavailable(device_type, asked)


def unsupported(layout: PageLayout) -> str | None:
    """Why these kernels cannot run a config, or None."""
    cfg = layout.cfg
    if layout.head_dim not in HEAD_DIMS:
        return f"head_dim={layout.head_dim}; they have {', '.join(map(str, HEAD_DIMS))}"
    if layout.head_dim > 256 and 8 in (cfg.key_bits, cfg.value_bits):
        return f"head_dim={layout.head_dim} with 8-bit codes; they have it with 2 to 4 bits"
    if cfg.rotation == "haar":
        return 'rotation="haar"; they have "hadamard" and "none"'
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype={layout.dtype}; they have float16 and bfloat16"
    return triton_kernels.unsupported(layout)


@device_guard
def append(
    codec: Codec, view: CacheView, key: Tensor, value: Tensor, options: AppendOptions
) -> None:
    """See `reference.append`; tokens are stored relative to `view.centers`."""
    layout, centers = codec.layout, view.centers
    usual = key.dtype == value.dtype == layout.dtype and not codec.cfg.check_finite
    sealed_here = view.feedback is None or padded_dim(layout) == layout.head_dim
    if not usual or not view.batch or not sealed_here:
        if centers is not None:
            key, value = key - centers[0], value - centers[1]
        triton_kernels.append(codec, view, key, value, options)
        return
    key, value = last_contiguous(key), last_contiguous(value)
    if view.feedback is not None:
        key = _aligned(key)
    tensors = (
        key, value, view.pages, view.block_table, view.lengths, view.left_pad, view.ring_rows,
        options.ring_valid_from, options.cu_seqlens, view.ring_key, view.ring_value, view.sink_key,
        view.sink_value, codec.key.rotation.table(key.device),
    )  # fmt: skip
    arguments = [
        *[x.data_ptr() for x in tensors],
        *([0, 0] if centers is None else [x.data_ptr() for x in centers]),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        view.block_table.stride(0), view.pages.stride(0),
        view.ring_key.shape[1], view.sink_key.shape[1], int(options.encode_partial_page),
    ]  # fmt: skip
    if options.max_new <= RING_SLACK:
        _append_few(layout, view, arguments, options.lag)
    else:
        _append_many(layout, view, arguments, options.max_new, options.lag)


def _append_many(
    layout: PageLayout, view: CacheView, arguments: Sequence[int], max_new: int, lag: int
) -> None:
    """Many tokens. Pages are sealed from the ring before another launch overwrites it."""
    module = _module("append", layout, layout.num_kv_heads, None, False, view.pages.device)
    heads = view.batch * layout.num_kv_heads
    touched = min((max_new - 2) // layout.page_size + 2, _MOST_BLOCKS_Z)
    params = AppendParams(*arguments, 0, _encode(view), _scales(view), lag)
    module.launch("append", (heads, 2, touched), _MANY_THREADS, params)
    _seal(layout, view, params, -(-max_new // layout.page_size))
    copies = -(-min(max_new, view.ring_key.shape[1]) // 32)
    params = AppendParams(*arguments, 1, 0, _scales(view), lag)
    module.launch("append", (heads, 2, copies), _MANY_THREADS, params)


def _append_few(layout: PageLayout, view: CacheView, arguments: Sequence[int], lag: int) -> None:
    """A few tokens of each sequence, as in a decode step."""
    encode = _KEYS_LATER if view.seals_later else _encode(view)
    params = AppendParams(*arguments, 1, encode, _scales(view), lag)
    device, heads = view.pages.device, view.batch * layout.num_kv_heads
    processors, sealed_apart = processor_count(device), view.feedback is not None
    if sealed_apart and heads <= processors and not view.seals_later:
        _seal(layout, view, params, 1, appending=2 * heads)
        return
    module = _module("append", layout, layout.num_kv_heads, None, False, device)
    few = not sealed_apart and heads <= 4 * processors
    if few and not params.encode_partial_page:  # most have nothing to encode
        module.launch("append", (heads, 2, 1), _MANY_THREADS, params)
        return
    if view.seals_later:
        own = 2 if heads > 4 * processors else 1
        counts = ctypes.c_int(heads), ctypes.c_int(own)
        module.launch("append_few", (-(-heads // own), 2, 1), 32 * own, params, *counts)
        return
    # A warp has a head. Many are appended sooner by fewer blocks, and sealed sooner by more.
    threads, own = (_MANY_THREADS, 1) if few else (_FEW_THREADS, 4 if sealed_apart else 2)
    grid, counts = (-(-heads // own), 2, 1), (ctypes.c_int(heads), ctypes.c_int(own))
    module.launch("append_few", grid, threads, params, *counts)
    _seal(layout, view, params, 1)


def _encode(view: CacheView) -> int:
    """`encode` of encode.cuh: keys with feedback are sealed by kernels of their own."""
    return 1 if view.feedback is None else _KEYS_APART


def _scales(view: CacheView | SealedLayer) -> int:
    """The address of a ring's scales, or 0."""
    return 0 if view.ring_scales is None else view.ring_scales.data_ptr()


def _aligned(x: Tensor) -> Tensor:
    """Keys that seal.cu can read 16 bytes at a time."""
    steps = (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1]))
    if x.stride(-1) == 1 and not any(n % 16 for n in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _seal(
    layout: PageLayout, view: CacheView, params: AppendParams, pages: int, appending: int = 0
) -> None:
    """Seal the keys of pages that an append completes, with feedback.

    A sequence completes at most `pages`. `appending`: blocks of the append, which is part of the
    same launch; if 0, it was launched just before.
    """
    if view.feedback is None:
        return
    device, d = view.pages.device, layout.head_dim
    processors, heads = processor_count(device), view.batch * layout.num_kv_heads
    # Few pages are sealed by several blocks each; many by blocks that take one after another.
    jobs = heads * pages * max(layout.page_size * d // _SEAL_CHANNELS, 1)
    module = _module("seal", layout, layout.num_kv_heads, None, False, device)
    args = (params, ctypes.c_void_p(view.feedback.data_ptr()), ctypes.c_int(view.batch))
    shared = 64 * d  # rows of factors on their way
    if appending:
        sealing = max(min(jobs, processors), 1)
        grid, count = (sealing + appending, 1, 1), ctypes.c_int(sealing)
        module.launch("append_and_seal", grid, _SEAL_THREADS, *args, count, shared=shared)
        return
    grid = (max(min(jobs, _SEAL_BLOCKS * processors), 1), 1, 1)
    module.launch("seal", grid, _SEAL_THREADS, *args, shared=shared)


def seals_later(layout: PageLayout, feedback: bool) -> bool:
    """Whether `append` can leave the sealing of pages to `seal_layers`."""
    if unsupported(layout) is not None or layout.cfg.check_finite:
        return False
    return padded_dim(layout) == layout.head_dim if feedback else layout.cfg.centered


class _SealedLayers(NamedTuple):
    pages: Tensor  # int64 [layers, 5]: `struct SealedLayer`
    ring_slots: int
    held: Sequence[SealedLayer]  # whose addresses the first has


def sealed_layers(layers: Sequence[SealedLayer]) -> _SealedLayers:
    """What `seal_layers` takes of layers of one layout, all with feedback or all without."""
    rows = []
    for layer in layers:
        factors = 0 if layer.feedback is None else layer.feedback.data_ptr()
        addresses = layer.pages.data_ptr(), layer.ring_key.data_ptr(), factors
        rows.append([*addresses, layer.pages.stride(0), _scales(layer)])
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(layers[0].pages.device)
    return _SealedLayers(table, layers[0].ring_key.shape[1], layers)


@device_guard
def seal_layers(codec: Codec, layers: _SealedLayers, chosen: Tensor) -> None:
    """See `reference.seal_layers`."""
    layout, device = codec.layout, chosen.device
    rotation = codec.key.rotation.table(device)
    tensors = (layers.pages, chosen, chosen[1:], rotation)
    params = SealParams(*[x.data_ptr() for x in tensors], len(layers.pages), layers.ring_slots)
    fed = layers.held[0].feedback is not None
    name = "seal_layers" if fed else "center_layers"
    module = _module(name, layout, layout.num_kv_heads, None, False, device)
    grid = (_SEAL_BLOCKS * processor_count(device), 1, 1)
    if fed:
        module.launch(name, grid, _SEAL_THREADS, params, shared=64 * layout.head_dim)
        return
    module.launch(name, grid, _MANY_THREADS, params)


@device_guard
def attend(
    codec: Codec, query: Tensor, view: CacheView, cu_seqlens: Tensor, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """See `reference.attend`; values are relative to those of `view.centers`."""
    layout, device = codec.layout, query.device
    center = None if view.centers is None else view.centers[1]
    if not _decodes(layout, query, view, options):
        out, lse = triton_kernels.attend(codec, query, view, cu_seqlens, options)
        if center is not None:
            out.unflatten(1, (layout.num_kv_heads, -1)).add_(center[:, None])
        return out, lse
    rows, hq, d = query.shape
    max_queries, scale, causal, window, softcap, *_ = options
    overlaps_append = view.overlaps_append
    if query.stride(-1) != 1:
        query, overlaps_append = query.contiguous(), False
    cut = _cut(layout, view, hq, max_queries, window or 0)
    plan, table = cut.plan, view.block_table
    module = _module("decode", layout, hq, plan.tile, softcap is not None, device)

    out = torch.empty_like(query) if options.out is None else options.out
    lse = torch.empty(rows, hq, dtype=torch.float32, device=device)
    partials = (cut.num_partials, max_queries, hq)
    partial = torch.empty(*partials, padded_dim(layout), dtype=torch.float32, device=device)
    partial_lse = torch.empty(partials, dtype=torch.float32, device=device)
    center_at = 0 if center is None else center.data_ptr()
    tensors = (
        query, view.pages, table, view.lengths, view.left_pad, view.ring_read_from,
        view.sink_counts, view.ring_rows, cu_seqlens, view.ring_key, view.ring_value,
        view.sink_key, view.sink_value, _rotation_table(codec.value.rotation, device),
    )  # fmt: skip
    params = DecodeParams(
        *[x.data_ptr() for x in tensors],
        center_at, cut.blocks, *[x.data_ptr() for x in (partial, partial_lse, out, lse)],
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        table.stride(0), view.pages.stride(0), rows,
        1 / math.sqrt(d) if scale is None else scale, softcap or 0.0,
        view.ring_key.shape[1], view.sink_key.shape[1], plan.num_splits,
        window or 0, int(causal), int(overlaps_append and not cut.is_new), table.shape[1],
        view.batch, max_queries, _scales(view),
    )  # fmt: skip
    module.launch("decode", cut.grid, 32 * plan.tile.warps, params, shared=plan.shared_bytes)
    if cut.num_partials:
        grid = (view.batch * max_queries * (hq // plan.merged_heads), 1, 1)
        addresses = (
            partial.data_ptr(), partial_lse.data_ptr(), center_at, cut.row_splits,
            cu_seqlens.data_ptr(), out.data_ptr(), lse.data_ptr(),
        )  # fmt: skip
        module.launch(
            *("merge", grid, 256),
            *[ctypes.c_void_p(address) for address in addresses],
            *[ctypes.c_longlong(out.stride(axis)) for axis in (0, 1)],
            *[ctypes.c_int(n) for n in (max_queries, plan.num_splits, plan.merged_heads)],
        )
    return out, lse


def _decodes(layout: PageLayout, query: Tensor, view: CacheView, options: AttendOptions) -> bool:
    """Whether decode.cu takes a call: not of prefill, with a mask, of another dtype, or empty."""
    few = 0 < options.max_queries <= RING_SLACK
    plain = options.mask is None and options.new_key is None and query.dtype == layout.dtype
    return few and plain and len(query) > 0 and view.batch > 0


class _Cut(NamedTuple):
    """The blocks of a call of decode.cu."""

    plan: DecodePlan
    grid: tuple[int, int, int]
    num_partials: int
    blocks: int = 0  # the address of split_plan.cu's plan for blocks
    row_splits: int = 0  # the address of its number of splits of each row
    is_new: bool = False  # split_plan.cu was launched just now


def _cut(layout: PageLayout, view: CacheView, query_heads: int, queries: int, window: int) -> _Cut:
    """Equal splits of all sequences, or splits by lengths that the device alone knows."""
    heads, device = layout.num_kv_heads, view.pages.device
    by_length = view.plans is not None and view.same_length is None
    shape = query_heads // heads, queries, *view.block_table.shape
    plan = DecodePlan.of(layout, *shape, device, by_length)
    if not plan.num_blocks:
        grid = view.batch * heads, plan.num_splits, plan.num_q_tiles
        return _Cut(plan, grid, view.batch * plan.num_splits if plan.num_splits > 1 else 0)
    made, is_new = _split_plan(view, plan, heads * plan.num_q_tiles, window)
    row_splits = made.data_ptr() + _PLANNED_BYTES * plan.num_blocks
    grid = heads, plan.num_blocks, plan.num_q_tiles
    return _Cut(plan, grid, plan.num_blocks, made.data_ptr(), row_splits, is_new)


def _split_plan(view: CacheView, plan: DecodePlan, heads: int, window: int) -> tuple[Tensor, bool]:
    """The plan of split_plan.cu, and whether it was made just now.

    int32: what blocks read [num_blocks, 4], then the splits of rows [B, 2].
    """
    assert view.plans is not None
    # A graph makes its own each time it runs: lengths are others then, and memory is the graph's.
    least = plan.tile.least_split
    key = plan.num_blocks, plan.slots, heads, window, least, capture_of(view.lengths.device)
    if key in view.plans:
        return view.plans[key], False
    size = 4 * plan.num_blocks + 2 * view.batch
    made = view.plans[key] = view.lengths.new_empty(size)
    addresses = [x.data_ptr() for x in (view.lengths, view.left_pad, view.ring_read_from, made)]
    params = PlanParams(
        *addresses, made.data_ptr() + _PLANNED_BYTES * plan.num_blocks,
        view.batch, plan.num_blocks, heads, plan.slots, window, least,
    )  # fmt: skip
    module = _loaded(included(SPLIT_PLAN), view.pages.device)
    module.launch("split_plan", (1, 1, 1), _PLAN_THREADS, params)
    return made, True


@functools.cache  # a CUDA graph may hold its address
def _rotation_table(rotation: Rotation, device: torch.device) -> Tensor:
    """The signs [D] of a rotation, or the matrices of a dense one and of its inverse [2, D, D]."""
    table = rotation.table(device)
    return table if table.dim() == 1 else torch.stack((table, table.T))


def static_step(params: StepParams, device: torch.device) -> None:
    """Advance the counters of a static cache by one step (static_step.cu)."""
    module = _loaded(included(STATIC_STEP), device)
    module.launch("static_step", (1, 1, 1), _STEP_THREADS, params)


@functools.lru_cache(maxsize=1024)
def _module(
    name: str,
    layout: PageLayout,
    query_heads: int,
    tile: DecodeTile | None,
    softcap: bool,
    device: torch.device,
) -> Module:
    """The kernels of one source for one layout; layouts of the same source share a module."""
    return _loaded(source(name, layout, query_heads, tile, softcap), device)


# Kept for good: a CUDA graph may hold a kernel of any of them. Sources are few.
@functools.cache
def _loaded(text: str, device: torch.device) -> Module:
    major, minor = torch.cuda.get_device_capability(device)
    return Module(compile_cubin(text, f"sm_{major}{minor}"), device)
