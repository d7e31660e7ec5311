"""The exact window: rings that grow, sequences without pages, 16-bit copies of float32 tokens."""

import pytest
import torch

from helpers import add, exact_attention, make_cache, tokens
from tightkv import KVQuantConfig, TightCache
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=1)  # a full ring has 64 tokens
KERNELS = ["reference", "cpu", "triton"]


def test_rings_grow_with_the_longest_sequence():
    cache = make_cache(CFG, exact_limit=100)
    key, value = tokens(2, 160)
    sizes = []
    for at in range(0, 160, 20):
        add(cache, key[:, at : at + 20], value[:, at : at + 20], counts=[20, 10])
        sizes.append((cache.ring_key.shape[1], cache.sink_key.shape[1], cache.table.used_pages))
    # The second row has 60 tokens when the first gets its pages.
    assert sizes[:5] == [(n, 0, 0) for n in (20, 40, 60, 80, 100)]
    assert sizes[5:] == [(64, 2, 4), (70, 2, 5), (80, 2, 5)]
    second = torch.cat([key[1, at : at + 10] for at in range(0, 160, 20)])
    assert torch.equal(cache.dequantize()[0][1, :80], second)


def test_rings_without_a_limit_grow_too():
    cache = make_cache(CFG)
    add(cache, *tokens(2, 40))
    assert cache.ring_key.shape[1] == 40 and cache.table.used_pages == 4
    add(cache, *tokens(2, 90))
    assert cache.ring_key.shape[1] == 64


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_those_of_a_cache_that_never_waited(kernels, dtype):
    layout = PageLayout(CFG.replace(key_bits=3), 1, 64, dtype)
    key, value = (x.to(dtype) for x in tokens(2, 150, heads=1))
    caches = []
    for limit in (0, 120):
        table = SequenceTable(layout.cfg, encode_partial_page=False, exact_limit=limit)
        table.add_rows([0, 9])
        cache = PagedKV(layout, table, "cpu", kernels)
        for first, last in ((0, 50), (50, 51), (51, 115), (115, 121), (121, 150)):
            add(cache, key[:, first:last], value[:, first:last])
            if limit and last < 120:
                assert not table.used_pages
                assert torch.equal(cache.dequantize()[0][0], key[0, :last])
        caches.append(cache)
    eager, waited = caches
    for row in range(2):
        pages = [cache.pages[cache.table.rows[row].pages] for cache in caches]
        assert torch.equal(*pages)
    for name in ("ring_key", "ring_value", "sink_key", "sink_value"):
        assert torch.equal(getattr(waited, name), getattr(eager, name))
    assert waited.table.lengths == eager.table.lengths


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_beyond_the_counts_are_no_part_of_a_sequence_that_gets_pages(kernels):
    layout = PageLayout(CFG, 1, 64, torch.float16)
    key, value = (x.half() for x in tokens(1, 130, heads=1))
    caches = []
    for spare in (0, 1):  # with one, as many tokens are given as are coded
        table = SequenceTable(CFG, encode_partial_page=False, exact_limit=50)
        table.add_rows([0])
        cache = PagedKV(layout, table, "cpu", kernels)
        add(cache, key[:, :1], value[:, :1])
        given = slice(1, 129 + spare)
        add(cache, key[:, given], value[:, given], counts=[128])
        caches.append(cache)
    for one, other in zip(*(cache.dequantize() for cache in caches), strict=True):
        assert torch.equal(one, other)


def test_the_ring_of_a_whole_sequence_cannot_be_dropped():
    cache = make_cache(CFG, rows=1, exact_limit=100)
    add(cache, *tokens(1, 40))
    with pytest.raises(ValueError, match=r"in its ring alone; .* exact_limit=0"):
        cache.table.drop_exact(0)


def test_a_full_pool_is_noticed_before_anything_changes():
    cache = make_cache(CFG, rows=1, exact_limit=100, max_pages=3)
    add(cache, *tokens(1, 100))
    with pytest.raises(MemoryError, match="append needs 4 pages"):
        cache.table.append([0], [1])
    assert cache.table.lengths == [100] and not cache.table.used_pages


# --- float32 models ---
@pytest.mark.parametrize("kernels", KERNELS)
def test_float32_queries_over_16_bit_copies(kernels):
    """Float32 arithmetic: no error beyond its own over what the ring holds."""
    layout = PageLayout(CFG, 1, 64, torch.float16)
    table = SequenceTable(CFG, exact_limit=100)
    table.add_rows([0, 0])
    cache = PagedKV(layout, table, "cpu", kernels)
    key, value = tokens(2, 60, heads=1)
    key = key * 30  # scores beyond what float16 products would keep
    add(cache, key, value)
    assert torch.equal(cache.ring_key, key.half())
    query = torch.randn(2, 1, 2, 64, generator=torch.Generator().manual_seed(1)) * 0.1
    got, lse = attend(cache, query)
    want, want_lse = exact_attention(query, key.half(), value.half(), lengths=[60, 60])
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_float32_chunks_after_16_bit_copies(kernels):
    """New tokens that are not in the cache yet lose no more than they will in it."""
    layout = PageLayout(CFG, 1, 64, torch.float16)
    table = SequenceTable(CFG, exact_limit=100)
    table.add_rows([0, 0])
    cache = PagedKV(layout, table, "cpu", kernels)
    key, value = tokens(2, 60, heads=1)
    add(cache, key[:, :40], value[:, :40])
    query = torch.randn(2, 20, 2, 64, generator=torch.Generator().manual_seed(1))
    got, _ = attend(cache, query, new_key=key[:, 40:], new_value=value[:, 40:])
    want, _ = exact_attention(query, key, value, lengths=[60, 60])
    # Scores of up to about 30 with relative errors of 2^-11.
    torch.testing.assert_close(got.double(), want, atol=30 * 2.0**-11, rtol=0)


def test_copies_of_a_float32_model_have_16_bits_and_an_end():
    cache = TightCache("k4v4")
    key = torch.randn(1, 2, 20, 64)
    key[0, 0, 3, 5], key[0, 1, 7, 0] = 1e6, -3e38
    states, _ = cache.update(key, key, 0)
    states.step.layer.commit()
    kv = cache.layers[0].kv
    assert kv.ring_key.dtype == kv.sink_key.dtype == torch.float16
    whole = cache.layers[0].materialize(states.step)[0]
    assert whole.dtype == torch.float32
    assert whole[0, 0, 3, 5] == 65504 and whole[0, 1, 7, 0] == -65504
    # Half a unit in the last place, and half of the smallest number below the normal ones.
    torch.testing.assert_close(whole, key.clamp(-65504, 65504), atol=2.0**-25, rtol=2.0**-11)
    out, _ = cache.layers[0].attend(states.step, torch.randn(1, 20, 4, 64))
    assert out.dtype == torch.float32 and torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_is_refused_where_asked(dtype):
    cache = TightCache(KVQuantConfig(check_finite=True))
    key = torch.randn(1, 2, 20, 64).to(dtype)
    key[0, 0, 3, 5] = torch.inf
    cache.update(key, key, 0)
    with pytest.raises(ValueError, match="1 of 2560 elements are NaN or Inf"):
        cache.layers[0].commit()
