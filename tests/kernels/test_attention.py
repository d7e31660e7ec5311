import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import add, exact_attention, make_cache, tokens
from kernel_caches import assert_blind_before, poison
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.kernels.registry import select
from tightkv.kernels.view import AttendOptions
from tightkv.paged.attention import attend

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=2)


def query(rows, lq, heads, dim=64, seed=11):
    return torch.randn(rows, lq, heads, dim, generator=torch.Generator().manual_seed(seed))


@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 95, 130, 201]), min_size=1, max_size=3
    ),
    lq=st.sampled_from([1, 2, 7]),
    group=st.sampled_from([1, 3, 4]),
    bits=st.sampled_from([(4, 4, 16), (3, 2, 16), (8, 3, 16), (16, 4, 16), (4, 4, 8), (8, 3, 8)]),
    encode_partial_page=st.booleans(),
    window=st.sampled_from([None, 1, 40]),
    softcap=st.sampled_from([None, 3.0]),
)
@settings(max_examples=40, deadline=None)
def test_equals_exact_attention_over_what_the_cache_holds(
    lengths, lq, group, bits, encode_partial_page, window, softcap
):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], window_bits=bits[2])
    cache = make_cache(cfg, rows=len(lengths), encode_partial_page=encode_partial_page)
    if max(lengths):
        add(cache, *tokens(len(lengths), max(lengths)), counts=lengths)
    poison(cache)
    k, v = cache.dequantize()
    assert torch.isfinite(k).all() and torch.isfinite(v).all()
    q = query(len(lengths), lq, 2 * group)
    out, lse = attend(cache, q, window=window, softcap=softcap)
    expected, expected_lse = exact_attention(
        q, k, v, lengths=lengths, window=window, softcap=softcap
    )
    torch.testing.assert_close(out.double(), expected, atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "cfg",
    [
        KVQuantConfig(key_method="prod", key_bits=3),
        KVQuantConfig(value_method="group", value_bits=2),
        KVQuantConfig(key_method="group", value_method="absmax"),
        KVQuantConfig(key_bits=2, value_bits=3, outlier_share=0.25),
        KVQuantConfig(rotation="none", mean_bits=8),
        KVQuantConfig(rotation="haar", codebook="beta"),
        KVQuantConfig(key_method="prod", key_bits=3, window_bits=8),
        KVQuantConfig(key_bits=2, value_bits=3, outlier_share=0.25, window_bits=8),
        KVQuantConfig(rotation="haar", window_bits=8),
    ],
    ids=lambda c: f"{c.name}-{c.rotation}-{c.window_bits}",
)
@pytest.mark.parametrize("dim", [64, 80])
def test_every_method_attends_over_what_it_decodes(cfg, dim):
    cfg = cfg.replace(page_size=32, group_size=16)
    cache = make_cache(cfg, rows=2, dim=dim)
    add(cache, *tokens(2, 140, dim=dim), counts=[140, 77])
    k, v = cache.dequantize()
    q = query(2, 3, 4, dim)
    out, _ = attend(cache, q)
    expected, _ = exact_attention(q, k, v, lengths=[140, 77])
    torch.testing.assert_close(out.double(), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("key_bits,value_bits,most", [(8, 8, 0.02), (4, 4, 0.2), (3, 3, 0.35)])
def test_close_to_exact_attention(key_bits, value_bits, most):
    """Statistical bound on the whole path: sqrt of the distortions, ring and sinks helping."""
    cache = make_cache(CFG.replace(key_bits=key_bits, value_bits=value_bits))
    key, value = tokens(2, 400)
    add(cache, key, value)
    q = query(2, 4, 4)
    out, _ = attend(cache, q)
    expected, _ = exact_attention(q, key, value, lengths=[400, 400])
    error = float((out - expected).norm() / expected.norm())
    assert 0.002 < error < most


def test_new_tokens_follow_the_cache_exactly():
    key, value = tokens(2, 170)
    cache = make_cache(CFG)
    add(cache, key[:, :130], value[:, :130], counts=[130, 60])
    k, v = cache.dequantize()
    q = query(2, 40, 4)
    new_key, new_value = key[:, 130:], value[:, 130:]
    out, lse = attend(cache, q, new_key=new_key, new_value=new_value)
    for row, n in enumerate((130, 60)):
        k_all = torch.cat([k[row : row + 1, :n], new_key[row : row + 1]], 1)
        v_all = torch.cat([v[row : row + 1, :n], new_value[row : row + 1]], 1)
        expected, expected_lse = exact_attention(q[row : row + 1], k_all, v_all, lengths=[n + 40])
        torch.testing.assert_close(out[row : row + 1].double(), expected, atol=3e-5, rtol=1e-4)
        torch.testing.assert_close(lse[row : row + 1], expected_lse, atol=3e-5, rtol=1e-4)


def test_nothing_before_the_window_is_read():
    cache = make_cache(CFG)
    add(cache, *tokens(2, 357), counts=[357, 40])
    poison(cache)
    for window, counts in ((120, [3, 1]), (120, [1, 1]), (39, [1, 1]), (5, [1, 1])):
        assert_blind_before(window, reference.attend, cache, counts, 2)


def test_left_padding_and_masks():
    cache = make_cache(CFG, left_pad=[0, 50])
    add(cache, *tokens(2, 120))
    k, v = cache.dequantize()
    q = query(2, 3, 6)
    out, _ = attend(cache, q)
    expected, _ = exact_attention(q, k, v, lengths=[120, 120], left_pad=[0, 50])
    torch.testing.assert_close(out.double(), expected, atol=3e-5, rtol=1e-4)

    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 6, 3, 120), (1, 1, 3, 120)):
        for mask in (
            torch.rand(shape, generator=generator) > 0.5,
            torch.randn(shape, generator=generator),
        ):
            out, _ = attend(cache, q, mask=mask)
            expected, _ = exact_attention(q, k, v, lengths=[120, 120], left_pad=[0, 50], mask=mask)
            torch.testing.assert_close(out.double(), expected, atol=3e-5, rtol=1e-4)

    long = query(2, 75, 4)
    out, lse = attend(cache, long)
    assert not out[1, :5].any() and torch.isneginf(lse[1, :5]).all(), "only padding before them"
    assert torch.isfinite(lse[1, 5:]).all()


def test_packed_rows_of_different_lengths():
    """What an engine sends: decoding rows and prefill chunks of different sizes in one call."""
    cache = make_cache(CFG, rows=4)
    add(cache, *tokens(4, 150), counts=[150, 0, 40, 97])
    cu_seqlens = torch.tensor([0, 1, 1, 6, 9], dtype=torch.int32)
    q = query(1, 12, 4)[0]  # three more than the rows own
    out, lse = cache.kernels.attend(
        cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=5)
    )
    k, v = cache.dequantize()
    for row in range(4):
        mine = slice(cu_seqlens[row], cu_seqlens[row + 1])
        n = cache.table.lengths[row]
        expected, expected_lse = exact_attention(
            q[None, mine], k[row : row + 1], v[row : row + 1], lengths=[n]
        )
        torch.testing.assert_close(out[None, mine].double(), expected, atol=3e-5, rtol=1e-4)
        torch.testing.assert_close(lse[None, mine], expected_lse, atol=3e-5, rtol=1e-4)
    assert not out[9:].any() and torch.isneginf(lse[9:]).all()


def test_fully_masked_rows_are_zero_not_nan():
    cache = make_cache(CFG)
    add(cache, *tokens(2, 70))
    mask = torch.zeros(2, 1, 1, 70, dtype=torch.bool)
    mask[1] = True
    out, lse = attend(cache, query(2, 1, 4), mask=mask)
    assert not out[0].any() and torch.isneginf(lse[0]).all()
    assert out[1].any() and torch.isfinite(lse[1]).all()


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_is_not_left_out(number, name):
    """Tokens beside it must not give an answer without it; other heads and rows have theirs."""
    cache = make_cache(CFG.replace(exact_pages=1), dtype=torch.float16, kernels=name)
    add(cache, *(x.half() for x in tokens(2, 70)))
    q = query(2, 1, 4).half()
    q[..., 0] = q[..., 0].abs()  # infinite scores are positive
    plain = attend(cache, q)
    cache.sink_key[0, 1, 1, 0] = number
    for x, expected in zip(attend(cache, q), plain, strict=True):
        assert x[0, 0, 2:].isnan().all()
        assert torch.equal(x[0, 0, :2], expected[0, 0, :2]) and torch.equal(x[1], expected[1])


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_mask_of_no_tokens(name):
    out, lse = attend(
        make_cache(CFG, kernels=name), query(2, 1, 4), mask=torch.ones(2, 1, 1, 0).bool()
    )
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    cache = make_cache(CFG.replace(window_bits=16), dtype=dtype)
    key, value = (x.to(dtype) for x in tokens(2, 100))
    add(cache, key, value)
    assert torch.equal(cache.dequantize()[0][:, 64:], key[:, 64:])
    q = query(2, 2, 4).to(dtype)
    out, lse = attend(cache, q)
    assert out.dtype == dtype and lse.dtype == torch.float32
    k, v = cache.dequantize()
    expected, _ = exact_attention(q, k, v, lengths=[100, 100])
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_long_sequences_go_in_steps(monkeypatch):
    from tightkv.kernels import reference

    cache = make_cache(CFG)
    add(cache, *tokens(2, 500), counts=[500, 180])
    q = query(2, 2, 4)
    whole, _ = attend(cache, q)
    monkeypatch.setattr(reference, "_STEP_BYTES", 2 * 4 * 2 * 64 * 32 * 3)  # three pages a step
    stepped, _ = attend(cache, q)
    torch.testing.assert_close(stepped, whole, atol=1e-5, rtol=1e-5)
    again = make_cache(CFG)
    add(again, *tokens(2, 500), counts=[500, 180])
    assert torch.equal(again.pages, cache.pages)


def test_no_sequences():
    cache = make_cache(CFG, rows=0, left_pad=[])
    out, lse = attend(cache, torch.zeros(0, 1, 4, 64))
    assert out.shape == (0, 1, 4, 64) and lse.shape == (0, 1, 4)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (
            {"query": torch.zeros(2, 4, 64)},
            r"query has shape \[2, 4, 64\]; expected \[2, Lq, Hq, 64\]",
        ),
        ({"query": torch.zeros(3, 1, 4, 64)}, r"expected \[2, "),
        ({"query": torch.zeros(2, 1, 4, 32)}, r"expected \[2, "),
        ({"query": torch.zeros(2, 1, 3, 64)}, "query has 3 heads; the cache has 2"),
        ({"query": torch.zeros(2, 1, 4, 64, dtype=torch.int32)}, "query is int32"),
        ({"query": torch.zeros(2, 1, 4, 64, device="meta")}, "on meta"),
        ({"window": 0}, "window=0"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"new_key": torch.zeros(2, 1, 2, 64)}, "go together"),
        (
            {"new_key": torch.zeros(2, 1, 2, 64), "new_value": torch.zeros(2, 2, 2, 64)},
            "new_value has shape",
        ),
        (
            {"new_key": torch.zeros(2, 2, 2, 64), "new_value": torch.zeros(2, 2, 2, 64)},
            r"new_key has shape \[2, 2, 2, 64\]; expected \[2, 1, 2, 64\]",
        ),
        ({"mask": torch.ones(2, 3, 1, 70, dtype=torch.bool)}, "mask has shape"),
        ({"mask": torch.ones(2, 1, 1, 69, dtype=torch.bool)}, "mask covers 69 tokens"),
    ],
)
def test_bad_operands(options, word):
    cache = make_cache(CFG)
    add(cache, *tokens(2, 70))
    options = {"query": torch.zeros(2, 1, 4, 64), **options}
    with pytest.raises(ValueError, match=word):
        attend(cache, **options)
    assert attend(cache, torch.zeros(2, 1, 4, 64))[0].shape == (2, 1, 4, 64)


def test_masks_cover_rows_and_the_tokens_after_them():
    cache = make_cache(CFG)
    add(cache, *tokens(2, 70))
    new = torch.zeros(2, 20, 2, 64)
    options = {"rows": cache.table.tensors(cache.device), "new_key": new, "new_value": new}
    query = torch.zeros(2, 20, 4, 64)
    with pytest.raises(ValueError, match="mask covers 89 tokens; the cache has 90"):
        attend(cache, query, mask=torch.ones(2, 1, 20, 89, dtype=torch.bool), **options)
    mask = torch.ones(2, 1, 20, 90, dtype=torch.bool)
    assert attend(cache, query, mask=mask, **options)[0].shape == query.shape


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_output_goes_where_it_is_asked_to(name):
    """Also where rows are further apart, as in a part of a larger buffer."""
    cache = make_cache(CFG, rows=2)
    add(cache, *tokens(2, 40))
    kernels_of = select(name, torch.device("cpu"), cache.layout)
    layout = cache.layout
    q = torch.randn(2, 2 * layout.num_kv_heads, layout.head_dim)
    cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    expected, _ = kernels_of.attend(
        cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=1)
    )
    for out in (torch.empty_like(q), torch.empty(2, 9, *q.shape[1:])[:, 3]):
        answer, _ = kernels_of.attend(
            cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=1, out=out)
        )
        assert answer is out and torch.equal(out, expected)
