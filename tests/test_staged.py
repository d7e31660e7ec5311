"""Prefill over a compressed prefix a piece at a time, against the reference."""

import pytest
import torch

from helpers import add, make_cache, tokens
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference, staged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dequantize_pages(codec, view, first, last):
    """The reference's dequantizer in the shape of the kernel's."""
    records = view.pages[view.block_table[:, first:last].long()]
    key, value = reference.dequantize(codec, records)  # [B, n, Hkv, page, D]
    dtype = codec.layout.dtype
    return tuple(x.transpose(1, 2).flatten(2, 3).to(dtype) for x in (key, value))


@pytest.mark.parametrize("prefix", [0, 3, 40, 131, 300])
@pytest.mark.parametrize("dim,bits", [(64, 4), (80, 3)])
def test_extend_is_attention_over_pages_ring_sinks_and_new_tokens(prefix, dim, bits, monkeypatch):
    monkeypatch.setattr(staged, "STAGE_TOKENS", 64)
    monkeypatch.setattr(staged, "LEAST_QUERIES", 1)
    cfg = KVQuantConfig(page_size=32, sinks=2, exact_pages=1, key_bits=bits, value_bits=bits)
    cache = make_cache(cfg, dim=dim, dtype=torch.float16, device=DEVICE)
    if prefix:
        add(cache, *(x.to(DEVICE, torch.float16) for x in tokens(2, prefix, dim=dim)))
    new_key, new_value = (
        x.to(DEVICE, torch.float16).flatten(0, 1) for x in tokens(2, 20, dim=dim, seed=5)
    )
    query = torch.randn(40, 6, dim, device=DEVICE).half()
    first = torch.tensor([0, 20, 40], dtype=torch.int32, device=DEVICE)
    view = cache.view()
    assert view.same_length == (prefix, cache.table.rows[0].ring_start, min(2, prefix))
    assert staged.can_extend(cache.codec, query, view, 20)
    out, lse = staged.extend(
        cache.codec, query, view, dequantize_pages,
        scale=0.1, new_key=new_key, new_value=new_value,
    )  # fmt: skip
    expected, expected_lse = reference.attend(
        cache.codec, query, view, first,
        max_queries=20, scale=0.1, new_key=new_key, new_value=new_value,
    )  # fmt: skip
    assert out.dtype == query.dtype and lse.shape == expected_lse.shape
    torch.testing.assert_close(lse, expected_lse, atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(out, expected, atol=8e-3, rtol=4e-3)


def test_only_rows_of_one_known_length_qualify():
    cache = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16)
    key, value = (x.half() for x in tokens(2, 50))
    add(cache, key, value, counts=[50, 40])
    assert cache.view().same_length is None
    padded = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16, starts=[3, 3])
    add(padded, key, value)
    assert padded.view().same_length is None
    alike = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16)
    add(alike, key, value)
    query = torch.zeros(600, 2, 64).half()
    assert staged.can_extend(alike.codec, query, alike.view(), 300)
    assert not staged.can_extend(alike.codec, query, alike.view(), 299), "rows must be even"
    assert not staged.can_extend(alike.codec, query.float(), alike.view(), 300)
    assert not staged.can_extend(alike.codec, query[:20], alike.view(), 10)
