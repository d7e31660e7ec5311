"""Error feedback: keys coded in the metric of their queries, alike in every encoder."""

import math

import pytest
import torch

import cuda_on_host
from helpers import make_cache, tokens
from kernel_caches import anisotropic_metric
from rounding import following
from tightkv import KVQuantConfig
from tightkv.kernels.cpu import backend as cpu
from tightkv.math.feedback import QueryMetric, feedback_factors
from tightkv.math.rotation import make_rotation
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import page_layout

_MISSING = cpu.unavailable("cpu")
needs_native = pytest.mark.skipif(_MISSING is not None, reason=f"native CPU kernels: {_MISSING}")
PRESETS = ("k4v4", "k3v3", "k2v2")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
HALVES = (torch.float16, torch.bfloat16)
CUDA = [("k4v4", 128, torch.bfloat16), ("k2v2", 64, torch.float16), ("k3v3", 256, torch.float16)]
CUDA += [("k4v4", 512, torch.bfloat16)]
TRITON = [("k4v4", 64, torch.float32), ("k3v3", 96, torch.float16)]  # heads of 96 are padded
if ON_GPU:
    CUDA = [
        (preset, dim, dtype)
        for preset in PRESETS
        for dim in (64, 128, 256, 512)
        for dtype in HALVES
    ]
    narrow = [case for case in CUDA if case[1] <= 256]
    TRITON = [(*case[:2], dtype) for case in narrow[::2] for dtype in (*HALVES, torch.float32)]


def keys(heads, dim, tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, heads, dim, generator=generator)
    return x + 2 * torch.randn(1, 1, heads, dim, generator=generator)


def filled(layout, key, value, metric=None, kernels="auto", device="cpu", steps=None):
    """A PagedKV with one sequence, its tokens appended in the given steps."""
    table = SequenceTable(layout.cfg, encode_partial_page=False)
    kv = PagedKV(layout, table, device, kernels)
    if metric is not None:
        kv.use_metric(QueryMetric(metric))
    table.add_rows([0])
    at = 0
    for count in steps or [key.shape[1]]:
        part = slice(at, at + count)
        kv.append(table.append([0], [count]), key[:, part].to(device), value[:, part].to(device))
        at += count
    return kv


def test_factors_give_the_metric_back():
    rotation = make_rotation("hadamard", 64, 3)
    metric = anisotropic_metric(2, 64)
    factors = feedback_factors(metric, rotation, 3).double()
    d = factors.diagonal(dim1=1, dim2=2)
    lower = factors.tril(-1) + torch.eye(64, dtype=torch.float64)
    made = lower * d[:, None] @ lower.mT
    turn = rotation.matrix().double()
    want = turn @ metric.double() @ turn.T
    want /= want.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    want = 0.9 * want + 0.1 * torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(made, want, atol=1e-5, rtol=1e-5)
    assert not factors.triu(1).any()


def test_factors_of_nothing_are_the_identity():
    factors = feedback_factors(torch.zeros(2, 32, 32), make_rotation("hadamard", 32), 4)
    torch.testing.assert_close(factors, torch.eye(32).expand(2, 32, 32))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (torch.zeros(2, 32, 16), "shape"),
        (torch.full((1, 32, 32), math.nan), "NaN"),
        (-torch.eye(32)[None] + 2 * torch.ones(1, 32, 32), "positive semidefinite"),
    ],
)
def test_a_bad_metric_is_refused(metric, message):
    with pytest.raises(ValueError, match=message):
        feedback_factors(metric, make_rotation("hadamard", 32), 4)


@pytest.mark.parametrize("preset", PRESETS)
def test_scores_are_better_for_the_queries_of_the_metric(preset):
    cfg = KVQuantConfig.preset(preset)
    layout = page_layout(cfg, 2, 64, torch.float32)
    metric, key, value = anisotropic_metric(2, 64), keys(2, 64, 448), keys(2, 64, 448, seed=2)
    errors = []
    for given in (None, metric):
        kv = filled(layout, key, value, given)
        rest = (kv.dequantize()[0] - key)[0, 4:192].transpose(0, 1).double()
        errors.append(torch.einsum("htd,hde,hte->", rest, metric.double(), rest).item())
    assert errors[1] < 0.7 * errors[0]


@needs_native
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_native_pages_are_those_of_the_reference(preset, head_dim):
    layout = page_layout(KVQuantConfig.preset(preset), 2, head_dim, torch.float32)
    metric = anisotropic_metric(2, head_dim)
    key, value = keys(2, head_dim, 210), keys(2, head_dim, 210, seed=2)
    key[0, 70] = 0.0
    key[0, 80, 0, 3], key[0, 81, 1, 5] = math.nan, math.inf
    ours = filled(layout, key, value, metric, "cpu", steps=[100, 1, 1, 108])
    with following(ours):
        theirs = filled(layout, key, value, metric, "reference", steps=[100, 1, 1, 108])
    assert torch.equal(ours.pages, theirs.pages)


@needs_native
def test_uncentered_keys_take_feedback_too():
    cfg = KVQuantConfig.preset("k3v3").replace(key_centering="none")
    layout = page_layout(cfg, 2, 64, torch.float32)
    metric, key = anisotropic_metric(2, 64), keys(2, 64, 200)
    plain = filled(layout, key, key, None, "cpu").pages
    pages = [filled(layout, key, key, metric, kernels).pages for kernels in ("reference", "cpu")]
    assert torch.equal(*pages)
    assert not torch.equal(pages[0], plain)


def test_values_and_kept_tokens_do_not_change():
    """Only new codes of keys differ: values are as without, and so are tokens without a copy."""
    layout = page_layout(KVQuantConfig.preset("k3v3"), 2, 64, torch.float32)
    metric, key, value = anisotropic_metric(2, 64), keys(2, 64, 256), keys(2, 64, 256, seed=2)
    with_it, without = (filled(layout, key, value, given) for given in (metric, None))
    read = [layout.read(kv.pages, "value") for kv in (with_it, without)]
    assert all(torch.equal(read[0][name], read[1][name]) for name in read[0])


@pytest.mark.parametrize("changes", [{"key_bits": 8}, {"key_method": "prod"}, {"key_bits": 16}])
def test_other_keys_take_none(changes):
    cfg = KVQuantConfig.preset("k4v4").replace(**changes)
    layout = page_layout(cfg, 2, 64, torch.float32)
    kv = PagedKV(layout, SequenceTable(cfg), "cpu", "reference")
    kv.use_metric(QueryMetric(anisotropic_metric(2, 64)))
    assert kv.feedback is None
    with pytest.raises(ValueError, match="feedback for"):
        kv.feedback = torch.zeros(2, 64, 64)


def test_feedback_of_another_shape_is_refused():
    layout = page_layout(KVQuantConfig.preset("k4v4"), 2, 64, torch.float32)
    kv = PagedKV(layout, SequenceTable(layout.cfg), "cpu")
    for wrong in (torch.zeros(3, 64, 64), torch.zeros(2, 64, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match="feedback"):
            kv.feedback = wrong


# --- kernels of GPUs: there, or in Triton's interpreter and as C++ of this machine ---


@pytest.fixture
def cuda(monkeypatch):
    """The CUDA kernels; where there is no GPU, on the host."""
    kernels = pytest.importorskip("tightkv.kernels.cuda.backend")
    if not ON_GPU:
        if cuda_on_host.COMPILER is None:
            pytest.skip("neither a GPU nor g++")
        monkeypatch.setattr(kernels, "_module", cuda_on_host.module)
        monkeypatch.setattr(kernels, "processor_count", lambda device: 24)
    return kernels


def cache_with_feedback(name, cfg, dim, dtype, rows, heads=2, left_pad=None):
    cache = make_cache(
        cfg, rows=rows, heads=heads, dim=dim, left_pad=left_pad, dtype=dtype, device=DEVICE,
        encode_partial_page=True,
    )  # fmt: skip
    cache._kernels = name
    cache.use_metric(QueryMetric(anisotropic_metric(heads, dim)))
    return cache


def assert_appended_alike(name, cfg, dim, dtype, steps, *, heads=2, left_pad=None, lose_exact=True):
    """Caches with feedback on DEVICE: steps of as many tokens as each row gets, every byte alike.

    Some keys are zero, NaN or infinite. Row 0 loses its exact tokens after the first step.
    """
    rows = len(steps[0])
    ours, theirs = (
        cache_with_feedback(kernels, cfg, dim, dtype, rows, heads, left_pad)
        for kernels in (name, "reference")
    )
    for seed, counts in enumerate(steps):
        key, value = tokens(rows, max(counts), heads=heads, dim=dim, seed=seed)
        key[0, 0] = 0.0
        if max(counts) > 9:
            key[-1, 7, 0, 3], key[-1, 8, 0, 5], key[0, 9, 0, :2] = math.nan, math.inf, -math.inf
        new = [x.to(DEVICE, dtype) for x in (key, value)]
        ours.append(ours.table.append(range(rows), list(counts)), *new)
        with following(ours, float32_sums=name == "triton"):
            theirs.append(theirs.table.append(range(rows), list(counts)), *new)
        assert torch.equal(ours.pages, theirs.pages)
        if seed == 0 and lose_exact:
            ours.table.drop_exact(0), theirs.table.drop_exact(0)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("wrong", ["mean", "step", "key codes", "value codes", "key scale", "flag"])
def test_what_sums_do_not_explain_is_found(wrong, feedback):
    """In the comparison of encoders: one number beside its neighbour, with a dense rotation."""
    cfg = KVQuantConfig.preset("k3v3").replace(page_size=32, window_bits=16)
    ours, theirs = (
        cache_with_feedback("reference", cfg, 96, torch.float32, 1, heads=1) for _ in range(2)
    )
    if not feedback:
        ours.feedback = theirs.feedback = None
    new = [x.to(DEVICE) for x in tokens(1, 33, heads=1, dim=96)]
    ours.append(ours.table.append([0], [33]), *new)
    page, layout = ours.pages[ours.table.rows[0].pages[:1]], ours.layout
    if wrong in ("mean", "step"):
        page[0, 0, layout.mean_offset + (0 if wrong == "mean" else 96)] += 1
    else:
        side = "value" if wrong == "value codes" else "key"
        fields = layout.read(page, side)
        if wrong.endswith("codes"):
            fields["codes"][0, 0, 5, 7] ^= 1
        larger = 1.03 if feedback else 1.003  # factors add up what sums miss of each channel
        fields["scale"][0, 0, 5] *= {"key scale": larger, "flag": -1.0}.get(wrong, 1.0)
        layout.write(page, side, fields)
    ours.pages[ours.table.rows[0].pages[:1]] = page
    with pytest.raises(AssertionError), following(ours, float32_sums=True):
        theirs.append(theirs.table.append([0], [33]), *new)


STEPS = [(40, 70, 3), (60, 1, 16), (1, 0, 9), (30, 16, 30), (3, 100, 16)]


@pytest.mark.sampled
@pytest.mark.parametrize(("preset", "dim", "dtype"), CUDA, ids=str)
def test_cuda_pages_are_those_of_the_reference(cuda, preset, dim, dtype):
    cfg = KVQuantConfig.preset(preset)
    less = not ON_GPU and dim > 128  # the host takes seconds for a page
    arguments = (cfg, dim, dtype, STEPS[:2] if less else STEPS)
    assert_appended_alike("cuda", *arguments, heads=1 if less else 2, left_pad=[0, 5, 0])


@pytest.mark.sampled
@pytest.mark.parametrize("processors", [0, 3, 24])
@pytest.mark.parametrize("changes", [{}, {"mean_bits": 16}, {"key_centering": "none"}], ids=str)
def test_cuda_blocks_share_pages_however_many_there_are(cuda, processors, changes, monkeypatch):
    """One that takes all pages in turn, one for several, several for one."""
    monkeypatch.setattr(cuda, "processor_count", lambda device: processors)
    cfg = KVQuantConfig.preset("k4v4").replace(**changes)
    arguments = (cfg, 64, torch.float16, [(60, 3), (5, 130)])
    assert_appended_alike("cuda", *arguments)


def test_cuda_finds_the_pages_of_many_rows(cuda):
    """Rows are searched 32 at a time; of these few complete a page, or more than one."""
    cfg = KVQuantConfig.preset("k2v2").replace(sinks=0)
    counts = [70 if row in (30, 69) else 33 if row == 64 else row % 3 for row in range(70)]
    arguments = (cfg, 64, torch.float16, [counts, [1] * 70])
    assert_appended_alike("cuda", *arguments, heads=1, lose_exact=False)


def test_launches_of_an_append(cuda, monkeypatch):
    """A few tokens and what they complete are one launch, unless sequences are many."""
    made: list[list[str]] = []

    class Module:
        def __init__(self, name):
            self.name = name

        def launch(self, name, *arguments, **options):
            made[-1].append(f"{self.name}: {name}")

    def launches(processors, counts, feedback=True, partial=False):
        monkeypatch.setattr(cuda, "processor_count", lambda device: processors)
        cfg = KVQuantConfig.preset("k4v4")
        rows = range(len(counts))
        cache = cache_with_feedback("cuda", cfg, 64, torch.float16, len(counts))
        new = torch.zeros(2, len(counts), max(counts), 2, 64, device=DEVICE).half()
        cache.append(cache.table.append(rows, counts), *new)
        made.append([])
        if not feedback:
            cache.feedback = None
        cache.table.encode_partial_page = partial
        cache.append(cache.table.append(rows, counts), *new)
        return made[-1]

    made.append([])
    monkeypatch.setattr(cuda, "_module", lambda name, *_: Module(name))
    assert launches(24, [1]) == ["seal: append_and_seal"]
    assert launches(1, [1, 1]) == ["append: append_few", "seal: seal"]
    assert launches(24, [1], feedback=False) == ["append: append"]
    assert launches(24, [1], feedback=False, partial=True) == ["append: append_few"]
    assert launches(1, [1, 1, 1], feedback=False) == ["append: append_few"]
    prompt = ["append: append", "seal: seal", "append: append"]  # the ring, last
    assert launches(24, [100]) == prompt
    assert launches(24, [100], feedback=False) == ["append: append"] * 2


@pytest.mark.parametrize(("preset", "dim", "dtype"), TRITON, ids=str)
def test_triton_pages_are_those_of_the_reference(preset, dim, dtype):
    pytest.importorskip("tightkv.kernels.triton.backend")
    cfg = KVQuantConfig.preset(preset).replace(page_size=32)
    steps = STEPS if ON_GPU else [(20, 34), (13, 1)]
    arguments = (cfg, dim, dtype, steps)
    options = {"left_pad": [0, 5, 0][: len(steps[0])], "heads": 2 if ON_GPU else 1}
    assert_appended_alike("triton", *arguments, **options)


def test_triton_takes_feedback_for_uncentered_keys():
    pytest.importorskip("tightkv.kernels.triton.backend")
    cfg = KVQuantConfig.preset("k2v2").replace(key_centering="none", page_size=32)
    arguments = (cfg, 64, torch.float32, [(33,)])
    options = {"heads": 1, "lose_exact": False}
    assert_appended_alike("triton", *arguments, **options)


@pytest.mark.slow
@pytest.mark.thorough
def test_triton_fuses_no_product_with_a_sum():
    """Compiled for sm_90; ptxas is told not to, either."""
    triton_ahead = pytest.importorskip("triton_ahead")
    made = [triton_ahead.compiled(64, "k2v2", "append", *kind) for kind in ([], ["feedback"])]
    assert made[0]["fused"] > 0 and made[1]["fused"] == 0
    assert [x["enable_fp_fusion"] for x in made] == [True, False]
    assert made[1]["shared"] <= 99 * 1024  # sm_89 has the least
