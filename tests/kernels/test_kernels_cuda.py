"""The CUDA C++ kernels against the reference on the same codes.

Without a GPU their sources are compiled for this machine's CPU (cuda_on_host.h).
"""

import copy
import dataclasses
from typing import Any

import pytest
import torch

import cuda_on_host
from helpers import tokens
from kernel_caches import (
    CFG,
    DEVICE,
    HEADS,
    anisotropic_metric,
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
from tightkv.kernels.cuda import backend as cuda
from tightkv.kernels.cuda import decode_plan, source
from tightkv.kernels.cuda.decode_plan import DecodePlan, DecodeTile
from tightkv.kernels.registry import select
from tightkv.kernels.view import AttendOptions
from tightkv.math.feedback import QueryMetric
from tightkv.pages.layout import PageLayout

ON_GPU = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(
    not ON_GPU and cuda_on_host.COMPILER is None, reason="neither a GPU nor g++"
)
BITS = [(k, v) for k in (2, 3, 4, 8) for v in (2, 3, 4, 8)]
SHAPES = [(bits, dim, dtype) for bits in BITS for dim in (64, 128, 256) for dtype in "hb"]
APPENDS = [
    (bits, dim, opened) for bits in BITS for dim in (64, 128, 256) for opened in (True, False)
]
FEW = [(k, v) for k, v in BITS if 8 not in (k, v)]
APPENDS += [(bits, 512, opened) for bits in FEW for opened in (True, False)]
if not ON_GPU:  # each takes two seconds to compile
    SHAPES = [(bits, (64, 128, 256)[sum(bits) % 3], "hb"[bits[0] % 2]) for bits in FEW]
    SHAPES += [((8, v), dim, "b") for v, dim in zip((4, 8, 3), (64, 128, 256), strict=True)]
    SHAPES += [((k, 8), dim, "h") for k, dim in zip((4, 2, 8), (64, 128, 256), strict=True)]
    APPENDS = [(bits, (64, 128, 256)[i], i % 2 == 0) for i, bits in enumerate(FEW[2:9:3])]
    APPENDS += [((8, 4), 128, True), ((4, 8), 64, False), ((4, 3), 512, True)]


@pytest.fixture(autouse=True)
def _on_host(monkeypatch):
    """Where there is no GPU, on a small one: few sequences are as many as its processors."""
    if not ON_GPU:
        monkeypatch.setattr(cuda, "_module", cuda_on_host.module)
        monkeypatch.setattr(cuda, "_loaded", lambda text, device: cuda_on_host.of_source(text))
        monkeypatch.setattr(decode_plan, "_processors", lambda device: (24, 228 << 10))
        DecodePlan.of.cache_clear()
    yield
    DecodePlan.of.cache_clear()


def shares(cache, group):
    """Into how many each sequence is cut when every one decodes a token."""
    table = cache.view().block_table
    return DecodePlan.of(cache.layout, group, 1, *table.shape, DEVICE).num_splits


def assert_attends_alike(cache, counts, group, plans=None, **options):
    q, cu_seqlens = queries(cache, counts, group)
    options = {"max_queries": max(counts), **options}
    expected, expected_lse = reference.attend(
        cache.codec, q, cache.view(), cu_seqlens, AttendOptions(**options)
    )
    view = dataclasses.replace(cache.view(), plans=plans)
    out, lse = cuda.attend(cache.codec, q, view, cu_seqlens, AttendOptions(**options))
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected_lse))
    some = ~torch.isneginf(lse)
    torch.testing.assert_close(lse[some], expected_lse[some], atol=40 * 2.0**-11, rtol=2.0**-11)
    half = 2.0**-8 if q.dtype == torch.bfloat16 else 2.0**-11
    size = float(expected.float().abs().max())
    torch.testing.assert_close(out.float(), expected.float(), atol=4 * half * size, rtol=4 * half)
    return out


BOTH = ("cuda", "reference")


def window_bits(key_bits, value_bits):
    """Both windows, among all bits."""
    return 8 if (key_bits + value_bits) % 3 == 2 else 16


def assert_fills_alike(ours, theirs, counts, seed=0):
    """The same tokens: every byte, but for what sums in another order may round otherwise."""
    fill(ours, counts, seed)
    with following(ours):
        fill(theirs, counts, seed)
    for name in ("pages", *ours.exact_names):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), f"{name} after {counts}"


@pytest.mark.parametrize("bits,dim,dtype", SHAPES)
def test_decode(bits, dim, dtype):
    dtype = {"h": torch.float16, "b": torch.bfloat16}[dtype]
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], window_bits=window_bits(*bits))
    cache = cache_on(cfg, [330, 65, 0], dim=dim, dtype=dtype)
    fill(cache, [330, 65, 0])
    poison(cache)
    assert_attends_alike(cache, [1, 1, 1], 4)


@pytest.mark.parametrize("bits,dim", [((4, 4), 128), ((2, 3), 128), ((4, 4), 256)], ids=str)
@pytest.mark.parametrize("counts", [[1, 1], [3, 1]], ids=["decoding", "drafted"])
def test_eight_queries_a_head(bits, dim, counts):
    """A tile of eight columns, and of sixteen or two of eight."""
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], window_bits=window_bits(*bits))
    cache = cache_on(cfg, [330, 65], dim=dim, dtype=torch.float16)
    fill(cache, [330, 65])
    poison(cache)
    assert_attends_alike(cache, counts, 8)


@pytest.mark.parametrize(
    "bits,dim,group,tile",
    [
        ((4, 4), 128, 12, DecodeTile(2, 2, 1, 12, 8, sum_levels=True, shared_queries=True)),
        ((4, 4), 128, 16, DecodeTile(2, 2, 1, 16, 8, sum_levels=True, shared_queries=True)),
        ((2, 2), 128, 10, DecodeTile(2, 2, 1, 12, 8, shared_queries=True)),
        ((3, 3), 128, 16, DecodeTile(2, 2, 1, 16, 8, shared_queries=True)),
        ((2, 2), 128, 6, DecodeTile(2, 2, 2, 8, 4)),
        ((4, 4), 64, 3, DecodeTile(2, 2, 2, 4, 8)),
        ((4, 3), 64, 12, DecodeTile(1, 2, 2, 12, 4)),
    ],
    ids=str,
)
def test_tiles_by_bits_and_columns(bits, dim, group, tile):
    """One product a code of four bits, operands that stay in shared memory, columns by fours."""
    if ON_GPU and decode_plan._processors(DEVICE)[1] < 228 << 10:
        pytest.skip("their blocks do not fit this GPU")
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], mean_bits=8 if group == 10 else 16)
    cfg = cfg.replace(window_bits=8 if group in (10, 16, 3) else 16)
    cache = cache_on(cfg, [330, 65], dim=dim, dtype=torch.bfloat16)
    fill(cache, [330, 65])
    poison(cache)
    table = cache.view().block_table
    assert DecodePlan.of(cache.layout, group, 1, *table.shape, DEVICE).tile == tile
    assert_attends_alike(cache, [1, 1], group)


@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k2v2"])
@pytest.mark.parametrize("group,count", [(16, 1), (10, 1), (5, 3)])
def test_many_tiles_of_wide_groups(preset, group, count):
    """Several tiles a warp, some at the edges of what is seen, and warps without any."""
    lengths = [3400, 1290, 65]
    cache = cache_on(KVQuantConfig.preset(preset), lengths, dim=128, dtype=torch.bfloat16)
    fill(cache, lengths)
    poison(cache)
    for options in ({}, {"window": 1111}):
        assert_attends_alike(cache, [count] * 3, group, **options)


@pytest.mark.parametrize("options", [{}, {"window": 300}, {"causal": False}], ids=str)
@pytest.mark.parametrize("counts", [[1] * 6, [3, 0, 1, 2, 1, 3]], ids=["decoding", "drafted"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_lengths_that_differ(dim, counts, options):
    """Each sequence is cut by its own length; the plan is made once for all layers."""
    lengths = [2100, 70, 0, 900, 65, 330]
    cfg = CFG.replace(window_bits=8 if dim == 128 else 16)
    cache = cache_on(cfg, lengths, dim=dim, dtype=torch.bfloat16)
    fill(cache, lengths)
    poison(cache)
    plans: dict[object, torch.Tensor] = {}
    out = assert_attends_alike(cache, counts, 4, plans, **options)
    assert len(plans) == 1
    (made,) = plans.values()
    plan = DecodePlan.of(
        cache.layout, 4, max(counts), *cache.view().block_table.shape, DEVICE, True
    )
    rows = made[4 * plan.num_blocks :].view(6, 2)[:, 1].tolist()
    # The window of 8 bits begins within the page of the 70 tokens.
    short = 1 if cfg.window_bits == 16 else 2
    assert (rows[0] > rows[3] > 1 == rows[2] and rows[1] <= short) or options.get("window")
    again = assert_attends_alike(cache, counts, 4, plans, **options)
    assert torch.equal(out, again) and next(iter(plans.values())) is made


def test_plans_of_several_caches_and_their_copies():
    """Each table keeps its own, until its lengths change."""
    caches = [
        cache_on(CFG, [330, 65, 900], dim=64, dtype=torch.float16),
        cache_on(CFG, [40, 700], dim=128, dtype=torch.bfloat16),
    ]
    for cache, lengths in zip(caches, ([330, 65, 900], [40, 700]), strict=True):
        fill(cache, lengths)
    caches.append(copy.deepcopy(caches[0]))
    seen = []
    for _ in range(2):
        for cache in caches:
            plans = cache.view().plans
            assert_attends_alike(cache, [1] * cache.view().batch, 4, plans)
            assert len(plans) == 1 and plans is cache.view().plans
            seen.append(next(iter(plans.values())).data_ptr())
    assert seen[:3] == seen[3:] and len(set(seen)) == 3
    fill(caches[2], [1, 400, 0], seed=1)
    assert not caches[2].view().plans and caches[0].view().plans
    for cache in caches:
        assert_attends_alike(cache, [1] * cache.view().batch, 4, cache.view().plans)


def test_attention_waits_for_a_plan_that_was_just_made(monkeypatch):
    """It lies between the append and attention, which then reads nothing before it has ended."""
    cache = cache_on(CFG, [330, 65], dtype=torch.bfloat16)
    fill(cache, [330, 65])
    q, cu_seqlens = queries(cache, [1, 1], 4)
    made, module = [], cuda._module

    class Recorder:
        def __init__(self, *arguments):
            self.module = module(*arguments)

        def launch(self, name, grid, threads, *arguments, **options):
            if name == "decode":
                made.append((bool(arguments[0].blocks), arguments[0].overlaps_append))
            self.module.launch(name, grid, threads, *arguments, **options)

    monkeypatch.setattr(cuda, "_module", Recorder)
    view = dataclasses.replace(cache.view(), overlaps_append=True)
    own: dict[object, torch.Tensor] = {}
    for plans in (own, None):
        for _ in range(2):
            planned = dataclasses.replace(view, plans=plans)
            cuda.attend(cache.codec, q, planned, cu_seqlens, AttendOptions(max_queries=1))
    assert made == [(True, 0), (True, 1), (False, 1), (False, 1)]


@pytest.mark.gpu
def test_graphs_make_their_plans_again():
    """Of the lengths that are there when they run, each in memory of its own."""
    lengths = [2100, 70, 900, 330]
    cache = cache_on(CFG, lengths, dtype=torch.bfloat16)
    fill(cache, lengths)
    q, cu_seqlens = queries(cache, [1] * 4, 4)
    names = ("block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows")
    rows = {name: getattr(cache.view(), name).clone() for name in names}
    view = dataclasses.replace(cache.view(), plans={}, same_length=None, **rows)
    arguments = (cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=1))
    cuda.attend(*arguments)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    found = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            found.append(cuda.attend(*arguments))
    assert len(view.plans) == 3
    for order in ([0, 1, 2, 3], [1, 3, 0, 2]):
        for name, column in rows.items():
            column.copy_(getattr(cache.view(), name)[order])
        expected, lse = reference.attend(*arguments)
        for graph, (out, own_lse) in zip(graphs, found, strict=True):
            graph.replay()
            torch.testing.assert_close(out, expected, atol=2.0**-6, rtol=2.0**-6)
            torch.testing.assert_close(own_lse, lse, atol=40 * 2.0**-11, rtol=2.0**-11)
        plans: Any = view.plans
        last = max(plans, key=lambda key: key[-1])
        splits = plans[last][-8:].view(4, 2)[:, 1].tolist()
        assert splits.index(max(splits)) == order.index(0)  # the longest


def test_more_sequences_than_lanes():
    lengths = [(37 * i) % 200 if i % 7 else 700 for i in range(45)]
    cache = cache_on(CFG, lengths, heads=1, dtype=torch.float16)
    fill(cache, lengths)
    poison(cache)
    assert_attends_alike(cache, [1] * 44 + [0], 4, {})
    plan = DecodePlan.of(cache.layout, 4, 1, *cache.view().block_table.shape, DEVICE, True)
    assert plan.num_blocks and (ON_GPU or plan.merged_heads == 2)


@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_many_programs_have_small_blocks(preset, monkeypatch):
    memory = decode_plan._processors(DEVICE)[1]
    if memory < 228 << 10:
        pytest.skip("their blocks do not fit this GPU")
    monkeypatch.setattr(decode_plan, "_processors", lambda device: (2, memory))
    lengths = [330, 65, 0, 200, 64, 1, 300, 129]
    options = {"dim": 128, "heads": 1, "dtype": torch.bfloat16}
    cache = cache_on(KVQuantConfig.preset(preset), lengths, **options)
    fill(cache, lengths)
    poison(cache)
    plan = DecodePlan.of(cache.layout, 4, 1, *cache.view().block_table.shape, DEVICE)
    assert plan.tile == DecodeTile(2, 2, 4, 4, 3) and plan.num_splits == 1
    assert_attends_alike(cache, [1] * len(lengths), 4)


@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_attention_right_after_an_append(preset):
    """With nothing in between: it begins before the append has ended."""
    cfg = KVQuantConfig.preset(preset, window_bits=8 if preset == "k2v2" else 16)
    cache = cache_on(cfg, [2000, 70], name="cuda", dim=128, dtype=torch.bfloat16)
    fill(cache, [2000, 70])
    q, cu_seqlens = queries(cache, [1, 1], 4)
    for step in range(3):
        fill(cache, [1, 1], seed=step)
        view = dataclasses.replace(cache.view(), overlaps_append=True)
        out, lse = cuda.attend(cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=1))
        expected, expected_lse = reference.attend(
            cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=1)
        )
        torch.testing.assert_close(lse, expected_lse, atol=2e-2, rtol=2.0**-11)
        torch.testing.assert_close(out, expected, atol=2.0**-7, rtol=2.0**-6)


@pytest.mark.parametrize("counts,group", [([1, 1, 1], 1), ([1, 0, 3], 7), ([16, 2, 1], 3)])
@pytest.mark.parametrize(
    "options", [{}, {"window": 40}, {"softcap": 3.0}, {"causal": False}, {"scale": 0.01}], ids=str
)
@pytest.mark.parametrize("bits", [8, 16])
def test_packed_rows(bits, counts, group, options):
    cache = cache_on(CFG.replace(window_bits=bits), [290, 70, 64], dtype=torch.float16)
    fill(cache, [290, 70, 64])
    poison(cache)
    assert_attends_alike(cache, counts, group, **options)


@pytest.mark.parametrize("page,mean_bits", [(32, 8), (64, 8), (128, 16)])
@pytest.mark.parametrize("rotation", ["hadamard", "none"])
@pytest.mark.parametrize("centering", ["page", "none"])
def test_pages_means_and_rotations(page, mean_bits, rotation, centering):
    cfg = CFG.replace(
        page_size=page, mean_bits=mean_bits, rotation=rotation, key_centering=centering
    )
    cfg = cfg.replace(window_bits=8 if page == 64 else 16)
    cache = cache_on(cfg, [500, 40], dtype=torch.bfloat16, dim=128)
    fill(cache, [500, 40])
    assert_attends_alike(cache, [1, 1], 4)


@pytest.mark.parametrize("bits", [8, 16])
def test_nothing_before_the_window_is_read(bits):
    """A tile of two pages may begin with one that is another sequence's by now."""
    cfg, lengths = CFG.replace(page_size=32, mean_bits=8, window_bits=bits), [1170, 357, 40]
    cache = cache_on(cfg, lengths, dtype=torch.bfloat16, dim=128)
    fill(cache, lengths)
    poison(cache)
    for window in (39, 5):  # from an odd page on; within the ring
        assert_blind_before(window, cuda.attend, cache, [1, 1, 1], 4)


@pytest.mark.parametrize("bits", [8, 16])
def test_large_and_small_scores(bits):
    """Rows whose scores lie far below 0, far above, and far apart."""
    cache = cache_on(CFG.replace(window_bits=bits), [400, 400], dtype=torch.float16)
    fill(cache, [400, 400])
    for scale in (1e-4, 0.5, -0.1, 0.0):
        assert_attends_alike(cache, [2, 2], 2, scale=scale)


def test_pages_whose_values_are_zero():
    """They have no largest scale that weights could be relative to, but count in the softmax."""
    cache = cache_on(CFG, [400], dtype=torch.float16)
    key, value = (x.to(DEVICE, torch.float16) for x in tokens(1, 400, heads=HEADS, dim=64))
    value[:, 60:200] = 0
    cache.append(cache.table.append([0], [400]), key, value)
    assert_attends_alike(cache, [1], 4)


@pytest.mark.parametrize("height,bound", [(7.0, 3e-3), (11.0, 6e-3), (13.0, 4e-2)])
def test_many_tokens_far_below_the_highest(height, bound):
    """Weights of e**-height have 16 bits in every tile but that of the highest score."""
    cache = cache_on(CFG.replace(key_centering="none"), [2000], dtype=torch.float16, dim=128)
    generator = torch.Generator().manual_seed(5)
    key = 0.01 * torch.randn(1, 2000, HEADS, 128, generator=generator)
    value = 1 + torch.randn(1, 2000, HEADS, 128, generator=generator)
    key[:, 1000], value[:, 1000] = 1.0, 0.0  # what is left of the answer is the others'
    key, value = (x.to(DEVICE, torch.float16) for x in (key, value))
    cache.append(cache.table.append([0], [2000]), key, value)
    q = torch.ones(1, 2 * HEADS, 128, dtype=torch.float16, device=DEVICE)
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    options = {"max_queries": 1, "scale": height / 128}
    expected, _ = reference.attend(
        cache.codec, q, cache.view(), cu_seqlens, AttendOptions(**options)
    )
    out, _ = cuda.attend(cache.codec, q, cache.view(), cu_seqlens, AttendOptions(**options))
    assert float((out.float() - expected.float()).norm() / expected.float().norm()) < bound


@pytest.mark.parametrize("bits", [8, 16])
def test_rings_of_a_pool_that_were_lost(bits):
    cache = cache_on(CFG.replace(window_bits=bits), [200, 90], dtype=torch.bfloat16)
    fill(cache, [200, 90])
    cache.table.drop_exact(0)
    assert_attends_alike(cache, [4, 1], 2)


@pytest.mark.parametrize(
    "preset,lengths",
    [
        ("k4v4", [9000, 4097, 1]),
        ("k2v2", [9000, 4097, 1]),
        ("k4v4", [300] * 48),  # too few pages for shares
        ("k2v2", [200] * 48),
    ],
    ids=["k4v4-shares", "k2v2-shares", "k4v4-no_shares", "k2v2-no_shares"],
)
def test_many_tokens_and_many_sequences(preset, lengths):
    """Several blocks a sequence, and as many sequences as there are blocks at a time."""
    options = {"dim": 128, "heads": 8 if ON_GPU else 1, "dtype": torch.bfloat16}
    cache = cache_on(KVQuantConfig.preset(preset), lengths, **options)
    fill(cache, lengths)
    poison(cache)
    for group in (1, 4):
        plan = DecodePlan.of(cache.layout, group, 1, *cache.view().block_table.shape, DEVICE)
        assert (plan.num_splits > 1) == (len(lengths) == 3)
        assert plan.tile.warps == (6 if preset == "k2v2" else 4)
        assert_attends_alike(cache, [1] * len(lengths), group)
        assert_attends_alike(cache, [1] * len(lengths), group, window=700)


@pytest.mark.parametrize("few", [True, False], ids=["shares", "no_shares"])
def test_queries_of_no_sequence_are_zero(few):
    """A CUDA graph's batch is filled up with queries that belong to nobody."""
    heads = 8 if ON_GPU else 1
    # a block of each, all at once
    rows = 2 if few else 2 * decode_plan._processors(DEVICE)[0] // heads
    cache = cache_on(CFG, [700] * rows, dim=128, heads=heads, dtype=torch.bfloat16)
    fill(cache, [700] * rows)
    assert (shares(cache, 4) > 1) == few
    q, cu_seqlens = queries(cache, [1] * rows, 4)
    q = torch.cat([q, q[:3]])
    out = torch.full_like(q, torch.nan)
    _, lse = cuda.attend(
        cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=1, out=out)
    )
    assert out[:rows].isfinite().all() and not out[rows:].any()
    assert torch.isneginf(lse[rows:]).all() and lse[:rows].isfinite().all()


def test_pages_with_gaps_between_them():
    options = {"dim": 128, "dtype": torch.bfloat16, "encode_partial_page": True}
    ours, theirs = (cache_on(CFG, [150, 40], name=name, **options) for name in BOTH)
    assert_fills_alike(ours, theirs, [150, 40])
    assert_fills_alike(with_gaps(ours), theirs, [7, 3], seed=5)
    assert not ours.pages.is_contiguous()
    assert_attends_alike(ours, [1, 1], 2)


@pytest.mark.parametrize("bits,dim,encode_partial_page", APPENDS)
@pytest.mark.parametrize("window_bits", [8, 16])
def test_append_writes_the_bytes_of_the_reference(window_bits, bits, dim, encode_partial_page):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], sinks=3, window_bits=window_bits)
    options = {"dim": dim, "dtype": torch.bfloat16, "encode_partial_page": encode_partial_page}
    ours, theirs = (cache_on(cfg, [0, 0], name=name, **options) for name in BOTH)
    steps = [(1, 1), (30, 3), (1, 0), (31, 32), (2, 29), (32, 32), (333, 70)]
    for seed, counts in enumerate(steps):
        assert_fills_alike(ours, theirs, counts, seed)


@pytest.mark.parametrize("with_feedback", [False, True])
def test_tokens_relative_to_centers(with_feedback, monkeypatch):
    """Kernels that subtract and add them leave what tokens that are relative already leave."""
    center = torch.Generator().manual_seed(1)
    centers = tuple(
        torch.randn(HEADS, 64, generator=center).to(DEVICE, torch.bfloat16) * 3 for _ in "kv"
    )
    caches = [cache_on(CFG, [0, 0], name="cuda", dtype=torch.bfloat16) for _ in range(2)]
    if with_feedback:
        metric = QueryMetric(anisotropic_metric(HEADS, 64))
        factors = caches[0].codec.feedback_factors(metric, DEVICE)
        for cache in caches:
            cache.feedback = factors
    view_of = caches[1].view

    def with_centers(view):
        return dataclasses.replace(view, centers=centers)

    for seed, counts in enumerate([(3, 1), (60, 30), (1, 33), (1, 1), (200, 70)]):
        key, value = (
            x.to(DEVICE, torch.bfloat16)
            for x in tokens(2, max(counts), heads=HEADS, dim=64, seed=seed)
        )
        relative = key - centers[0], value - centers[1]
        caches[0].append(caches[0].table.append([0, 1], list(counts)), *relative)
        with monkeypatch.context() as patch:
            patch.setattr(caches[1], "view", lambda rows: with_centers(view_of(rows)))
            caches[1].append(caches[1].table.append([0, 1], list(counts)), key, value)
        for name in ("pages", "ring_key", "ring_value", "sink_key", "sink_value"):
            assert torch.equal(getattr(caches[0], name), getattr(caches[1], name)), name
    for counts, group in (([1, 1], 4), ([2, 1], 2)):
        q, cu_seqlens = queries(caches[1], counts, group)
        options = AttendOptions(max_queries=max(counts))
        out, _ = cuda.attend(caches[0].codec, q, caches[0].view(), cu_seqlens, options)
        found, _ = cuda.attend(
            caches[1].codec, q, with_centers(caches[1].view()), cu_seqlens, options
        )
        expected = out.float() + centers[1].float().repeat_interleave(group, 0)
        # both are rounded to bfloat16, one of them before the center is added
        rounding = 2.0**-8 * (out.float().abs() + expected.abs()) + 2.0**-10
        assert ((found.float() - expected).abs() <= rounding).all()


def test_a_page_is_the_same_however_it_was_filled(monkeypatch):
    """By one long append, or by steps with many and with few threads: no byte differs."""
    key, value = (x.to(DEVICE, torch.float16) for x in tokens(1, 135, heads=HEADS, dim=128))
    # Two tokens of a page cancel; what small ones are lost beside them shows the order of the sum.
    key *= 0.001
    key[:, 0::64], key[:, 4::64] = 60000, -60000
    steps = [30, 1, 32, 7, 32, 32, 1]
    pages = []
    for counts, processors in (([135], 132), (steps, 132), (steps, 0)):
        monkeypatch.setattr(cuda, "processor_count", lambda device, n=processors: n)
        cache = cache_on(
            CFG, [0], name="cuda", dim=128, dtype=torch.float16, encode_partial_page=False
        )
        at = 0
        for count in counts:
            new = (x[:, at : at + count] for x in (key, value))
            cache.append(cache.table.append([0], [count]), *new)
            at += count
        pages.append(cache.pages[cache.view().block_table[0, :2].long()])
    assert torch.equal(pages[0], pages[1]) and torch.equal(pages[0], pages[2])


@pytest.mark.gpu
def test_selection():
    cache = cache_on(CFG, [1], dtype=torch.bfloat16)
    assert select("auto", DEVICE, cache.layout).NAME == "cuda"
    single = cache_on(CFG, [1])
    assert select("auto", DEVICE, single.layout).NAME == "triton"
    with pytest.raises(ValueError, match=r"dtype=torch.float32; they have float16"):
        select("cuda", DEVICE, single.layout)
    wide = cache_on(KVQuantConfig(), [1], dim=160, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"head_dim=160; they have 64, 80, 96, 112, 128, 192, 256"):
        select("cuda", DEVICE, wide.layout)


@pytest.mark.skipif(ON_GPU, reason="what a GPU does then is a matter of luck")
@pytest.mark.parametrize(
    ("wait", "dim"),
    [
        ("cp_async_wait<STAGES - 1>();  // tiles", 64),
        ("__syncwarp();  // lanes read what others copied", 64),
        ("cp_async_wait<EXACT_APART ? 0 : STAGES - 1>();  // exact tokens", 128),
        ("__syncwarp();  // lanes read exact tokens that others copied", 128),
        ("barrier_wait(barriers + 8 * at_stage, odd);", 128),
        ("__syncthreads();\n    top = 0.f;", 128),
        ("cp_async_wait<EXACT_APART ? 0 : STAGES - 1>();  // exact tokens", 512),
        ("cp_async_wait<STAGES - 1>();  // tokens of the ring", 128),
        ("__syncwarp();  // lanes read tokens of the ring that others copied", 128),
    ],
    ids=[
        "copies",
        "lanes",
        "exact copies",
        "exact lanes",
        "bulk copies",
        "block",
        "wide exact copies",
        "ring",
        "ring lanes",
    ],
)
def test_a_forgotten_wait_is_found_on_the_host(wait, dim, monkeypatch):
    real, changed = source.source, []

    def broken(*args):
        text = real(*args)
        changed.append(text.count(wait))
        return text.replace(wait, wait[wait.index(";") + 1 :])

    monkeypatch.setattr(source, "source", broken)
    monkeypatch.setattr(cuda, "_module", cuda_on_host.module.__wrapped__)
    cfg = CFG.replace(window_bits=8 if "of the ring" in wait else 16)
    cache = cache_on(cfg, [330, 65], dim=dim, dtype=torch.bfloat16)
    fill(cache, [330, 65])
    with pytest.raises(AssertionError) as caught:
        assert_attends_alike(cache, [1, 1], 8)
    assert changed == [1] and "error:" not in str(caught.value)  # it was compiled


@pytest.mark.skipif(ON_GPU, reason="a GPU has one architecture")
@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize("arch", [800, 900])
def test_tiles_are_copied_in_two_ways(arch, page, monkeypatch):
    """In bulk from sm_90 on, with eight columns; parts of pages, whole pages and two of them."""
    monkeypatch.setattr(cuda_on_host, "ARCH", arch)
    monkeypatch.setattr(cuda, "_module", cuda_on_host.module.__wrapped__)
    cache = cache_on(CFG.replace(page_size=page), [430, 65], dim=128, dtype=torch.bfloat16)
    fill(cache, [430, 65])
    assert_attends_alike(cache, [1, 1], 8)


@pytest.mark.parametrize(
    "page,dim", [(256, 256), (256, 64), (128, 256)] if ON_GPU else [(256, 256)]
)
def test_the_largest_pages(page, dim):
    """Codes of 256 tokens of 256 channels do not fit shared memory at once."""
    cfg = CFG.replace(page_size=page, window_bits=8 if dim == 256 else 16)
    ours, theirs = (cache_on(cfg, [0, 0], name=n, dim=dim, dtype=torch.float16) for n in BOTH)
    for seed, counts in enumerate(([300, 130], [1, 1], [230, 127])):
        assert_fills_alike(ours, theirs, counts, seed)
    assert_attends_alike(ours, [1, 1], 2)


@pytest.mark.skipif(ON_GPU, reason="shows on the host what is a matter of time on a GPU")
@pytest.mark.parametrize("lost", [False, True], ids=["exact", "lost"])
@pytest.mark.parametrize("length,pages,count", [(319, 2, 1), (319, 2, 3), (270, 1, 1)])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("bits", [8, 16])
def test_the_append_before_may_still_run(bits, group, length, pages, count, lost):
    """Until what it writes is read, from the ring or as codes."""
    cfg = CFG.replace(exact_pages=pages, window_bits=bits)
    cache = cache_on(cfg, [length], dim=128, dtype=torch.bfloat16, encode_partial_page=True)
    fill(cache, [length])
    if lost:  # of which there are no exact copies
        cache.table.drop_exact(0)
    names = ("pages", *(name for name in cache.exact_names if name.startswith("ring")))
    before = {name: getattr(cache, name).clone() for name in names}
    fill(cache, [count], seed=1)
    q, cu_seqlens = queries(cache, [count], group)
    options = AttendOptions(max_queries=count)
    expected = cuda.attend(cache.codec, q, cache.view(), cu_seqlens, options)
    view = dataclasses.replace(cache.view(), overlaps_append=True)
    if lost:
        view = dataclasses.replace(view, ring_read_from=view.lengths.clone())
        expected = cuda.attend(cache.codec, q, view, cu_seqlens, options)
    table = view.block_table
    plan = DecodePlan.of(cache.layout, group, count, *table.shape, DEVICE)
    assert plan.num_splits == 1  # one block: the host knows of no others
    module = cuda_on_host.module("decode", cache.layout, q.shape[1], plan.tile, False, DEVICE)
    after = {name: getattr(cache, name).clone() for name in before}
    for name, old in before.items():
        now = getattr(cache, name)
        now[: len(old)] = old
        module.previous_writes(now, after[name])
    found = cuda.attend(cache.codec, q, view, cu_seqlens, options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert any((after[name][: len(old)] != old).any() for name, old in before.items())


@pytest.mark.skipif(ON_GPU, reason="shows on the host what is a matter of time on a GPU")
@pytest.mark.parametrize("group", [4, 16])
def test_a_prefix_hit_waits_for_pages_of_the_same_step(group):
    """vLLM shares a block in the step in which another sequence completes it.

    Who takes it over has no exact copies of older tokens.
    """
    length = 4 * CFG.page_size
    cache = cache_on(CFG, [length], dim=128, dtype=torch.bfloat16, encode_partial_page=True)
    fill(cache, [length])
    cache.table.drop_exact(0)
    fill(cache, [1], seed=1)
    q, cu_seqlens = queries(cache, [1], group)
    view = dataclasses.replace(cache.view(), overlaps_append=True)
    assert int(view.ring_read_from) == length
    options = AttendOptions(max_queries=1)
    expected = cuda.attend(cache.codec, q, view, cu_seqlens, options)
    plan = DecodePlan.of(cache.layout, group, 1, *view.block_table.shape, DEVICE)
    assert plan.num_splits == 1
    module = cuda_on_host.module("decode", cache.layout, q.shape[1], plan.tile, False, DEVICE)
    after = cache.pages.clone()
    cache.pages[view.block_table[0, 3]] = 0
    module.previous_writes(cache.pages, after)
    found = cuda.attend(cache.codec, q, view, cu_seqlens, options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(ON_GPU, reason="shows on the host what is a matter of time on a GPU")
@pytest.mark.parametrize("owned", [0, 1])
def test_outputs_are_written_after_the_kernel_before_has_ended(owned):
    """The memory of an output may have been another kernel's, which still runs."""
    cache = cache_on(CFG, [100], dtype=torch.float16)
    fill(cache, [100])
    q, _ = queries(cache, [4], 2)
    cu_seqlens = torch.tensor([0, owned], dtype=torch.int32)
    view = dataclasses.replace(cache.view(), overlaps_append=True)
    plan = DecodePlan.of(cache.layout, 2, 1, *view.block_table.shape, DEVICE)
    assert plan.num_splits == 1
    module = cuda_on_host.module("decode", cache.layout, q.shape[1], plan.tile, False, DEVICE)
    out = torch.full_like(q, 7.0)
    module.previous_writes(out)
    cuda.attend(cache.codec, q, view, cu_seqlens, AttendOptions(max_queries=1, out=out))
    assert torch.equal(out[owned:], torch.zeros_like(out[owned:]))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_scores_of_any_size(preset):
    """Weights are 16 bits wide, and large scores are rounded: the largest weight must still fit."""
    cfg = KVQuantConfig.preset(preset).replace(exact_pages=1, sinks=0)
    key, value = tokens(1, 400, heads=HEADS, dim=128, bias=0.0)
    q = torch.randn(1, HEADS, 128, generator=torch.Generator().manual_seed(1))
    key[0, 135], value[0, 135] = 3 * q[0], 8 * value[0, 135]  # it outshines the others
    cache = cache_on(cfg, [400], dim=128, dtype=torch.float16)
    add_to(cache, key.half(), value.half())
    arguments = cache.codec, q.half().to(DEVICE), cache.view()
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    for scale in (1.0, 30.0, 41.0, 57.0, 300.0, 311.0, 353.0):
        options = {"max_queries": 1, "scale": scale}
        expected, _ = reference.attend(*arguments, cu_seqlens, AttendOptions(**options))
        out, _ = cuda.attend(*arguments, cu_seqlens, AttendOptions(**options))
        size = float(expected.abs().max())
        torch.testing.assert_close(out, expected, atol=2e-3 * size, rtol=2e-3)


def add_to(cache, key, value):
    cache.append(cache.table.append([0], [key.shape[1]]), key.to(DEVICE), value.to(DEVICE))


@pytest.mark.gpu
def test_more_pages_than_a_grid_has_layers():
    """An append of more than 65,535 pages: blocks take several."""
    cfg = KVQuantConfig.preset("k2v2")
    count = 65_600 * cfg.page_size
    cache = cache_on(cfg, [count], name="cuda", heads=1, dim=64, dtype=torch.float16)
    key = torch.randn(1, count, 1, 64, device=DEVICE, dtype=torch.float16)
    add_to(cache, key, key)
    ids = torch.tensor([0, 1, 65_534, 65_535, 65_536, 65_599], device=DEVICE)
    _, values = reference.dequantize(cache.codec, cache.pages[cache.view().block_table[0, ids]])
    exact = key[0].view(-1, cfg.page_size, 64)[ids]
    rotated = cache.codec.rotate("value", exact)
    assert ((values[:, 0] - rotated).norm(dim=-1) / rotated.norm(dim=-1)).mean() < 0.5


# (bits, head_dim, mean_bits, query heads of a KV head)
OTHER_HEADS = [
    ((3, 4), 80, 8, 8),
    ((4, 4), 192, 16, 8),
    ((2, 2), 96, 8, 12),
    ((8, 4), 112, 16, 4),
    ((4, 4), 80, 16, 4),
    ((4, 4), 96, 16, 4),
    ((8, 3), 96, 16, 4),
    ((2, 2), 112, 8, 4),
    ((3, 2), 192, 8, 4),
    ((4, 8), 192, 16, 4),
]
if not ON_GPU:  # seconds to compile
    OTHER_HEADS = OTHER_HEADS[:2]


@pytest.mark.parametrize("bits,dim,mean_bits,group", OTHER_HEADS, ids=str)
def test_heads_that_are_no_power_of_two(bits, dim, mean_bits, group):
    """Lanes are for the next one; what they have of further channels must not matter."""
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], mean_bits=mean_bits)
    cfg = cfg.replace(window_bits=8 if sum(bits) in (7, 10, 12) else 16)
    options = {"dim": dim, "dtype": torch.bfloat16}
    ours, theirs = (cache_on(cfg, [0, 0, 0], name=name, **options) for name in BOTH)
    for seed, counts in enumerate([[30, 3, 0], [35, 62, 0], [130, 0, 0]]):
        assert_fills_alike(ours, theirs, counts, seed)
    poison(ours)
    assert_attends_alike(ours, [1, 1, 1], group)


WIDE_HEADS = [((4, 4), 8, 16), ((2, 2), 4, 8)] + [(bits, 3, 16) for bits in FEW]


@pytest.mark.parametrize("bits,group,mean_bits", WIDE_HEADS, ids=str)
def test_heads_of_512(bits, group, mean_bits):
    cfg = CFG.replace(key_bits=bits[0], value_bits=bits[1], mean_bits=mean_bits)
    cfg = cfg.replace(window_bits=8 if group == 8 else 16)
    name = "cuda" if ON_GPU else "reference"  # the host takes seconds for a page
    cache = cache_on(cfg, [700, 65, 0], dim=512, dtype=torch.bfloat16, name=name)
    fill(cache, [700, 65, 0])
    poison(cache)
    assert shares(cache, group) > 1
    assert_attends_alike(cache, [1, 1, 1], group)
    assert_attends_alike(cache, [3, 1, 0], group, window=100)


def test_wide_heads_of_eight_bits_are_for_other_kernels():
    wide = PageLayout(CFG.replace(key_bits=8, value_bits=4), HEADS, 512)
    assert cuda.unsupported(wide) == "head_dim=512 with 8-bit codes; they have it with 2 to 4 bits"


@pytest.mark.parametrize("dim", [80, 192])
def test_splits_and_centers_of_such_heads(dim):
    cache = cache_on(CFG, [700], dim=dim, dtype=torch.bfloat16)
    fill(cache, [700])
    poison(cache)
    assert shares(cache, 4) > 1
    q, cu_seqlens = queries(cache, [1], 4)
    options = AttendOptions(max_queries=1)
    center = torch.randn(HEADS, dim, generator=torch.Generator().manual_seed(5))
    center = center.to(DEVICE, torch.bfloat16)
    expected, lse = reference.attend(cache.codec, q, cache.view(), cu_seqlens, options)
    expected = (expected.view(HEADS, 4, dim) + center[:, None]).view_as(expected)
    view = dataclasses.replace(cache.view(), centers=(center, center))
    out, found = cuda.attend(cache.codec, q, view, cu_seqlens, options)
    torch.testing.assert_close(found, lse, atol=40 * 2.0**-11, rtol=2.0**-11)
    torch.testing.assert_close(out, expected, atol=2.0**-6, rtol=2.0**-6)
