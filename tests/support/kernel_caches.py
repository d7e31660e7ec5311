"""Caches, queries and metrics that kernel tests compare backends on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from helpers import make_cache, tokens
from tightkv.config import KVQuantConfig
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceState

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

HEADS = 2 if DEVICE.type == "cuda" else 1  # the interpreter takes its time

CFG = KVQuantConfig(page_size=64, sinks=2, exact_pages=1)


def cache_on(
    cfg: KVQuantConfig,
    lengths: Sequence[int],
    *,
    name: str = "reference",
    dim: int = 64,
    heads: int = HEADS,
    **options: Any,
) -> PagedKV:
    cache = make_cache(cfg, rows=len(lengths), dim=dim, heads=heads, device=DEVICE, **options)
    cache._kernels = name
    return cache


def fill(cache: PagedKV, lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    layout = cache.layout
    key, value = tokens(
        len(lengths), max(lengths), heads=layout.num_kv_heads, dim=layout.head_dim, seed=seed
    )
    key, value = (x.to(DEVICE, layout.dtype) for x in (key, value))
    cache.append(cache.table.append(range(len(lengths)), lengths), key, value)
    return key, value


def queries(
    cache: PagedKV, counts: Sequence[int], group: int, seed: int = 3
) -> tuple[Tensor, Tensor]:
    layout = cache.layout
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(counts), layout.num_kv_heads * group, layout.head_dim, generator=generator)
    cu_seqlens = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    return q.to(cache.pages.device, layout.dtype), cu_seqlens.to(cache.pages.device)


def with_gaps(cache: PagedKV) -> PagedKV:
    """The same cache, its pages 64 bytes apart, as an engine may hand them out."""
    layout = cache.layout
    wide = cache.pages.new_full((len(cache.pages), layout.page_bytes + 64), 255)
    pages = wide[:, : layout.page_bytes].unflatten(1, (layout.num_kv_heads, layout.record_bytes))
    cache.pages = pages.copy_(cache.pages)
    return cache


def poison(cache: PagedKV) -> None:
    """NaN wherever nothing was written: unused pages, open tails, stale ring and sinks."""
    view, size = cache.view(), cache.layout.page_size
    used = {p for row in cache.table.rows for p in row.pages}
    for page in set(range(len(cache.pages))) - used:
        cache.pages[page] = 0xFF
    for b, row in enumerate(cache.table.rows):
        coded = row.ring_read_from if not cache.table.encode_partial_page else row.length
        for at in range(coded, len(row.pages) * size):
            _poison_token(cache, row, at)
        if row.length < size and cache.codec.cfg.centered:  # never sealed: no mean yet
            cache.pages[row.pages, :, cache.layout.mean_offset :] = 0xFF
        ring = view.ring_key.shape[1]
        live = {p % ring for p in range(row.ring_read_from, row.length)}
        for slot in set(range(ring)) - live:
            _poison_slot(view, b, slot)
        view.sink_key[b, row.sink_count :] = view.sink_value[b, row.sink_count :] = math.nan


def _poison_slot(view: CacheView, row: int, slot: int) -> None:
    bad = math.nan
    if view.ring_scales is not None:
        view.ring_scales[row, slot], bad = math.nan, -128
    view.ring_key[row, slot] = view.ring_value[row, slot] = bad


def _poison_token(cache: PagedKV, row: SequenceState, at: int) -> None:
    """Codes of ones and scales of NaN for one token of a page."""
    page, offset = torch.tensor([row.pages[at // cache.layout.page_size]]), torch.tensor([at])
    for side in ("key", "value"):
        fields = {
            name: x[:1, :, 0] * 0 + (255 if x.dtype == torch.uint8 else math.nan)
            for name, x in cache.layout.read(cache.pages[page], side).items()
        }
        for name, x in fields.items():
            if x.dtype == torch.uint8:
                bits = cache.layout.planes[side, name].bits
                fields[name] = x & (2**bits - 1)
        offset = offset % cache.layout.page_size
        cache.layout.write_tokens(cache.pages, page, offset, side, fields)


def forget(cache: PagedKV, low: Sequence[int]) -> CacheView:
    """NaN wherever tokens before low[b] are: in pages, whole ones 0xFF, in the ring and in sinks.

    Returns the view in which whole pages of them have no entry of the block table.
    """
    view, size = cache.view(), cache.layout.page_size
    table, ring = view.block_table.clone(), view.ring_key.shape[1]
    for b, (row, first) in enumerate(zip(cache.table.rows, low, strict=True)):
        for index in range(first // size):
            cache.pages[row.pages[index]], table[b, index] = 0xFF, -1
        for at in range(first // size * size, min(first, row.ring_read_from)):
            _poison_token(cache, row, at)
        for at in range(row.ring_read_from, first):
            _poison_slot(view, b, at % ring)
        sinks = max(first - row.left_pad, 0)
        view.sink_key[b, :sinks] = view.sink_value[b, :sinks] = math.nan
    return dataclasses.replace(view, block_table=table)


def assert_blind_before(
    window: int, attend: Any, cache: PagedKV, counts: Sequence[int], group: int, **options: Any
) -> None:
    """Attention has the same bits whatever holds the tokens before the window of any query."""
    q, cu_seqlens = queries(cache, counts, group)
    given = AttendOptions(max_queries=max(counts), window=window, **options)
    new = given.new_key is not None
    first = [
        row.length - (not new) * count for row, count in zip(cache.table.rows, counts, strict=True)
    ]
    expected = attend(cache.codec, q, cache.view(), cu_seqlens, given)
    without_entries = forget(cache, [max(at - window + 1, 0) for at in first])
    for view in (cache.view(), without_entries):  # a read of page -1 would end the process
        got = attend(cache.codec, q, view, cu_seqlens, given)
        assert all(torch.isfinite(x).all() for x in expected)
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def anisotropic_metric(heads: int, dim: int, seed: int = 0) -> Tensor:
    """E[q q^T] of queries that lie mostly in a few directions."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, 4 * dim, dim, generator=generator)
    q *= torch.logspace(0.7, -0.7, dim)
    turn = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
    q = q @ turn
    return q.mT @ q / q.shape[1]
