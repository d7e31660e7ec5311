"""The native CPU kernels against the reference: the same bytes, and the same attention."""

import copy
import ctypes
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sanitizers
from helpers import add, exact_attention, make_cache, tokens
from kernel_caches import assert_blind_before, poison
from rounding import following
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference, registry
from tightkv.kernels.cpu import backend as cpu
from tightkv.kernels.cpu import library
from tightkv.kernels.ragged_plan import uniform_cu_seqlens
from tightkv.kernels.view import AttendOptions
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout

_MISSING = cpu.unavailable("cpu")
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=f"native CPU kernels: {_MISSING}")
ISAS = [] if _MISSING else library.supported(library.load())
CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=2)
CPU = torch.device("cpu")
BITS = (2, 3, 4, 8)
# Instruction sets that round queries and weights to 16 bits (docs/cpu.md).
ROUNDING = ("dotprod", "vnni", "avx512_vnni", "avx512", "avxvnni", "avx2")


@pytest.fixture(params=ISAS)
def isa(request):
    """Runs a test on each instruction set of this machine."""
    library.use(library.load(), request.param)
    yield request.param
    library.use(library.load(), None)


def query(rows, heads, dim, seed=11):
    return torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(seed))


def native(cache):
    """The same cache, on the native kernels."""
    cache._kernels = cpu.NAME
    return cache


def score_error(isa, cache, q):
    """What a score may differ by: rounding of floats, or 9 times the rms of 16-bit queries."""
    keys = reference.dequantize(cache.codec, cache.pages)[0].norm(dim=-1).nan_to_num(0)
    norms = float(q.float().norm(dim=-1).max() * keys.max()) if keys.numel() else 0.0
    return (2.5e-5 if isa in ROUNDING else 2e-6) * norms / math.sqrt(q.shape[-1]) + 2e-6


def check_equal(isa, cache, got, expected, q):
    """Output and LSE within what the instruction set's rounding explains."""
    error = score_error(isa, cache, q)
    largest = float(expected[0].abs().max()) if expected[0].numel() else 0.0
    # Weights 127 * 254 + 126 to the largest; values of magnitude a few times the output's.
    atol = (2 * error + (1e-4 if isa in ROUNDING else 1e-6)) * (largest + 1)
    torch.testing.assert_close(got[0].float(), expected[0].float(), atol=atol, rtol=1e-5)
    torch.testing.assert_close(got[1], expected[1], atol=error, rtol=1e-6)


def both(cache, q, lq, **options):
    """Native and reference attention of q [rows * lq, Hq, D]."""
    cu_seqlens = uniform_cu_seqlens(len(q) // lq, lq, CPU)
    view = cache.view()
    options["max_queries"] = lq
    return tuple(
        m.attend(cache.codec, q, view, cu_seqlens, AttendOptions(**options))
        for m in (cpu, reference)
    )


def check_every_isa(cache, q, lq, **options):
    """Each instruction set of this machine against the reference."""
    cu_seqlens, view = uniform_cu_seqlens(len(q) // lq, lq, CPU), cache.view()
    expected = reference.attend(
        cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=lq, **options)
    )
    try:
        for isa in ISAS:
            library.use(library.load(), isa)
            got = cpu.attend(
                cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=lq, **options)
            )
            check_equal(isa, cache, got, expected, q)
    finally:
        library.use(library.load(), None)


def same_bytes(a, b):
    """Every tensor two caches hold."""
    names = ("pages", *a.exact_names)
    return all(torch.equal(getattr(a, n), getattr(b, n)) for n in names)


# --- attend ---
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("key_bits", BITS)
def test_every_width_and_head_dim(dim, key_bits):
    for value_bits in BITS:
        window = {"window_bits": 8 if key_bits == value_bits else 16}
        cfg = CFG.replace(key_bits=key_bits, value_bits=value_bits, **window)
        cache = make_cache(cfg, dim=dim)
        add(cache, *tokens(2, 261, dim=dim), counts=[261, 170])
        q = query(2, 6, dim)
        check_every_isa(cache, q, 1)


@given(
    lengths=st.lists(
        st.sampled_from([0, 1, 31, 32, 33, 64, 65, 130, 201, 300]), min_size=1, max_size=3
    ),
    lq=st.sampled_from([1, 2, 7]),
    group=st.sampled_from([1, 2, 3, 4, 5]),
    bits=st.sampled_from([(4, 4), (3, 2), (8, 3), (2, 8)]),
    page_size=st.sampled_from([32, 64]),
    encode_partial_page=st.booleans(),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 40]),
    softcap=st.sampled_from([None, 3.0]),
    window_bits=st.sampled_from([8, 16]),
)
@settings(max_examples=60)
def test_odd_lengths_windows_and_caps(
    lengths, lq, group, bits, page_size, encode_partial_page, causal, window, softcap, window_bits
):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], page_size=page_size)
    cfg = cfg.replace(window_bits=window_bits)
    cache = make_cache(cfg, rows=len(lengths), encode_partial_page=encode_partial_page)
    if max(lengths):
        add(cache, *tokens(len(lengths), max(lengths)), counts=lengths)
    poison(cache)
    q = query(len(lengths) * lq, 2 * group, 64)
    check_every_isa(cache, q, lq, causal=causal, window=window, softcap=softcap)


@pytest.mark.parametrize("window_bits", [8, 16])
def test_nothing_before_the_window_is_read(window_bits):
    try:
        for isa in ISAS:
            library.use(library.load(), isa)
            cache = make_cache(CFG.replace(window_bits=window_bits))
            add(cache, *tokens(2, 357), counts=[357, 40])
            poison(cache)
            for window, counts in ((120, [3, 1]), (120, [1, 1]), (39, [1, 1]), (5, [1, 1])):
                assert_blind_before(window, cpu.attend, cache, counts, 2)
    finally:
        library.use(library.load(), None)


def test_open_pages_have_no_mean_yet():
    """Without exact copies the open page is read from codes, and its mean was never written."""
    cache = make_cache(CFG)
    add(cache, *tokens(2, 45))
    for row in (0, 1):
        cache.table.drop_exact(row)
        page = cache.table.rows[row].pages[1]
        cache.pages[page, :, cache.layout.mean_offset :] = 0xFF
    check_every_isa(cache, query(2, 4, 64), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window_bits", [8, 16])
def test_query_and_ring_dtypes(isa, dtype, window_bits):
    cache = make_cache(CFG.replace(window_bits=window_bits), dtype=dtype)
    key, value = tokens(2, 300)
    add(cache, key.to(dtype), value.to(dtype))
    q = query(2, 4, 64).to(dtype)
    got, expected = both(cache, q, 1)
    assert got[0].dtype == dtype
    step = {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    error = score_error(isa, cache, q)
    close = {"atol": 3 * error + 2e-4, "rtol": step}
    torch.testing.assert_close(got[0].float(), expected[0].float(), **close)
    torch.testing.assert_close(got[1], expected[1], atol=error, rtol=0)


@pytest.mark.parametrize("lq", [1, 5])
@pytest.mark.parametrize("window_bits", [8, 16])
def test_new_tokens_in_another_dtype_than_the_ring(isa, lq, window_bits):
    """Blocks of exact tokens of two dtypes, for few rows and for many."""
    cache = make_cache(CFG.replace(window_bits=window_bits), dtype=torch.bfloat16)
    add(cache, *(x.bfloat16() for x in tokens(2, 150)))
    new = {"new_key": query(2 * lq, 2, 64, seed=5), "new_value": query(2 * lq, 2, 64, seed=6)}
    q = query(2 * lq, 4, 64)
    got, expected = both(cache, q, lq, **new)
    check_equal(isa, cache, got, expected, q)


def same_attention(cache, q, **options):
    """The public function's output and LSE are those of a view made now, bit for bit."""
    rows = cache.table.tensors(cache.device)
    got, expected = attend(cache, q, **options), attend(cache, q, rows=rows, **options)
    return all(map(torch.equal, got, expected))


@pytest.mark.parametrize("window_bits", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_steps_that_are_alike(dtype, window_bits):
    """What is kept from one decode step to the next is dropped when anything else changes."""
    cfg = CFG.replace(window_bits=window_bits)
    cache = make_cache(cfg, dtype=dtype, kernels="cpu", encode_partial_page=False)
    key, value = tokens(2, 300)
    add(cache, key[:, :100], value[:, :100])
    kept = 0
    for step in range(100, 180):
        rows = cache.ring_key
        add(cache, key[:, step : step + 1], value[:, step : step + 1])
        kept += cache._again is not None and cache._put is not None
        stored = cache.dequantize()[0][:, -1]
        error = 0 if window_bits == 16 else 2**-10 * key[:, step].abs().max()
        assert (stored - key[:, step].to(dtype)).abs().max() <= error
        q = torch.randn(2, 1, 4, 64)
        assert same_attention(cache, q) and same_attention(cache, q, window=20)
        assert same_attention(cache, q.bfloat16()) and same_attention(cache, q[:, :, :2])
        assert same_attention(cache, q.expand(2, 3, 4, 64)) and same_attention(cache, q)
        if step == 120:
            cache = copy.deepcopy(cache)
            assert cache._again is None and cache._put is None
        if step == 140:
            cache.ring_key = rows.clone()
        if step == 150:
            cache.table.select([1, 0])
            cache.select([1, 0])
            key, value = key.flip(0), value.flip(0)
    assert kept > 60


def test_new_tokens_and_varlen_rows(isa):
    """Queries packed row by row, one row without any, and exact tokens that follow the cache."""
    cache = make_cache(CFG, rows=3)
    add(cache, *tokens(3, 150), counts=[150, 33, 90])
    cu_seqlens = torch.tensor([0, 40, 40, 47], dtype=torch.int32)
    q = query(47, 4, 64)
    key, value = query(47, 2, 64, seed=5), query(47, 2, 64, seed=6)
    view = cache.view()
    options = {"max_queries": 40, "new_key": key, "new_value": value}
    got, expected = (
        m.attend(cache.codec, q, view, cu_seqlens, AttendOptions(**options))
        for m in (cpu, reference)
    )
    check_equal(isa, cache, got, expected, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_prompts_as_slices_of_one_projection(isa, dtype, window):
    """Long enough to be packed; rows of unequal lengths, and tokens of none before and after."""
    cache = make_cache(CFG, rows=3, dtype=dtype)
    add(cache, *(x.to(dtype) for x in tokens(3, 150)), counts=[150, 0, 70])
    projected = torch.randn(300, 8, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    q, key, value = projected.split([4, 2, 2], 1)
    cu_seqlens = torch.tensor([2, 135, 266, 297], dtype=torch.int32)
    options = AttendOptions(max_queries=133, window=window, new_key=key, new_value=value)
    got, expected = (
        m.attend(cache.codec, q, cache.view(), cu_seqlens, options) for m in (cpu, reference)
    )
    if dtype == torch.bfloat16:
        torch.testing.assert_close(got[0], expected[0])  # to a rounding of the output
        got, expected = (got[0] * 0, got[1]), (expected[0] * 0, expected[1])
    check_equal(isa, cache, got, expected, q)


@pytest.mark.parametrize("rotation", ["none", "hadamard"])
@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000], ids=hex)
@pytest.mark.parametrize("shape", ["pages", "ring", "ring of codes", "one token"])
def test_bad_queries_give_nan(isa, rotation, bits, shape):
    """NaN, one of bytes 0xFF, and infinities: that head's output is NaN, others do not change."""
    window_bits = 8 if shape == "ring of codes" else 16
    cfg = CFG.replace(rotation=rotation, sinks=0, window_bits=window_bits)
    cache = make_cache(cfg, rows=1)
    add(cache, *tokens(1, 256 if shape == "pages" else 20))
    if shape == "pages":
        cache.table.drop_exact(0)
    q, window = query(1, 4, 64), 1 if shape == "one token" else None
    number = torch.tensor([bits]).to(torch.uint32).view(torch.float32)
    good = both(cache, q, 1, window=window)[0]
    for at in (0, 13, 63):
        bad = q.clone()
        bad[0, 1, at] = number
        out, lse = both(cache, bad, 1, window=window)[0]
        if math.isnan(number) or shape != "one token":  # else a score is -inf
            assert out[0, 1].isnan().all() and lse[0, 1].isnan()
        rest = [0, 2, 3]
        assert torch.equal(out[0, rest], good[0][0, rest])
        assert torch.equal(lse[0, rest], good[1][0, rest])


def test_nan_in_pages_is_not_lost(isa):
    cache = make_cache(CFG.replace(sinks=0), rows=1)
    add(cache, *tokens(1, 600))
    pages = cache.pages.clone()
    for side in ("key", "value"):
        for at in (0, 5, 100, 383, 511):
            cache.pages.copy_(pages)
            page = torch.tensor([cache.table.rows[0].pages[at // 32]])
            fields = cache.layout.read(cache.pages[page], side)
            fields = {n: x[:, :, at % 32] for n, x in fields.items()}
            fields["scale"] = torch.full_like(fields["scale"], math.nan)
            cache.layout.write_tokens(cache.pages, page, torch.tensor([at % 32]), side, fields)
            out, _ = both(cache, query(1, 4, 64), 1)[0]
            assert out.isnan().all()


def test_negative_scales(isa):
    """A file may hold them, larger than all others."""
    cache = make_cache(CFG.replace(sinks=0, rotation="none"), rows=1)
    add(cache, *tokens(1, 300))
    page = torch.tensor([cache.table.rows[0].pages[1]])
    fields = {n: x[:, :, 3] for n, x in cache.layout.read(cache.pages[page], "value").items()}
    fields["scale"] = fields["scale"] * -5
    cache.layout.write_tokens(cache.pages, page, torch.tensor([3]), "value", fields)
    q = query(1, 4, 64)
    got, expected = both(cache, q, 1)
    check_equal(isa, cache, got, expected, q)


def test_queries_of_no_row_are_zero(isa):
    cache = make_cache(CFG, rows=1)
    add(cache, *tokens(1, 70))
    cu_seqlens = torch.tensor([1, 2], dtype=torch.int32)
    out, lse = cpu.attend(
        cache.codec, query(4, 2, 64), cache.view(), cu_seqlens, AttendOptions(max_queries=1)
    )
    assert (out[[0, 2, 3]] == 0).all() and (lse[[0, 2, 3]] == -math.inf).all()
    assert (out[1] != 0).all() and torch.isfinite(lse[1]).all()


def test_empty_batch():
    cache = make_cache(CFG, rows=1)
    cache.table.select([])
    cache.select([])
    cu_seqlens = torch.zeros(1, dtype=torch.int32)
    out, lse = cpu.attend(
        cache.codec, query(0, 2, 64), cache.view(), cu_seqlens, AttendOptions(max_queries=0)
    )
    assert out.shape == (0, 2, 64) and lse.shape == (0, 2)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("heads", [1, 4])
def test_masks(isa, kind, heads):
    cache = make_cache(CFG)
    add(cache, *tokens(2, 300))
    keep = torch.rand(2, heads, 3, 310, generator=torch.Generator().manual_seed(3)) < 0.5
    keep[1, :, 1] = False  # a row that sees nothing
    if kind == torch.bool:
        mask = keep
    else:
        bias = torch.randn(keep.shape, generator=torch.Generator().manual_seed(4))
        mask = torch.where(keep, bias, -math.inf).to(kind)
    q = query(6, 4, 64)
    got, expected = both(cache, q, 3, mask=mask)
    assert (got[0][4] == 0).all() and (got[1][4] == -math.inf).all()
    check_equal(isa, cache, got, expected, q)


def test_strided_masks_and_queries(isa):
    cache = make_cache(CFG)
    add(cache, *tokens(2, 300))
    mask = torch.rand(300, 3, generator=torch.Generator().manual_seed(3)).T[None, None] < 0.5
    q = query(4, 6, 64).transpose(0, 1)  # heads and tokens swapped, not copied
    assert not q.is_contiguous()
    got, expected = both(cache, q, 3, mask=mask)
    check_equal(isa, cache, got, expected, q)


def test_pages_at_any_byte(isa):
    cache = make_cache(CFG)
    add(cache, *tokens(2, 300))
    q = query(2, 4, 64)
    expected, _ = both(cache, q, 1)
    moved = torch.empty(cache.pages.numel() + 3, dtype=torch.uint8)[3:].view(cache.pages.shape)
    cache.pages = moved.copy_(cache.pages)
    got, _ = both(cache, q, 1)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize("lq", [1, 5, 70])
@pytest.mark.parametrize("window_bits", [8, 16])
def test_results_do_not_depend_on_threads(isa, lq, window_bits):
    cache = make_cache(CFG.replace(window_bits=window_bits))
    add(cache, *tokens(2, 3000), counts=[3000, 1200])
    q = query(2 * lq, 4, 64)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(both(cache, q, lq)[0])
    torch.set_num_threads(before)
    check_equal(isa, cache, results[0], both(cache, q, lq)[1], q)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_own_threads_give_the_same():
    """Without torch's OpenMP runtime the library starts threads itself."""
    cache = make_cache(CFG)
    add(cache, *tokens(2, 3000))
    q = query(2, 4, 64)
    expected = both(cache, q, 1)[0]
    lib, before = library.load(), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        lib.tightkv_share_threads(None)
        got = both(cache, q, 1)[0]
    finally:
        torch.set_num_threads(before)
        lib.tightkv_share_threads(library._torch_parallel())
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@pytest.mark.parametrize(
    "options",
    [
        {"rotation": "none"},
        {"rotation": "haar"},
        {"key_centering": "none"},
        {"mean_bits": 8},
        {"key_scale": "corrected", "value_scale": "least_squares"},
        {"sinks": 0, "exact_pages": 1, "page_size": 256},
        {"rotation": "none", "window_bits": 8},
        {"rotation": "haar", "window_bits": 8},
    ],
    ids=str,
)
def test_other_options(isa, options):
    cfg = CFG.replace(**options)
    cache = make_cache(cfg, rows=2, left_pad=[0, 9])
    add(cache, *tokens(2, 600), counts=[600, 333])
    q = query(4, 6, 64)
    got, expected = both(cache, q, 2, scale=0.3)
    check_equal(isa, cache, got, expected, q * 2.4)


def test_through_the_public_function(isa):
    """attend() on "auto" takes the native kernels, and they attend to what the cache holds."""
    table = SequenceTable(CFG)
    table.add_rows([0, 0])
    cache = PagedKV(PageLayout(CFG, 2, 64, torch.float32), table)
    assert cache.kernels is cpu
    add(cache, *tokens(2, 200, bias=0.5), counts=[200, 77])
    k, v = cache.dequantize()
    q = query(6, 4, 64).unflatten(0, (2, 3))
    out, lse = attend(cache, q)
    expected, expected_lse = exact_attention(q, k, v, lengths=[200, 77])
    torch.testing.assert_close(out.double(), expected, atol=3e-4, rtol=1e-4)
    torch.testing.assert_close(lse, expected_lse, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_batches_in_any_order_of_dimensions(rows, count):
    """[B, T, heads, D] as models hand it over."""
    orders = {
        "tokens first": lambda x: x.contiguous(),
        "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "rows last": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "dim first": lambda x: x.movedim(3, 0).contiguous().movedim(0, 3),
    }
    q = query(rows * count, 4, 64).view(rows, count, 4, 64)
    key, value = tokens(rows, 100 + count)
    found = []
    for order in orders.values():
        cache = native(make_cache(CFG, rows=rows, left_pad=[0] * rows))
        add(cache, key[:, :100], value[:, :100])
        new = order(key[:, 100:]), order(value[:, 100:])
        ahead = attend(cache, order(q), new_key=new[0], new_value=new[1])
        add(cache, *new)
        found.append((*ahead, *attend(cache, order(q)), cache.ring_key, cache.pages))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert a.shape == b.shape and torch.equal(a, b)


def test_sixteen_bit_error_is_as_documented():
    """docs/cpu.md: score errors of 5e-6 |q| |k| scale (rms), and far more exact in floats."""
    cache = make_cache(CFG.replace(sinks=0, exact_pages=1), rows=1, heads=1, dim=128)
    add(cache, *tokens(1, 2000, heads=1, dim=128, bias=0.0))
    q = query(1, 4, 128) * 0.02  # flat attention: the LSE's error is the scores' mean error
    view, cu_seqlens = cache.view(), uniform_cu_seqlens(1, 1, CPU)
    keys = reference.materialize(cache.codec, view)[0][0, :, 0]
    norms = float(q.norm(dim=-1).max() * keys.norm(dim=-1).max()) / math.sqrt(128)
    expected = reference.attend(cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=1))
    for isa in ISAS:
        library.use(library.load(), isa)
        got = cpu.attend(cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=1))
        size = expected[0].norm()
        assert (got[0] - expected[0]).norm() / size < (5e-5 if isa in ROUNDING else 2e-6), isa
        assert (got[1] - expected[1]).abs().max() < 5e-6 * norms + 2e-6, isa
    library.use(library.load(), None)


@pytest.mark.parametrize(
    "same", [("vnni", "avx512"), ("avx512_vnni", "avx512"), ("avxvnni", "avx2")], ids=str
)
@pytest.mark.parametrize("dim", [80, 128, 512])
@pytest.mark.parametrize("bits", BITS)
def test_integer_products_have_the_same_bits(same, dim, bits):
    """Sums of integers are exact, whatever instructions add them up; the rest is shared."""
    if not set(same) <= set(ISAS):
        pytest.skip(f"needs {' and '.join(same)}")
    cache = make_cache(CFG.replace(key_bits=bits, value_bits=bits), dim=dim)
    add(cache, *tokens(2, 261, dim=dim))
    q = query(2, 6, dim)
    found = []
    for isa in same:
        library.use(library.load(), isa)
        found.append(both(cache, q, 1)[0])
    library.use(library.load(), None)
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dim", [512, 528, 1024, 1040])
def test_wide_heads(isa, dim):
    """Up to the widest heads whose sums integers have room for, and beyond."""
    cfg = CFG.replace(rotation="none", key_bits=8, value_bits=8, key_centering="none")
    cache = make_cache(cfg, rows=1, heads=1, dim=dim)
    add(cache, *(torch.ones(1, 200, 1, dim) for _ in range(2)))
    got, expected = both(cache, torch.ones(1, 4, dim), 1)
    torch.testing.assert_close(got[0], expected[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got[1], expected[1], atol=1e-3, rtol=1e-4)


# --- append ---
def assert_adds_alike(ours, theirs, key, value, counts=None):
    """The same tokens to a native cache and to one of the reference."""
    add(ours, key, value, counts)
    with following(ours):
        add(theirs, key, value, counts)
    assert same_bytes(ours, theirs)


def assert_same_history(cfg, appends, *, dim, dtype, **table):
    ours, theirs = (make_cache(cfg, dim=dim, dtype=dtype, **table) for _ in range(2))
    for seed, counts in enumerate(appends):
        key, value = tokens(2, max(counts), dim=dim, seed=seed)
        assert_adds_alike(native(ours), theirs, key.to(dtype), value.to(dtype), counts)
    assert ours.pages.any()


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encode_partial_page", [True, False])
def test_append_writes_the_same_bytes(dim, bits, dtype, encode_partial_page):
    for mode, options in {
        "unbiased": {},
        "corrected": {"mean_bits": 8, "page_size": 64, "window_bits": 8},
        "norm": {"key_centering": "none"},
        "least_squares": {"rotation": "haar", "window_bits": 8},
    }.items():
        cfg = CFG.replace(
            key_bits=bits, value_bits=bits, key_scale=mode, value_scale=mode, **options
        )
        shape = {
            "dim": dim,
            "dtype": dtype,
            "encode_partial_page": encode_partial_page,
            "left_pad": [0, 5],
        }
        appends = [(70, 45), (1, 1), (3, 0), (37, 90)]
        assert_same_history(cfg, appends, **shape)


@pytest.mark.slow
@pytest.mark.parametrize("window_bits", [8, 16])
def test_a_million_codes_are_the_same(window_bits):
    """Sums in float64 are in another order; what they are rounded to shows it in none of them."""
    shape = {"dim": 128, "dtype": torch.float32, "encode_partial_page": False}
    assert_same_history(KVQuantConfig(window_bits=window_bits), [(4096, 4096)], **shape)


@pytest.mark.parametrize("window_bits", [8, 16])
def test_append_without_exact_copies_keeps_codes(window_bits):
    """Tokens whose exact copy was dropped keep their codes and their page's mean when sealed."""
    cfg = CFG.replace(window_bits=window_bits)
    ours, theirs = native(make_cache(cfg)), make_cache(cfg)
    assert_adds_alike(ours, theirs, *tokens(2, 45))
    ours.table.drop_exact(0), theirs.table.drop_exact(0)
    assert_adds_alike(ours, theirs, *tokens(2, 60, seed=1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("window_bits", [8, 16])
def test_append_of_bad_numbers(bits, window_bits):
    key, value = tokens(2, 64)
    key[0, 3, 0, 5], key[1, 9, 1, 2], value[0, 8, 1, 1] = math.nan, math.inf, -math.inf
    if bits == 8:
        value[1, 40, 0, :] = 3e38  # NaN once it is rotated
    cfg = CFG.replace(key_bits=bits, value_bits=bits, mean_bits=8, window_bits=window_bits)
    ours, theirs = native(make_cache(cfg)), make_cache(cfg)
    add(ours, key, value)
    with following(ours):
        add(theirs, key, value)
    for name in ("pages", "ring_key", "ring_value", "ring_scales")[: 1 if window_bits == 16 else 4]:
        got, expected = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
    strict = native(make_cache(CFG.replace(check_finite=True)))
    with pytest.raises(ValueError, match="NaN or Inf"):
        add(strict, key, value)
    assert not strict.pages.any()


@pytest.mark.parametrize("window_bits", [8, 16])
def test_append_in_another_dtype(window_bits):
    """New tokens in float32 for a bfloat16 cache: sealed from what came, kept rounded."""
    cfg = CFG.replace(window_bits=window_bits)
    ours, theirs = (make_cache(cfg, dtype=torch.bfloat16) for _ in range(2))
    for seed in range(3):
        assert_adds_alike(native(ours), theirs, *tokens(2, 45, seed=seed))


@pytest.mark.parametrize("window_bits", [8, 16])
def test_append_threads(window_bits):
    before = torch.get_num_threads()
    caches = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        cfg = CFG.replace(window_bits=window_bits)
        caches.append(native(make_cache(cfg, encode_partial_page=True)))
        add(caches[-1], *tokens(2, 500), counts=(500, 300))
        add(caches[-1], *tokens(2, 1, seed=1))
    torch.set_num_threads(before)
    assert same_bytes(*caches)


# --- choosing ---
def test_auto_takes_native_code_where_it_can():
    def chosen(cfg, name="auto", device=CPU):
        return registry.select(name, device, PageLayout(cfg, 2, 64))

    assert chosen(CFG) is cpu
    assert chosen(CFG.replace(key_bits=16)) is reference
    assert chosen(CFG.replace(codebook="gaussian")) is reference
    assert chosen(CFG.replace(value_method="group")) is reference
    with pytest.raises(ValueError, match=r"kernels='cpu' cannot run here: key_bits=16"):
        chosen(CFG.replace(key_bits=16), "cpu")
    with pytest.raises(ValueError, match="do not run on cuda"):
        chosen(CFG, "cpu", torch.device("cuda"))
    assert {k.name: k.usable for k in registry.available()}["cpu"]


def test_an_install_without_the_library_says_so(monkeypatch):
    monkeypatch.setattr(library, "EXTENSION_SUFFIXES", [".absent"])
    library.load.cache_clear()
    try:
        status = {k.name: k for k in registry.available()}["cpu"]
        assert not status.usable and "C compiler" in status.reason
        assert registry.select("auto", CPU, PageLayout(CFG, 2, 64)) is reference
        with pytest.raises(ValueError, match="C compiler"):
            registry.select("cpu", CPU, PageLayout(CFG, 2, 64))
    finally:
        library.load.cache_clear()


def test_environment_names_the_instruction_set(monkeypatch):
    def status(isa):
        monkeypatch.setenv("TIGHTKV_CPU_ISA", isa)
        library.load.cache_clear()
        return {k.name: k for k in registry.available()}["cpu"]

    try:
        assert status("portable").usable and library.chosen(library.load()) == "portable"
        assert "supported: portable, neon" in status("mmx").reason
        absent = "avx2" if "neon" in ISAS else "neon"
        assert f"'{absent}'; this machine runs {', '.join(ISAS)}" in status(absent).reason
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
        library.load()


# --- the C code itself ---
def test_compilers_know_the_features_asked_for():
    """An unknown name is an error in clang before 19 and in older gcc: no library is built then."""
    source = (sanitizers.NATIVE / "dispatch.c").read_text()
    asked = set(re.findall(r'__builtin_cpu_supports\("([^"]*)"\)', source))
    of_avx512 = {f"avx512{part}" for part in ("f", "bw", "dq", "vl", "vbmi", "vnni")}
    assert asked == {"avx2", "fma"} | of_avx512  # compilers of 2019 know these


def test_sanitizers_find_nothing(tmp_path):
    """AddressSanitizer and UBSan over instruction sets, with buffers of the exact size."""
    program, isas = sanitizers.build("cpu_kernels_driver.c", tmp_path), sanitizers.isas()
    assert sorted(sanitizers.run(program, ",".join(isas)).split()) == sorted(isas)


def test_threads_ask_for_instruction_sets_at_once(tmp_path):
    program = sanitizers.build_with_threads("dispatch_driver.c", tmp_path)
    assert sanitizers.run(program).strip().split(",") == ISAS


def test_structs_agree_with_c():
    """Python packs what native.h declares."""
    attend = cpu._ATTEND.size + cpu._CALL.size
    assert attend == ctypes.sizeof(ctypes.c_int64) * (18 + 9 + 4 + 4 + 5 + 2 + 2 + 1)
    assert cpu._APPEND.size == ctypes.sizeof(ctypes.c_int64) * (18 + 6 + 1 + 2 + 2 + 3)
