"""The window of 16 bits: rings that grow, and copies of float32 tokens."""

import pytest
import torch

from helpers import add, exact_attention, make_cache, tokens
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.states import CompressedStates
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=1, window_bits=16)  # rings of 64 tokens
TWO = CFG.replace(exact_pages=2)
KERNELS = ["reference", "cpu", "triton"]


def test_rings_grow_with_the_longest_sequence():
    cache = make_cache(CFG)
    add(cache, *tokens(2, 40))
    assert cache.ring_key.shape[1] == 40 and cache.table.used_pages == 4
    add(cache, *tokens(2, 90))
    assert cache.ring_key.shape[1] == 64


@pytest.mark.parametrize("kernels", KERNELS)
def test_tokens_beyond_the_counts_are_no_part_of_a_sequence_that_gets_pages(kernels):
    layout = PageLayout(CFG, 1, 64, torch.float16)
    key, value = (x.half() for x in tokens(1, 130, heads=1))
    caches = []
    for spare in (0, 1):  # with one, as many tokens are given as are coded
        table = SequenceTable(CFG, encode_partial_page=False)
        table.add_rows([0])
        cache = PagedKV(layout, table, "cpu", kernels)
        add(cache, key[:, :1], value[:, :1])
        given = slice(1, 129 + spare)
        add(cache, key[:, given], value[:, given], counts=[128])
        caches.append(cache)
    for one, other in zip(*(cache.dequantize() for cache in caches), strict=True):
        assert torch.equal(one, other)


def test_a_ring_whose_tokens_have_no_codes_cannot_be_dropped():
    cache = make_cache(CFG, rows=1, encode_partial_page=False)
    add(cache, *tokens(1, 40))
    with pytest.raises(ValueError, match=r"in its ring alone; .* encode_partial_page=True"):
        cache.table.drop_exact(0)


def test_a_full_pool_is_noticed_before_anything_changes():
    cache = make_cache(CFG, rows=1, max_pages=3)
    add(cache, *tokens(1, 96))
    with pytest.raises(MemoryError, match="append needs 1 pages"):
        cache.table.append([0], [1])
    assert cache.table.lengths == [96] and cache.table.used_pages == 3


# --- float32 models ---
@pytest.mark.parametrize("kernels", KERNELS)
def test_float32_queries_over_16_bit_copies(kernels):
    """Float32 arithmetic: no error beyond its own over what the ring holds."""
    layout = PageLayout(TWO, 1, 64, torch.float16)
    table = SequenceTable(TWO)
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
    layout = PageLayout(TWO, 1, 64, torch.float16)
    table = SequenceTable(TWO)
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
    cache = TightCache(KVQuantConfig(window_bits=16))
    key = torch.randn(1, 2, 20, 64)
    key[0, 0, 3, 5], key[0, 1, 7, 0] = 1e6, -3e38
    states, _ = cache.update(key, key, 0)
    assert isinstance(states, CompressedStates)
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
