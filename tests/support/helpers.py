"""Small caches with known content, and exact attention over them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout


def make_cache(
    cfg: KVQuantConfig,
    *,
    rows: int = 2,
    heads: int = 2,
    dim: int = 64,
    left_pad: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    kernels: str = "reference",
    **table: Any,
) -> PagedKV:
    sequences = SequenceTable(cfg, **table)
    sequences.add_rows(left_pad or [0] * rows)
    return PagedKV(PageLayout(cfg, heads, dim, dtype), sequences, device, kernels)


def tokens(
    rows: int, count: int, heads: int = 2, dim: int = 64, seed: int = 0, bias: float = 2.0
) -> tuple[Tensor, Tensor]:
    """Keys with a common mean, as real ones have, and values."""
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(rows, count, heads, dim, generator=g) + bias * torch.randn(
        heads, dim, generator=torch.Generator().manual_seed(99)
    )
    return key, torch.randn(rows, count, heads, dim, generator=g)


def add(cache: PagedKV, key: Tensor, value: Tensor, counts: Sequence[int] | None = None) -> None:
    rows = range(key.shape[0])
    counts = [key.shape[1]] * key.shape[0] if counts is None else counts
    cache.append(cache.table.append(rows, counts), key, value)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: Sequence[int],
    left_pad: Sequence[int] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """float64 attention of the last Lq tokens of each row; a plain loop, to be read at a glance."""
    b, lq, hq, d = q.shape
    out, lse = torch.zeros_like(q, dtype=torch.float64), torch.full((b, lq, hq), -math.inf)
    group = hq // k.shape[2]
    for row in range(b):
        for i in range(lq):
            at = lengths[row] - lq + i
            first = left_pad[row] if left_pad else 0
            if window is not None:
                first = max(first, at - window + 1)
            if at < first:
                continue
            for h in range(hq):
                keys = k[row, first : at + 1, h // group].double()
                s = keys @ q[row, i, h].double() * (scale or 1 / math.sqrt(d))
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                if mask is not None:
                    m = mask.expand(b, hq, -1, -1)[row, h, i, first : at + 1]
                    s = s.masked_fill(~m, -math.inf) if m.dtype == torch.bool else s + m.double()
                if torch.isneginf(s).all():
                    continue
                lse[row, i, h] = torch.logsumexp(s, 0)
                out[row, i, h] = torch.softmax(s, 0) @ v[row, first : at + 1, h // group].double()
    return out, lse
