"""The work around torch's attention in a prefill, fused: what `kernels.prefill.extend` calls.

Tensors of attention are [B, H, L, D] with any strides but a contiguous last dimension; LSEs are
contiguous.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.ragged_plan import BLOCK, RaggedGroup, uniform_cu_seqlens
from tightkv.kernels.sdpa import AttentionState
from tightkv.kernels.triton.constants import frame_of
from tightkv.kernels.triton.ragged import load_workspace
from tightkv.kernels.triton.rotate import (
    load_rotated,
    rotate_rows,
    row_offsets,
    rows_and_head,
    rows_at_once,
)
from tightkv.kernels.view import CacheView
from tightkv.math.rotation import Rotation, make_rotation
from tightkv.pages.codec import Codec


@triton.jit(do_not_specialize=["tokens"])  # one binary for all lengths
def _merge_states_kernel(
    one, one_lse, two, two_lse, out, lse, table, tokens,
    one_b, one_h, one_l, two_b, two_h, two_l, out_b, out_h, out_l,
    H: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Rotate the state `one` back and merge it with `two`; the result may be in place of either.

    In `one` the G heads of a group are further rows of one head.
    """
    at, bh = rows_and_head(tokens, ROWS)
    b = bh // H
    h = bh % H
    d = tl.arange(0, L.DP)
    live = at < tokens
    there = live[:, None] & (d < L.D)[None, :]
    offsets = row_offsets(b, h // G, (h % G) * tokens + at, one_b, one_h, one_l)
    x = load_rotated(one, offsets, live, table, True, ROWS, L)
    flat = bh.to(tl.int64) * tokens + at
    a = tl.load(one_lse + flat, mask=live, other=0.0)
    c = tl.load(two_lse + flat, mask=live, other=0.0)
    peak = tl.maximum(a, c)  # no state is empty: both are finite
    wa = tl.exp(a - peak)
    wc = tl.exp(c - peak)
    total = wa + wc
    where = two + row_offsets(b, h, at, two_b, two_h, two_l)[:, None] + d[None, :]
    y = tl.load(where, mask=there, other=0.0).to(tl.float32)
    x = x * (wa / total)[:, None] + y * (wc / total)[:, None]
    where = out + row_offsets(b, h, at, out_b, out_h, out_l)[:, None] + d[None, :]
    tl.store(where, x.to(out.dtype.element_ty), mask=there)
    tl.store(lse + flat, peak + tl.log(total), mask=live)


def rotate_queries(codec: Codec, query: Tensor) -> Tensor:
    """Queries [B, H, T, D] in the frame of the pages' keys; contiguous, same dtype."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    rotate_rows(codec.key.rotation, query, out, back=False)
    return out


def load_prefix(
    codec: Codec, view: CacheView, start: int, count: int, key: Tensor, value: Tensor
) -> None:
    """Write positions [start, start + count) to the start of key and value [B, tokens, Hkv, D].

    Exact tokens, too, are in the frame of the pages. `start` begins a page. The view's
    `same_length` is known.
    """
    batch, held = key.shape[:2]
    blocks = triton.cdiv(count, BLOCK)
    none, starts, first_blocks = (
        uniform_cu_seqlens(batch, each, key.device) for each in (0, held, blocks)
    )
    group = RaggedGroup(
        slice(0, batch), slice(0, 0), none, starts, first_blocks, batch * held, batch * blocks,
        max_queries=0, max_keys=held, is_fresh=False,
    )  # fmt: skip
    new = view.sink_key, view.sink_value  # there are none
    both = key.flatten(0, 1), value.flatten(0, 1)
    load_workspace(codec, view, group, *new, *both, first_at=start, apart=True)


def merge_states(old: AttentionState, new: AttentionState) -> AttentionState:
    """Attention over the tokens of both, `out` in float32; `old` may be changed."""
    out = old.out
    if out.dtype != torch.float32 or not out.is_contiguous():
        out = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    merged = AttentionState(out, old.lse)
    _merge(make_rotation("none", out.shape[-1]), old, new, merged)
    return merged


def merge_and_unrotate(codec: Codec | None, prefix: AttentionState, exact: AttentionState) -> None:
    """Rotate the prefix's output back and merge it into `exact` [B, Hq, T, D], in place.

    prefix is [B, Hkv, group * T, D]; without a codec it is not rotated.
    """
    none = make_rotation("none", exact.out.shape[-1])
    _merge(none if codec is None else codec.value.rotation, prefix, exact, exact)


def _merge(
    rotation: Rotation, one: AttentionState, two: AttentionState, merged: AttentionState
) -> None:
    b, h, tokens, _ = two.out.shape
    rows = rows_at_once(rotation)
    strides = [step for state in (one, two, merged) for step in state.out.stride()[:3]]
    _merge_states_kernel[(triton.cdiv(tokens, rows) * b * h,)](
        *one, *two, *merged, rotation.table(two.out.device), tokens, *strides,
        H=h, G=h // one.out.shape[1], ROWS=rows, L=frame_of(rotation), num_warps=4,
    )  # fmt: skip
