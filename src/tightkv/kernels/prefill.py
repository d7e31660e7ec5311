"""Prefill over a compressed prefix with torch's own attention kernels.

New tokens among themselves are plain causal attention. The prefix is brought to plain keys and
values a bounded chunk at a time, in the frame of the pages; each chunk goes through torch's
attention, and the attention states are merged by their LSEs. Memory beyond inputs and outputs
does not grow with the prefix.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tightkv.kernels.sdpa import AttentionState, length_multiple, sdpa_with_lse
from tightkv.kernels.view import CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

MIN_QUERIES = 256  # below this, decoding out of the pages is faster
# of the prefix at a time, and bytes of them dequantized
CHUNK_TOKENS, CHUNK_BYTES = 8192, 64 << 20
PAD_FROM = 1024  # so many queries are padded to a multiple of `length_multiple()`


def can_extend(codec: Codec, query: Tensor, view: CacheView, max_queries: int) -> bool:
    """Whether `extend` takes a call: many queries, half precision, unpadded rows of one length."""
    return (
        view.same_length is not None
        and len(query) == view.batch * max_queries
        and max_queries >= MIN_QUERIES
        and query.dtype == codec.layout.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and codec.layout.head_dim <= 256  # torch's fused attention has no more
    )


def extend(
    codec: Codec,
    query: Tensor,
    view: CacheView,
    ops: Any,
    *,
    scale: float,
    new_key: Tensor,
    new_value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Causal attention of query [N, Hq, D] over the cache and new tokens [N, Hkv, D].

    Rows are sequences of the same length with the same number of queries. `ops` is
    `triton.prefill`, or does the same.
    """
    batch = view.batch
    tokens = len(query) // batch
    q, key, value = (
        _pad_to_multiple(x.unflatten(0, (batch, tokens))).transpose(1, 2)  # [B, H, T, D]
        for x in (query, new_key, new_value)
    )
    exact = sdpa_with_lse(q, key, value, scale, causal=True)
    if view.same_length:
        ops.merge_and_unrotate(codec, _attend_prefix(codec, q, view, ops, scale), exact)
    out, lse = (x.transpose(1, 2)[:, :tokens].flatten(0, 1) for x in exact)
    return out, lse


def _pad_to_multiple(x: Tensor) -> Tensor:
    """x [B, T, H, D] and zeros after it, up to a length that cuDNN has a plan for.

    No query sees the zeros: attention among new tokens is causal.
    """
    more = -x.shape[1] % length_multiple()
    if not more or x.shape[1] < PAD_FROM:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more))


def _attend_prefix(
    codec: Codec, query: Tensor, view: CacheView, ops: Any, scale: float
) -> AttentionState:
    """Attention of query [B, Hq, T, D] over the whole prefix: [B, Hkv, group * T, D], rotated."""
    assert view.same_length is not None
    layout, length = codec.layout, view.same_length
    heads, d, page = layout.num_kv_heads, layout.head_dim, layout.page_size
    # Heads of a group as further queries: every query sees the whole prefix.
    packed = ops.rotate_queries(codec, query).view(view.batch, heads, -1, d)
    size = chunk_tokens(codec.layout, view.batch)
    held = min(size, -(-length // page) * page)
    key, value = (
        torch.empty(view.batch, held, heads, d, dtype=layout.dtype, device=query.device)
        for _ in range(2)
    )
    prefix: AttentionState | None = None
    for start in range(0, length, size):
        count = min(size, length - start)
        ops.load_prefix(codec, view, start, count, key, value)
        for low, high in sdpa_cuts(count):
            k, v = (x[:, low:high].transpose(1, 2) for x in (key, value))
            chunk = sdpa_with_lse(packed, k, v, scale)
            prefix = chunk if prefix is None else ops.merge_states(prefix, chunk)
            del chunk  # its memory serves the next one
    assert prefix is not None
    return prefix


def chunk_tokens(layout: PageLayout, batch: int) -> int:
    """Tokens of the prefix to dequantize at a time: whole pages, in bounded memory."""
    page = layout.page_size
    each = 2 * batch * layout.num_kv_heads * layout.head_dim * layout.dtype.itemsize
    return max(1, min(CHUNK_TOKENS, CHUNK_BYTES // each) // page) * page


def sdpa_cuts(count: int) -> Iterator[tuple[int, int]]:
    """As few ranges of [0, count) as possible, of lengths that come again, and the rest."""
    low, multiple = 0, length_multiple()
    while multiple > 1 and count - low >= 2 * multiple:
        length = 1 << (count - low).bit_length() - 1
        yield low, low + length
        low += length
    if low < count:
        yield low, count
