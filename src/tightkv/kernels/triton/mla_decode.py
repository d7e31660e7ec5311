"""Decoding of latent attention (MLA) over compressed pages.

A program takes HEADS query heads of one query and a split of its tokens. A tile of latents is
dequantized once, to float16 levels, and serves as keys and as values; scales are applied to the
scores and to the weights. All of it happens in the rotated frame: queries are rotated before, and
`merge_splits` rotates the output back.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.triton.constants import frame_of, latent_constants
from tightkv.kernels.triton.device import (
    device_guard,
    has_large_shared_memory,
    last_contiguous,
    processor_count,
)
from tightkv.kernels.triton.encode import FP16_MAX
from tightkv.kernels.triton.merge_splits import merge_splits
from tightkv.kernels.triton.mla_tile import (
    channel_order,
    column_order,
    load_levels,
    rope_rows,
    rows_at_once,
    scale_values,
)
from tightkv.kernels.triton.rotate import rotate
from tightkv.pages.latent import LatentCodec, LatentLayout

_MOST_SPLITS = 64


@triton.jit(do_not_specialize=["count"])
def _rotate_queries_kernel(
    query, out, table, count, query_n, query_h, H: tl.constexpr, ROWS: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """[N, H, D] -> float16 [N, H, DP], columns in the order of `channel_order`; zero from D on."""
    DP: tl.constexpr = L.DP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    d = tl.arange(0, DP)[None, :]
    where = (row // H).to(tl.int64) * query_n + (row % H).to(tl.int64) * query_h
    x = tl.load(query + where[:, None] + d, mask=live[:, None] & (d < L.D), other=0.0)
    y = rotate(x.to(tl.float32), table, ROWS, L)
    y = tl.minimum(tl.maximum(y, -FP16_MAX), FP16_MAX).to(tl.float16)
    where = out + row[:, None].to(tl.int64) * DP + column_order(DP)[None, :]
    tl.store(where, y, mask=live[:, None])


@triton.jit(
    do_not_specialize=["block_table", "lengths", "table_b", "total_rows", "num_splits", "queries"]
)
def _decode_kernel(
    query, query_rope, pages, block_table, lengths, partial, partial_lse,
    rope_n, rope_h, table_b, page_b, scale, total_rows, num_splits, queries,
    H: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    L: tl.constexpr,
):  # fmt: skip
    """query is what `_rotate_queries_kernel` makes."""
    DP: tl.constexpr = L.DP
    PAGE: tl.constexpr = L.PAGE
    BLOCKS: tl.constexpr = (H + HEADS - 1) // HEADS
    head = tl.program_id(0) % BLOCKS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(0) // BLOCKS % num_splits
    row = tl.program_id(0) // BLOCKS // num_splits
    live = head < H

    sequence = row // queries
    length = tl.load(lengths + sequence) - (queries - 1 - row % queries)
    tiles = tl.cdiv(tl.maximum(length, 0), TILE)
    each = tl.cdiv(tiles, num_splits)
    first = split * each
    last = tl.minimum(tiles, first + each)

    d = tl.arange(0, DP)
    r = tl.arange(0, L.ROPE)
    place = tl.arange(0, TILE)
    q_at = (row.to(tl.int64) * H + head)[:, None] * DP + d[None, :]
    q = tl.load(query + q_at, mask=live[:, None], other=0.0)  # [HEADS, DP]
    q_rope_at = row.to(tl.int64) * rope_n + head.to(tl.int64) * rope_h
    qr = tl.load(query_rope + q_rope_at[:, None] + r[None, :], mask=live[:, None], other=0.0)
    qr = qr.to(L.ROPE_TYPE)

    peak = tl.full([HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DP], tl.float32)
    factor = scale * 1.4426950408889634
    for t in tl.range(first, last, num_stages=STAGES):
        index = tl.load(block_table + sequence * table_b + t * TILE // PAGE)
        page = pages + index.to(tl.int64) * page_b
        at = t * TILE % PAGE + place
        valid = t * TILE + place < length
        # Every row of a page can be read: one that holds no token yet is hidden below.
        levels = load_levels(page + at * L.CODE_BYTES, place >= 0, TILE, L)
        k = tl.load(rope_rows(page, at, L) + r[None, :])  # [TILE, ROPE]
        norm = scale_values(tl.load(page + L.SCALE_AT + at))
        s = tl.dot(q, tl.trans(levels))
        s_rope = tl.dot(qr, tl.trans(k), input_precision="ieee")
        s = (s * (norm * L.UNIT)[None, :] + s_rope) * factor
        s = tl.where(valid[None, :], s, float("-inf"))  # log2 units, [HEADS, TILE]
        new = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(peak - new)
        weight = weight * shrink + tl.sum(p, axis=1)
        peak = new
        p = (p * norm[None, :]).to(tl.float16)
        acc = tl.dot(p, levels, acc * shrink[:, None])

    out_at = (split * total_rows + row).to(tl.int64) * H + head
    lse = tl.where(weight != 0.0, peak + tl.log2(weight), float("-inf"))
    tl.store(partial_lse + out_at, lse, mask=live)
    share = tl.where(weight != 0.0, L.UNIT / weight, 0.0)
    channel = channel_order(DP)[None, :]
    where = partial + out_at[:, None] * L.D + channel
    tl.store(where, acc * share[:, None], mask=live[:, None] & (channel < L.D))


@device_guard
def decode(
    codec: LatentCodec,
    query: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """See `mla_reference.decode`."""
    rows, heads, d = query.shape
    device, width, count = query.device, block_table.shape[1], processor_count(query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(rows, heads, dtype=torch.float32, device=device)
    if not rows:
        return out, lse
    plan = decode_plan(codec.layout, rows, heads, width, count, has_large_shared_memory(device))
    query, query_rope = rotate_queries(codec, query), last_contiguous(query_rope)
    partial = torch.empty(plan.splits, rows, heads, d, dtype=torch.float32, device=device)
    partial_lse = torch.empty(plan.splits, rows, heads, dtype=torch.float32, device=device)
    _decode_kernel[(rows * plan.splits * triton.cdiv(heads, plan.heads),)](
        query, query_rope, pages, block_table, lengths, partial, partial_lse,
        query_rope.stride(0), query_rope.stride(1), block_table.stride(0), pages.stride(0),
        scale, rows, plan.splits, rows // len(lengths),
        H=heads, HEADS=plan.heads, TILE=plan.tile, STAGES=plan.stages,
        L=latent_constants(codec.layout, device), num_warps=plan.warps,
    )  # fmt: skip
    merge_splits(codec.rotation, partial, partial_lse, out, lse)
    return out, lse


def rotate_queries(codec: LatentCodec, query: Tensor) -> Tensor:
    """[N, H, rank] -> float16 [N, H, the next power of two], rotated, columns as in tiles."""
    query = last_contiguous(query)
    rows, heads, d = query.shape
    padded = triton.next_power_of_2(d)
    out = torch.empty(rows, heads, padded, dtype=torch.float16, device=query.device)
    each = rows_at_once(codec.rotation)
    _rotate_queries_kernel[(triton.cdiv(rows * heads, each),)](
        query, out, codec.rotation.table(query.device), rows * heads,
        query.stride(0), query.stride(1), H=heads, ROWS=each, L=frame_of(codec.rotation),
        num_warps=4,
    )  # fmt: skip
    return out


class DecodePlan(NamedTuple):
    """Sizes of a program, and into how many splits a sequence is cut."""

    heads: int
    tile: int  # tokens; they divide a page
    splits: int
    warps: int
    stages: int


def decode_plan(
    layout: LatentLayout, rows: int, heads: int, pages: int, processors: int, large: bool
) -> DecodePlan:
    """For `rows` queries of `heads` heads over block tables of `pages` pages.

    `large`: a program can have 172 KiB of shared memory, not only 96.
    """
    few = heads <= 16 or not large
    block, tile = (16, 32) if few else (64, min(64, layout.page_size))
    at_once = 2 * processors if few else processors
    splits = best_splits(rows * -(-heads // block), at_once, pages * layout.page_size // tile)
    return DecodePlan(block, tile, splits, warps=4 if few else 8, stages=1 if few else 2)


def best_splits(programs: int, at_once: int, most: int) -> int:
    """Splits whose programs take the least time: full waves, and each split costs a merge."""

    def time(splits: int) -> float:
        return -(-programs * splits // at_once) / splits * (1 + 0.01 * splits)

    return min(range(1, max(1, min(most, _MOST_SPLITS)) + 1), key=time)
