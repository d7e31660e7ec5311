"""Caches of sequences of different lengths, their prompts, and plain attention for these."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import make_cache, tokens
from tightkv.config import KVQuantConfig
from tightkv.kernels import sdpa
from tightkv.kernels.ragged_plan import plan_groups
from tightkv.kernels.view import AttendOptions, CacheView, RaggedGroup
from tightkv.paged.cache import PagedKV

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TILE = 64


def plain_varlen(
    q: Tensor, k: Tensor, v: Tensor, group: RaggedGroup, scale: float, out: Tensor
) -> Tensor:
    """In place of FlashAttention: a loop over sequences, in float32.

    It reads whole tiles of keys and values, too: those of the next sequence get weights of 0.
    """
    lse = torch.empty(q.shape[:2], device=q.device)
    queries, keys = group.cu_seqlens_q.tolist(), group.cu_seqlens_k.tolist()
    assert len(k) == len(v) == group.tokens >= keys[-1] and queries[-1] == len(q)
    for i in range(len(queries) - 1):
        mine, held = slice(queries[i], queries[i + 1]), slice(keys[i], keys[i + 1])
        count, length = mine.stop - mine.start, held.stop - held.start
        assert count <= group.max_queries and length <= group.max_keys
        groups, read = q.shape[1] // k.shape[1], -(-length // TILE) * TILE
        held = slice(held.start, min(held.start + read, len(k)))
        read = held.stop - held.start
        key, value = (x[held].float().repeat_interleave(groups, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[mine].float(), key) * scale
        seen = torch.ones(count, read, dtype=torch.bool, device=q.device).tril(length - count)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse[mine] = scores.logsumexp(-1).T
        out[mine] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).to(out.dtype)
    return lse


def use_varlen(
    monkeypatch: pytest.MonkeyPatch, attention: Callable[..., Tensor] = plain_varlen
) -> None:
    monkeypatch.setattr(sdpa, "_VARLEN", [attention])


def ragged_cache(
    cfg: KVQuantConfig,
    lengths: Sequence[int],
    dim: int = 64,
    heads: int = 2,
    dtype: torch.dtype = torch.float16,
    **options: Any,
) -> PagedKV:
    """Filled up to `lengths`, which may be 0."""
    cache = make_cache(
        cfg, rows=len(lengths), dim=dim, heads=heads, dtype=dtype, device=DEVICE, **options
    )
    if max(lengths):
        drawn = tokens(len(lengths), max(lengths), heads=heads, dim=dim)
        key, value = (x.to(DEVICE, dtype) for x in drawn)
        cache.append(cache.table.append(range(len(lengths)), lengths), key, value)
    return cache


def prompts(
    cache: PagedKV, counts: Sequence[int], group: int = 3, seed: int = 5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, new keys and new values of sum(counts) tokens, and where each row's begin."""
    layout = cache.layout
    total, dim = sum(counts), layout.head_dim
    key, value = tokens(1, total, heads=layout.num_kv_heads, dim=dim, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(total, layout.num_kv_heads * group, dim, generator=generator)
    query, key, value = (x.to(DEVICE, layout.dtype) for x in (query, key[0], value[0]))
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    return query, key, value, starts


def groups_of(
    view: CacheView,
    counts: Sequence[int],
    starts: Tensor,
    most_tokens: int = 1 << 20,
    spare: int = 0,
) -> tuple[RaggedGroup, ...]:
    """As an engine plans them; the host believes in `spare` more tokens per sequence."""
    before = [n + spare for n in view.lengths.tolist()]
    return plan_groups(counts, before, most_tokens, starts, view.lengths, view.left_pad)


def spoil(cache: PagedKV, row: int, number: float) -> None:
    """All that a sequence has stored is this number: records of its pages, ring and sinks."""
    bits = torch.tensor([number]).half().view(torch.int16).to(DEVICE)
    cache.pages.view(torch.int16)[cache.table.rows[row].pages] = bits
    view = cache.view()
    of_ring = (view.ring_key, view.ring_value)
    for x in of_ring if view.ring_scales is None else (view.ring_scales,):
        x[int(view.ring_rows[row])] = number
    for x in (view.sink_key, view.sink_value):
        x[int(view.ring_rows[row])] = number


def outputs_beside(
    kernels: Any,
    lengths: Sequence[int],
    counts: Sequence[int],
    number: float | None = None,
    **options: Any,
) -> list[Tensor]:
    """Of all prompts; those of the second sequence, and its cache, are this number."""
    cache = ragged_cache(lengths=lengths, **options)
    query, new_key, new_value, starts = prompts(cache, counts)
    if number is not None:
        spoil(cache, 1, number)
        second = slice(counts[0], counts[0] + counts[1])
        new_key[second] = new_value[second] = number
    view = cache.view()
    view = dataclasses.replace(view, ragged=groups_of(view, counts, starts))
    asked = AttendOptions(max(counts), new_key=new_key, new_value=new_value)
    out, lse = kernels.attend(cache.codec, query, view, starts, asked)
    return [*out.split(counts), *lse.split(counts)]
