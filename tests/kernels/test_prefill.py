"""Prefill over a compressed prefix a chunk at a time, against the reference."""

import dataclasses
import itertools
import math

import pytest
import torch

from helpers import add, make_cache, tokens
from kernel_caches import poison
from prefill_caches import CFG, assert_extends_like_the_reference, filled
from tightkv.config import KVQuantConfig
from tightkv.kernels import prefill, sdpa
from tightkv.pages.layout import PageLayout
from torch_ops import TorchPrefillOps


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 64)
    monkeypatch.setattr(prefill, "MIN_QUERIES", 1)


@pytest.mark.parametrize("encode_partial_page", [True, False])
@pytest.mark.parametrize("prefix", [0, 1, 3, 40, 64, 131, 300])
@pytest.mark.parametrize("dim,bits", [(64, 4), (80, 3)])
def test_extend_is_attention_over_pages_ring_sinks_and_new_tokens(
    prefix, dim, bits, encode_partial_page
):
    """Slots that nothing was written to hold NaN."""
    cfg = CFG.replace(key_bits=bits, value_bits=bits)
    cache = filled(cfg, prefix, dim, encode_partial_page=encode_partial_page)
    poison(cache)
    assert cache.view().same_length == prefix
    assert_extends_like_the_reference(cache)


@pytest.mark.parametrize("prefix", [40, 131])
@pytest.mark.parametrize(
    "cfg",
    [CFG.replace(sinks=0), CFG.replace(sinks=32, exact_pages=3), CFG.replace(rotation="none")],
    ids=["no sinks", "a page of sinks", "not rotated"],
)
def test_extend_for_other_configs(cfg, prefix):
    cache = filled(cfg, prefix)
    poison(cache)
    assert_extends_like_the_reference(cache, heads=2)


def test_rows_of_one_length_may_differ_in_what_is_exact():
    """Ring and sinks of a row may be lost; where they are, only the device knows."""
    cache = filled(CFG.replace(window_bits=16), 131, rows=3)
    cache.table.drop_exact(1)
    view = cache.view()
    assert view.same_length == 131 and len(set(view.ring_read_from.tolist())) == 2
    # what is not to be read must not be
    for x in (view.ring_key, view.ring_value, view.sink_key, view.sink_value):
        x[1] = math.nan
    assert_extends_like_the_reference(cache, view)
    order = [2, 1, 0]
    other = dataclasses.replace(
        view,
        block_table=view.block_table[order],
        ring_read_from=view.ring_read_from[order],
        sink_counts=view.sink_counts[order],
        ring_rows=view.ring_rows[order],
    )
    assert_extends_like_the_reference(cache, other)


def test_extend_after_a_crop():
    """The last page then has codes of some tokens alone, and exact copies of the others."""
    cache = filled(CFG, 140, encode_partial_page=False)
    for row in range(2):
        cache.table.crop(row, 100)
    assert_extends_like_the_reference(cache)


@pytest.mark.parametrize("heads,batch,page,tokens", [
    (8, 1, 64, 8192), (8, 2, 64, 8192), (8, 4, 64, 4096), (64, 1, 64, 2048), (3, 8, 128, 5376),
    (64, 64, 64, 64),
])  # fmt: skip
def test_chunks_are_whole_pages_in_bounded_memory(heads, batch, page, tokens, monkeypatch):
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 8192)
    layout = PageLayout(KVQuantConfig(page_size=page), heads, 128, torch.bfloat16)
    assert prefill.chunk_tokens(layout, batch) == tokens


def test_memory_of_a_chunk_is_used_again(monkeypatch):
    """Two buffers, of a chunk or of a shorter prefix, however long the prefix is."""
    seen = set()

    class Watched(TorchPrefillOps):
        def load_prefix(self, codec, view, cu_seqlens, count, key, value):
            seen.add((key.data_ptr(), value.data_ptr(), key.shape[1]))
            super().load_prefix(codec, view, cu_seqlens, count, key, value)

    for prefix, held in ((300, 64), (40, 64), (20, 32)):
        seen.clear()
        assert_extends_like_the_reference(filled(CFG, prefix), ops=Watched())
        assert [size for *_, size in seen] == [held]


def test_only_rows_of_one_known_length_qualify(monkeypatch):
    monkeypatch.setattr(prefill, "MIN_QUERIES", 256)
    cache = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16)
    key, value = (x.half() for x in tokens(2, 50))
    add(cache, key, value, counts=[50, 40])
    assert cache.view().same_length is None
    padded = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16, left_pad=[3, 3])
    add(padded, key, value)
    assert padded.view().same_length is None
    alike = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16)
    add(alike, key, value)
    query = torch.zeros(600, 2, 64).half()
    assert prefill.can_extend(alike.codec, query, alike.view(), 300)
    assert not prefill.can_extend(alike.codec, query, alike.view(), 299), "rows must be even"
    assert not prefill.can_extend(alike.codec, query.float(), alike.view(), 300)
    assert not prefill.can_extend(alike.codec, query[:20], alike.view(), 10)
    wide = make_cache(KVQuantConfig(page_size=32), dtype=torch.float16, dim=512)
    add(wide, *(x.half() for x in tokens(2, 50, dim=512)))
    query = torch.zeros(600, 2, 512).half()
    assert not prefill.can_extend(wide.codec, query, wide.view(), 300), "torch has heads of 256"


@pytest.mark.parametrize("capability,fastest", [((9, 0), "_cudnn"), ((8, 0), "_flash")])
def test_cudnn_gets_lengths_that_come_again(capability, fastest, monkeypatch):
    """It plans every new shape for longer than a call saves."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    def first_backend(queries, keys, any_length=False):
        q, k = torch.empty(1, 2, queries, 64), torch.empty(1, 1, keys, 64)
        return sdpa._backends(q, k, any_length)[0].__name__

    assert first_backend(512, 8192) == first_backend(300, 999, any_length=True) == fastest
    assert first_backend(512, 100) == first_backend(513, 8192) == "_flash"


def test_attention_falls_back_where_a_kernel_refuses(monkeypatch):
    """Grouped heads first, repeated heads next; the reason is kept where nothing is left."""
    calls = []

    def refuse(q, k, v, scale, causal):
        calls.append(k.shape[1])
        raise RuntimeError("no such kernel")

    def repeated_only(q, k, v, scale, causal):
        if k.shape[1] != q.shape[1]:
            refuse(q, k, v, scale, causal)
        return sdpa.AttentionState(q, k)

    q, k = torch.empty(1, 6, 4, 64, device="meta"), torch.empty(1, 2, 4, 64, device="meta")
    monkeypatch.setattr(sdpa, "_backends", lambda *_: [refuse, repeated_only])
    assert sdpa.sdpa_with_lse(q, k, k, 1.0).lse.shape[1] == 6
    assert calls == [2, 6, 2]
    monkeypatch.setattr(sdpa, "_backends", lambda *_: [refuse])
    with pytest.raises(RuntimeError, match=r"no attention for q \[1, 6, 4, 64\]"):
        sdpa.sdpa_with_lse(q, k, k, 1.0)


@pytest.mark.parametrize("count", [1, 511, 512, 1024, 3616, 8192, 8191])
def test_chunks_are_cut_into_lengths_that_come_again(count):
    cuts = list(prefill.sdpa_cuts(count))
    assert cuts[0][0] == 0 and cuts[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
    for low, high in cuts[:-1]:
        assert high - low in (1024, 2048, 4096)
    assert cuts[-1][1] - cuts[-1][0] < 1024 or (cuts[-1][1] - cuts[-1][0]).bit_count() == 1


@pytest.mark.parametrize("prefix", [0, 131])
@pytest.mark.parametrize("count", [16, 20, 33])
def test_queries_are_padded_and_nobody_sees_it(prefix, count, monkeypatch):
    monkeypatch.setattr(sdpa, "CUDNN_MULTIPLE", 16)
    monkeypatch.setattr(prefill, "PAD_FROM", 20)
    lengths = []
    attention = prefill.sdpa_with_lse

    def watched(q, *rest, **options):
        lengths.append(q.shape[2])
        return attention(q, *rest, **options)

    monkeypatch.setattr(prefill, "sdpa_with_lse", watched)
    assert_extends_like_the_reference(filled(CFG, prefix), count=count)
    assert all(length % 16 == 0 for length in lengths) and lengths[0] >= count


def test_attention_of_an_engine_comes_first_and_takes_any_length(monkeypatch):
    """Nothing is padded or cut for it; where it refuses, torch's attention answers."""
    monkeypatch.setattr(sdpa, "_PREFERRED", [])
    asked = []

    def engines(q, k, v, scale, causal):
        asked.append((q.shape[2], k.shape[2]))
        raise RuntimeError("no such head")

    sdpa.prefer(engines)
    sdpa.prefer(engines)
    assert sdpa.length_multiple() == 1 and list(prefill.sdpa_cuts(3616)) == [(0, 3616)]
    flash = torch.empty(1, 1, 1, 1)
    monkeypatch.setattr(sdpa, "_flash", lambda *_: sdpa.AttentionState(flash, flash))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    q = torch.empty(1, 2, 33, 64, device="meta")
    assert sdpa.sdpa_with_lse(q, q, q, 1.0).out is flash
    assert asked == [(33, 33)]
