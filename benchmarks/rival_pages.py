"""Caches of other projects in shuffled pages: filled, and a decode step over them timed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tightkv.tools.bench.inputs import Shape, copies_for, random_bf16
from tightkv.tools.bench.timing import graph_times

_AT_ONCE = 1 << 16  # tokens


@dataclass(frozen=True)
class PagedBatch:
    """Where the tokens of a batch lie. A slot is a page times the page's tokens plus a token."""

    page: int
    pages: int  # in all
    block_table: Tensor  # [B, pages of the longest], int32
    lengths: Tensor  # [B], int32
    slots: Tensor  # [sum of lengths], int64, one sequence after another
    newest: Tensor  # [B], int64: the slots of the last tokens

    @property
    def pages_each(self) -> Tensor:
        return (self.lengths + self.page - 1) // self.page  # [B]


@dataclass(frozen=True)
class PagedCache:
    """One layer's cache, as its own kernels write and read it."""

    attend: Callable[[Tensor], Tensor]
    """Queries [B, Hq, D], one per sequence, to outputs of the same shape."""
    write: Callable[[Tensor, Tensor, Tensor], None] | None = None
    """Keys and values [n, Hkv, D] to slots [n]; None: filled already, and no part of a step."""


NewCache = Callable[[Shape, PagedBatch], PagedCache]


def paged_batch(shape: Shape, page: int, device: torch.device) -> PagedBatch:
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device="cpu")
    each = (lengths + page - 1) // page
    table = torch.zeros(shape.batch, int(each.max()), dtype=torch.int32, device="cpu")
    pages = int(each.sum())
    used = torch.arange(table.shape[1], device="cpu") < each[:, None]
    table[used] = torch.randperm(pages, dtype=torch.int32, device="cpu")
    token = torch.arange(int(lengths.max()), device="cpu")
    slots = table.long()[:, token // page] * page + token % page
    newest = slots.gather(1, (lengths.long() - 1)[:, None])[:, 0]
    slots = slots[token < lengths[:, None]]
    return PagedBatch(page, pages, *(t.to(device) for t in (table, lengths, slots, newest)))


def decode_ms(
    shape: Shape, device: torch.device, *, new_cache: NewCache, page: int, bits: float
) -> list[float]:
    """Milliseconds of a step: the new tokens are written, if the cache does that, then attended."""
    batch = paged_batch(shape, page, device)
    d = shape.head_dim

    def filled() -> PagedCache:
        cache = new_cache(shape, batch)
        if cache.write is not None:
            for slots in batch.slots.split(_AT_ONCE):
                key, value = (random_bf16(device, len(slots), shape.kv_heads, d) for _ in range(2))
                cache.write(key, value, slots)
        return cache

    query = random_bf16(device, shape.batch, shape.query_heads, d)
    new_key, new_value = (random_bf16(device, shape.batch, shape.kv_heads, d) for _ in range(2))

    def step(cache: PagedCache) -> None:
        if cache.write is not None:
            cache.write(new_key, new_value, batch.newest)
        cache.attend(query)

    count = copies_for(int(shape.bf16_bytes * bits / 16))
    return graph_times([partial(step, filled()) for _ in range(count)])
