"""Caches with a prefix, and prefill over it against the reference."""

from typing import Any

import torch

from helpers import add, make_cache, tokens
from tightkv.config import KVQuantConfig
from tightkv.kernels import prefill, reference
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.paged.cache import PagedKV
from torch_ops import TorchPrefillOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=1)


def filled(
    cfg: KVQuantConfig, prefix: int, dim: int = 64, rows: int = 2, heads: int = 2, **options: Any
) -> PagedKV:
    cache = make_cache(
        cfg, dim=dim, rows=rows, heads=heads, dtype=torch.float16, device=DEVICE, **options
    )
    if prefix:
        drawn = tokens(rows, prefix, heads=heads, dim=dim)
        add(cache, *(x.to(DEVICE, torch.float16) for x in drawn))
    return cache


def assert_extends_like_the_reference(
    cache: PagedKV,
    view: CacheView | None = None,
    *,
    heads: int = 6,
    count: int = 20,
    ops: Any = None,
) -> None:
    view = cache.view() if view is None else view
    layout = cache.layout
    rows, dim = view.batch, layout.head_dim
    drawn = tokens(rows, count, heads=layout.num_kv_heads, dim=dim, seed=5)
    new_key, new_value = (x.to(DEVICE, torch.float16).flatten(0, 1) for x in drawn)
    query = torch.randn(rows * count, heads, dim).to(DEVICE, torch.float16)
    cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE) * count
    assert prefill.can_extend(cache.codec, query, view, count)
    arguments: dict[str, Any] = {"scale": 0.1, "new_key": new_key, "new_value": new_value}
    ops = TorchPrefillOps() if ops is None else ops
    out, lse = prefill.extend(cache.codec, query, view, ops, **arguments)
    expected, expected_lse = reference.attend(
        cache.codec, query, view, cu_seqlens, AttendOptions(max_queries=count, **arguments)
    )
    assert out.dtype == query.dtype and out.shape == query.shape
    assert lse.dtype == torch.float32 and lse.shape == expected_lse.shape
    torch.testing.assert_close(lse, expected_lse, atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(out, expected, atol=8e-3, rtol=4e-3)
