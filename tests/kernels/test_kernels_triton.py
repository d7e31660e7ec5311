"""The Triton kernels against the reference on the same codes.

Without a GPU they run in Triton's interpreter, which is set up in conftest.py.
"""

import math
from typing import Any

import pytest
import torch

from helpers import exact_attention, make_cache, tokens
from kernel_caches import (
    CFG,
    DEVICE,
    HEADS,
    assert_blind_before,
    cache_on,
    fill,
    poison,
    queries,
    with_gaps,
)
from rounding import following
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.kernels.ragged_plan import plan_groups
from tightkv.kernels.registry import select
from tightkv.kernels.sdpa import AttentionState
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

triton = pytest.importorskip("triton")
kernels = pytest.importorskip("tightkv.kernels.triton.backend")
compiled = pytest.importorskip("triton_ahead").compiled
load_prefix = pytest.importorskip("tightkv.kernels.triton.prefill").load_prefix

BOTH = ("triton", "reference")
ALL_BITS = [(k, v) for k in (2, 3, 4, 8) for v in (2, 3, 4, 8)]
if DEVICE.type == "cpu":  # each width on each side
    ALL_BITS = [(4, 4), (3, 2), (2, 3), (8, 4), (4, 8)]


def assert_attends_like_the_reference(cache, counts, group, **options):
    """float16 operands on the tensor cores: 2^-11 of the largest score and of the output."""
    q, cu_seqlens = queries(cache, counts, group)
    arguments = (cache.codec, q, cache.view(), cu_seqlens)
    options = {"max_queries": max(counts), **options}
    expected, expected_lse = reference.attend(*arguments, AttendOptions(**options))
    out, lse = kernels.attend(*arguments, AttendOptions(**options))
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected_lse))
    some = ~torch.isneginf(lse)
    half = 2.0**-11 if q.dtype != torch.bfloat16 else 2.0**-8
    torch.testing.assert_close(lse[some], expected_lse[some], atol=40 * 2.0**-11, rtol=2.0**-11)
    size = float(expected.float().abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        out.float(), expected.float(), atol=max(4 * half * size, 2.0**-11), rtol=4 * half
    )
    return out


def window_bits(key_bits, value_bits):
    """Both windows, among all bits."""
    return 8 if (key_bits + value_bits) % 3 == 2 else 16


@pytest.mark.parametrize("bits", ALL_BITS, ids=lambda b: f"k{b[0]}v{b[1]}")
def test_decode_equals_the_reference_for_all_bits(bits):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], window_bits=window_bits(*bits))
    cache = cache_on(cfg, [200, 65])
    fill(cache, [200, 65])
    poison(cache)
    assert_attends_like_the_reference(cache, [1, 1], group=4)


@pytest.mark.parametrize("dim", [512, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("bits", [(4, 4), (3, 2), (2, 8), (8, 3)], ids=lambda b: f"k{b[0]}v{b[1]}")
def test_decode_equals_the_reference_for_all_head_dims(dim, bits):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], page_size=32, exact_pages=2)
    cfg = cfg.replace(window_bits=window_bits(*bits))
    cache = cache_on(cfg, [150, 31], dim=dim)
    fill(cache, [150, 31])
    assert_attends_like_the_reference(cache, [1, 1], group=2)


@pytest.mark.parametrize(
    "counts,group", [([1, 1, 1], 1), ([1, 0, 3], 7), ([16, 2, 1], 3), ([5, 40, 1], 4)]
)
@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0, "window": 40}, {"window": 1, "causal": False}, {"scale": 0.01}],
    ids=str,
)
@pytest.mark.parametrize("bits", [8, 16])
def test_packed_rows(bits, counts, group, options):
    lengths = [190, 70, 64]
    cache = cache_on(CFG.replace(window_bits=bits), lengths)
    fill(cache, lengths)
    poison(cache)
    assert_attends_like_the_reference(cache, counts, group, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("page", "bits"), [(32, 16), (128, 8)])
def test_new_tokens_after_the_cache(causal, page, bits):
    cache = cache_on(CFG.replace(page_size=page, window_bits=bits), [260, 0, 3])
    fill(cache, [260, 0, 3])
    counts = [37, 70, 1]
    layout = cache.layout
    new = [x[0].to(DEVICE) for x in tokens(1, sum(counts), heads=HEADS, seed=8)]
    assert new[0].shape[1:] == (layout.num_kv_heads, layout.head_dim)
    assert_attends_like_the_reference(
        cache, counts, 2, causal=causal, new_key=new[0], new_value=new[1]
    )


def test_a_prompt_reads_no_new_tokens_before_its_window():
    cache = cache_on(CFG, [70])
    fill(cache, [70])
    key, value = (x[0].to(DEVICE) for x in tokens(1, 130, heads=HEADS, seed=8))
    new = {"window": 40, "new_key": key, "new_value": value}
    assert_attends_like_the_reference(cache, [130], 1, **new)
    query, starts = key.clone(), torch.tensor([0, 130], dtype=torch.int32, device=DEVICE)

    def attend():
        options = AttendOptions(max_queries=130, **new)
        return kernels.attend(cache.codec, query, cache.view(), starts, options)[0]

    expected = attend()
    value[:20] = torch.nan  # seen by the first tile of 64 queries, and not by the others
    assert torch.equal(attend()[64:], expected[64:])


@pytest.mark.parametrize("bits", [8, 16])
def test_nothing_before_the_window_is_read(bits):
    cache = cache_on(CFG.replace(page_size=32, window_bits=bits), [230, 40])
    fill(cache, [230, 40])
    poison(cache)
    key, value = (x[0].to(DEVICE) for x in tokens(1, 4, heads=HEADS, seed=8))
    assert_blind_before(40, kernels.attend, cache, [3, 1], 2, new_key=key, new_value=value)
    assert_blind_before(5, kernels.attend, cache, [1, 1], 2)


def test_masks_and_left_padding():
    cache = cache_on(CFG, [150, 150], left_pad=[0, 70])
    fill(cache, [150, 150])
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 2 * HEADS, 3, 150), (1, 1, 3, 150)):
        keep = (torch.rand(shape, generator=generator) > 0.5).to(DEVICE)
        assert_attends_like_the_reference(cache, [3, 3], 2, mask=keep)
        bias = torch.randn(shape, generator=generator).to(DEVICE)
        assert_attends_like_the_reference(cache, [3, 3], 2, mask=bias, causal=False)
    assert_attends_like_the_reference(cache, [90, 90], 1)


def test_rows_that_see_nothing_are_zero():
    cache = cache_on(CFG, [0, 100, 2])
    fill(cache, [0, 100, 2])
    out = assert_attends_like_the_reference(cache, [2, 1, 5], 2)
    assert not out[:2].any() and not out[3:6].any() and out[2].any()


@pytest.mark.parametrize("rotation", ["haar", "none"])
@pytest.mark.parametrize("mean_bits", [8, 16])
def test_rotations_and_means(rotation, mean_bits):
    cfg = CFG.replace(rotation=rotation, mean_bits=mean_bits)
    ours, theirs = (cache_on(cfg, [200], name=name) for name in BOTH)
    fill(ours, [200])
    with following(ours, float32_sums=True):
        fill(theirs, [200])
    assert torch.equal(ours.pages, theirs.pages)
    assert_attends_like_the_reference(ours, [1], 4)
    plain = cache_on(cfg.replace(key_centering="none"), [200], name="triton")
    fill(plain, [200])
    assert_attends_like_the_reference(plain, [1], 4)
    coded = cache_on(cfg.replace(window_bits=8), [200], name="triton")
    fill(coded, [200])
    assert_attends_like_the_reference(coded, [1], 4)


# The interpreter's bfloat16 is not to be relied on.
@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("bits", [8, 16])
def test_half_precision(dtype, bits):
    cache = cache_on(CFG.replace(window_bits=bits), [200, 90], dtype=dtype)
    fill(cache, [200, 90])
    assert_attends_like_the_reference(cache, [1, 1], 4)
    assert_attends_like_the_reference(cache, [20, 3], 4)


@pytest.mark.parametrize("encode_partial_page", [True, False])
@pytest.mark.parametrize("bits", ALL_BITS, ids=lambda b: f"k{b[0]}v{b[1]}")
def test_append_writes_the_bytes_of_the_reference(bits, encode_partial_page):
    """Page by page, token by token, over page ends: every byte of pages, ring and sinks."""
    window = {"window_bits": window_bits(*bits)}
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], sinks=3, **window)
    append_alike(
        cfg, 64, encode_partial_page, [(1, 1), (70, 3), (1, 0), (31, 33), (40, 100), (2, 5)]
    )


@pytest.mark.parametrize("dim", [512, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("bits", [(4, 4), (3, 2), (2, 3), (8, 8)], ids=lambda b: f"k{b[0]}v{b[1]}")
def test_append_for_all_head_dims(dim, bits):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], page_size=32, key_scale="corrected")
    cfg = cfg.replace(window_bits=window_bits(*bits))
    append_alike(cfg, dim, True, [(3, 60), (33, 1)])


@pytest.mark.parametrize("mode", ["norm", "corrected", "least_squares", "unbiased"])
def test_append_for_all_scale_modes(mode):
    append_alike(CFG.replace(key_scale=mode, value_scale=mode), 64, True, [(70, 64)])


def append_alike(cfg, dim, encode_partial_page, steps):
    a, b = (
        cache_on(cfg, [0, 0], name=name, dim=dim, encode_partial_page=encode_partial_page)
        for name in BOTH
    )
    for seed, counts in enumerate(steps):
        key, value = (x.to(DEVICE) for x in tokens(2, max(counts), heads=HEADS, dim=dim, seed=seed))
        key[0, 0, 0, 3], value[0, 0, 0, 5] = math.nan, -math.inf
        a.append(a.table.append([0, 1], list(counts)), key, value)
        with following(a, float32_sums=True):
            b.append(b.table.append([0, 1], list(counts)), key, value)
        exact = [(getattr(a, name), getattr(b, name)) for name in a.exact_names]
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in exact)
        assert torch.equal(a.pages, b.pages), f"after {counts}"


@pytest.mark.parametrize("bits", [8, 16])
def test_append_keeps_what_has_no_exact_copy(bits):
    cfg = CFG.replace(window_bits=bits)
    ours, theirs = (cache_on(cfg, [50, 20], name=name) for name in BOTH)
    for cache in (ours, theirs):
        fill(cache, [50, 20])
        cache.table.drop_exact(0)
    fill(ours, [30, 60], seed=4)
    with following(ours, float32_sums=True):
        fill(theirs, [30, 60], seed=4)
    assert torch.equal(ours.pages, theirs.pages)


def test_close_to_exact_attention():
    cache = cache_on(CFG, [300], name="triton")
    key, value = fill(cache, [300])
    q, cu_seqlens = queries(cache, [2], 2)
    out, _ = kernels.attend(cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=2))
    expected, _ = exact_attention(q[None].cpu(), key.cpu(), value.cpu(), lengths=[300])
    assert 0.002 < float((out[None].cpu() - expected).norm() / expected.norm()) < 0.2


def dequantized(cache, first, count):
    """Keys and values [B, tokens, Hkv, D]."""
    layout, view = cache.layout, cache.view()
    shape = (view.batch, count, layout.num_kv_heads, layout.head_dim)
    made = [torch.zeros(shape, dtype=layout.dtype, device=DEVICE) for _ in "kv"]
    load_prefix(cache.codec, view, first, count, *made)
    return made


def test_pages_with_gaps_between_them():
    lengths, caches = [150, 40], []
    for name in ("reference", "triton"):
        cache = cache_on(CFG, lengths, name=name)
        fill(cache, lengths)
        caches.append(cache if name == "reference" else with_gaps(cache))
        fill(cache, [7, 3], seed=5)
    assert not caches[1].pages.is_contiguous()
    assert torch.equal(caches[0].pages, caches[1].pages)
    assert_attends_like_the_reference(caches[1], [1, 1], 2)
    got, dense = (dequantized(caches[i], 0, 2 * CFG.page_size) for i in (1, 0))
    assert all(torch.equal(x[0], y[0]) for x, y in zip(got, dense, strict=True))


def test_nothing_to_attend():
    cache = cache_on(CFG, [10])
    fill(cache, [10])
    q, cu_seqlens = queries(cache, [0], 2)
    out, lse = kernels.attend(
        cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=0)
    )
    assert out.shape == q.shape and lse.shape == q.shape[:2]


def test_selection():
    layout = cache_on(CFG, [1]).layout
    assert select("triton", DEVICE, layout) is kernels
    expected = "triton" if DEVICE.type == "cuda" else "reference"
    assert select("auto", DEVICE, layout).NAME in (expected, "cpu")
    odd = make_cache(CFG.replace(codebook="gaussian")).layout
    with pytest.raises(ValueError, match=r"kernels='triton' cannot run here: codebook='gaussian'"):
        select("triton", DEVICE, odd)
    assert select("auto", DEVICE, odd) is reference
    wide = make_cache(CFG.replace(rotation="haar"), dim=256).layout
    assert select("triton", DEVICE, wide) is kernels
    for dim, reason in ((384, "head_dim=384; they have 64 to 256, and 512"), (512, "haar")):
        widest = make_cache(CFG.replace(rotation="haar"), dim=dim).layout
        with pytest.raises(ValueError, match=reason):
            select("triton", DEVICE, widest)
    with pytest.raises(ValueError, match="do not run on meta"):
        select("triton", torch.device("meta"), layout)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dim", "preset", "sm"),
    [
        (64, "k3v2", 86),  # compiled in a third of the time of the next one
        (128, "k4v4", 80),
        (192, "k3v3", 90),
        (256, "k8v4", 89),
        (128, "k4v4", 100),
        (64, "k4v4", 120),
        (512, "k4v4", 89),
        (128, "k4v4/8", 90),
        (256, "k2v2/8", 89),
    ],
)
def test_kernels_compile_and_fit_shared_memory(dim, preset, sm):
    """Compiled, which the interpreter does not do; heads of 192 have a dense rotation."""
    shared = compiled(dim, preset, sm=sm)
    expected = {"_append_kernel", "_attend_kernel", "_merge_splits_kernel"}
    if dim <= 256:
        expected |= {"_load_workspace_kernel", "_rotate_rows_kernel"}
    assert set(shared) == expected
    assert all(size <= 99 * 1024 for size in shared.values()), shared  # sm_89 has the least


@pytest.mark.gpu
def test_ptx_and_plain_decoders_agree_bit_for_bit():
    from triton_decode import decode_words

    words = torch.randint(-(2**31), 2**31, (4096,), dtype=torch.int64).to(torch.int32).cuda()
    for bits in (2, 3, 4):
        w = words & (0x33333333 if bits == 2 else 0x77777777 if bits == 3 else -1)
        assert torch.equal(decode_words(w, bits, True), decode_words(w, bits, False))


@pytest.mark.parametrize("dim", [64, 80, 96])
@pytest.mark.parametrize("bits", [(4, 4), (3, 2), (8, 8)], ids=lambda b: f"k{b[0]}v{b[1]}")
def test_dequantized_pages_are_the_references(bits, dim):
    cfg = CFG.replace(
        key_bits=bits[0], value_bits=bits[1], mean_bits=8 if dim == 64 else 16, sinks=0
    )
    cache = cache_on(cfg, [140, 140], dim=dim, dtype=torch.float16)
    fill(cache, [140, 140])
    cache.table.drop_exact(0), cache.table.drop_exact(1)
    view, size = cache.view(), cfg.page_size
    records = view.pages[view.block_table[:, 1:2].long()]
    both = reference.dequantize(cache.codec, records)  # [B, 1, Hkv, page_size, D]
    for made, expected in zip(dequantized(cache, size, size), both, strict=True):
        torch.testing.assert_close(made, expected.squeeze(1).transpose(1, 2).half())


@pytest.mark.parametrize("count,sinks,bits", [(2, 0, 16), (16, 0, 8), (17, 4, 16), (17, 4, 8)])
def test_few_new_tokens_after_a_full_ring(count, sinks, bits):
    """Ring, sinks and new tokens together are more than ring and sinks have room for."""
    cfg = KVQuantConfig(page_size=32, exact_pages=1, sinks=sinks, window_bits=bits)
    cache = cache_on(cfg, [63])
    fill(cache, [31]), fill(cache, [32], seed=1)
    new = [x[0].to(DEVICE) for x in tokens(1, count, heads=HEADS, seed=8)]
    assert_attends_like_the_reference(cache, [count], 2, new_key=new[0], new_value=new[1])


def test_masks_of_more_than_2_to_31_elements():
    """Strides below 2**31 whose products are not; the memory between is never touched."""
    cache = cache_on(CFG, [90, 90, 90])
    fill(cache, [90, 90, 90])
    row = 2**30 + 2**20
    memory = torch.empty(2 * row + 300, dtype=torch.bool, device=DEVICE)
    mask = memory.as_strided((3, 1, 2, 100), (row, 1, 100, 1))
    g = torch.Generator().manual_seed(0)
    mask.copy_(torch.rand(3, 1, 2, 100, generator=g) > 0.5)
    expected = assert_attends_like_the_reference(cache, [2, 2, 2], 2, mask=mask.contiguous())
    assert torch.equal(assert_attends_like_the_reference(cache, [2, 2, 2], 2, mask=mask), expected)


def test_a_mask_that_ends_early_hides_the_rest():
    cache = cache_on(CFG, [90])
    fill(cache, [90])
    q, cu_seqlens = queries(cache, [2], 2)
    short = torch.ones(1, 1, 2, 70, dtype=torch.bool, device=DEVICE)
    whole = torch.cat([short, torch.zeros_like(short)[..., :20]], -1)
    arguments = (cache.codec, q, cache.view(), cu_seqlens)
    out, _ = kernels.attend(*arguments, AttendOptions(max_queries=2, mask=short))
    expected, _ = kernels.attend(*arguments, AttendOptions(max_queries=2, mask=whole))
    assert torch.equal(out, expected)


def test_tokens_whose_heads_lie_far_apart():
    """As transformers has them, [B, heads, tokens, D]: the stride of a head may be large."""
    heads, stride = 3, 2**30 + 2**20
    cache = cache_on(CFG, [90], heads=heads, dtype=torch.float16)
    fill(cache, [90])
    q, cu_seqlens = queries(cache, [2], 1)
    memory = torch.empty(stride * (heads - 1) + 256, dtype=q.dtype, device=DEVICE)
    far = memory.as_strided((2, heads, 64), (64, stride, 1))
    far.copy_(q)
    options: dict[str, Any] = {"max_queries": 2}
    out, _ = kernels.attend(cache.codec, far, cache.view(), cu_seqlens, AttendOptions(**options))
    expected, _ = kernels.attend(cache.codec, q, cache.view(), cu_seqlens, AttendOptions(**options))
    assert torch.equal(out, expected)
    new = torch.randn(2, heads, 64, device=DEVICE, dtype=torch.float16)
    far.copy_(new)
    options |= {"new_key": far, "new_value": far}
    out, _ = kernels.attend(cache.codec, q, cache.view(), cu_seqlens, AttendOptions(**options))
    options |= {"new_key": new, "new_value": new}
    assert torch.equal(
        out, kernels.attend(cache.codec, q, cache.view(), cu_seqlens, AttendOptions(**options))[0]
    )


class Grids:
    """In place of a kernel: what it is launched with."""

    def __init__(self):
        self.seen = []

    def __getitem__(self, grid):
        self.seen.append(grid)
        return lambda *args, **kwargs: None


def test_grids_have_room_for_many_sequences(monkeypatch):
    """65,535 is the most that all dimensions but the first can have."""
    from tightkv.kernels.triton import append as triton_append
    from tightkv.kernels.triton import attend as triton_attend
    from tightkv.kernels.triton import merge_splits, rotate
    from tightkv.kernels.triton import prefill as triton_prefill
    from tightkv.kernels.triton import ragged as triton_ragged

    grids = Grids()
    for module, names in (
        (triton_append, ("_append_kernel",)),
        (triton_attend, ("_attend_kernel",)),
        (merge_splits, ("_merge_splits_kernel",)),
        (rotate, ("_rotate_rows_kernel",)),
        (triton_prefill, ("_merge_states_kernel",)),
        (triton_ragged, ("_load_workspace_kernel",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, grids)
    batch, heads, d = 70_000, 2, 64
    cfg = KVQuantConfig(page_size=32, exact_pages=1, sinks=1)
    layout = PageLayout(cfg, heads, d, torch.float16)
    meta = torch.device("meta")
    number = torch.zeros(batch, dtype=torch.int32, device=meta)
    ring, sink = (
        torch.empty(batch, n, heads, d, dtype=torch.float16, device=meta)
        for n in (layout.ring_tokens, 1)
    )
    view = CacheView(
        layout.new_pages(0, meta), torch.zeros(batch, 8, dtype=torch.int32, device=meta), number,
        number, number, number, number, ring, ring, sink, sink, same_length=200,
    )  # fmt: skip
    codec = Codec(layout)
    x = torch.empty(batch, heads, d, dtype=torch.float16, device=meta)
    many = torch.empty(batch, heads, 32, d, dtype=torch.float16, device=meta)
    kernels.append(codec, view, x, x, AppendOptions(number, number, 1, True))
    kernels.attend(codec, x, view, number, AttendOptions(max_queries=1))
    kernels.attend(codec, x, view, number, AttendOptions(max_queries=batch))
    triton_prefill.rotate_queries(codec, many)
    triton_prefill.load_prefix(codec, view, 0, 32, many.transpose(1, 2), many.transpose(1, 2))
    part = AttentionState(many, torch.empty(batch, heads, 32, device=meta))
    triton_prefill.merge_states(part, part)
    triton_prefill.merge_and_unrotate(codec, part, part)
    starts = torch.zeros(batch + 1, dtype=torch.int32, device=meta)
    groups = plan_groups([1] * batch, [200] * batch, 2**30, starts, number)
    triton_ragged.load_workspace(codec, view, groups[0], x, x, x, x)
    triton_ragged.unrotate(codec, triton_ragged.rotate_queries(codec, x), x)
    assert len(grids.seen) >= 11
    assert all(n <= 65_535 for grid in grids.seen for n in grid[1:])
    assert max(grid[0] for grid in grids.seen) > batch
