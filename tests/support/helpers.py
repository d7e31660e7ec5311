"""Small caches with known content, and exact attention over them."""

import math

import torch

from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout


def make_cache(
    cfg,
    *,
    rows=2,
    heads=2,
    dim=64,
    left_pad=None,
    dtype=torch.float32,
    device="cpu",
    kernels="reference",
    **table,
):
    sequences = SequenceTable(cfg, **table)
    sequences.add_rows(left_pad or [0] * rows)
    return PagedKV(PageLayout(cfg, heads, dim, dtype), sequences, device, kernels)


def tokens(rows, count, heads=2, dim=64, seed=0, bias=2.0):
    """Keys with a common mean, as real ones have, and values."""
    g = torch.Generator().manual_seed(seed)
    key = torch.randn(rows, count, heads, dim, generator=g) + bias * torch.randn(
        heads, dim, generator=torch.Generator().manual_seed(99)
    )
    return key, torch.randn(rows, count, heads, dim, generator=g)


def add(cache, key, value, counts=None):
    rows = range(key.shape[0])
    counts = [key.shape[1]] * key.shape[0] if counts is None else counts
    cache.append(cache.table.append(rows, counts), key, value)


def exact_attention(
    q, k, v, *, lengths, left_pad=None, scale=None, window=None, softcap=None, mask=None
):
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
