"""A step of the CUDA kernels: pages are sealed while attention runs, and it reads none of them."""

import dataclasses
import math

import pytest
import torch

import cuda_on_host
from helpers import make_cache, tokens
from kernel_caches import DEVICE, anisotropic_metric, queries
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.kernels.cuda import backend as cuda
from tightkv.kernels.cuda import decode_plan
from tightkv.kernels.cuda.decode_plan import DecodePlan
from tightkv.kernels.options import AttendOptions
from tightkv.kernels.registry import load
from tightkv.math.feedback import QueryMetric

ON_GPU = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(
    not ON_GPU and cuda_on_host.COMPILER is None, reason="neither a GPU nor g++"
)
CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=2)
GROUP = 4


@pytest.fixture(autouse=True)
def _on_host(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(cuda, "_module", cuda_on_host.module)
        monkeypatch.setattr(decode_plan, "_processors", lambda device: (8, 228 << 10))
        monkeypatch.setattr(cuda, "processor_count", lambda device: 8)
    DecodePlan.of.cache_clear()
    yield
    DecodePlan.of.cache_clear()


class Step:
    """A cache of a few tokens, and the next ones of each row, of which some complete a page."""

    def __init__(self, cfg, lengths, counts, *, feedback=False, dim=64, name="reference"):
        rows, heads = len(lengths), 2
        self.cache = make_cache(
            cfg, rows=rows, heads=heads, dim=dim, dtype=torch.bfloat16, device=DEVICE,
            encode_partial_page=True,
        )  # fmt: skip
        self.cache._kernels = load(name).__name__
        if feedback:
            self.cache.use_metric(QueryMetric(anisotropic_metric(heads, dim)))
        key, value = (x.to(DEVICE, torch.bfloat16) for x in tokens(rows, 300, heads=heads, dim=dim))
        self.cache.append(self.cache.table.append(range(rows), lengths), key, value)
        plan = self.cache.table.append(range(rows), counts)
        self.cache._fit_pages()
        self.cu_seqlens, self.ring_valid_from = plan.tensors(DEVICE)
        self.new = [
            torch.cat([x[row, 200 : 200 + count] for row, count in enumerate(counts)])
            for x in (key, value)
        ]
        self.query, _ = queries(self.cache, counts, GROUP)
        self.options = AttendOptions(max_queries=max(counts))

    @property
    def view(self):
        view = self.cache.view()
        return dataclasses.replace(view, overlaps_append=True, feedback=self.cache.feedback)

    def append(self, kernels):
        kernels.append(
            self.cache.codec, self.view, *self.new, self.cu_seqlens, self.ring_valid_from,
            max_new=self.options.max_queries, encode_partial_page=True,
        )  # fmt: skip

    def attend(self, kernels):
        view = self.view
        return kernels.attend(self.cache.codec, self.query, view, self.cu_seqlens, self.options)

    def run(self, **options):
        return cuda.step(
            self.cache.codec, self.view, self.query, *self.new, self.cu_seqlens,
            self.ring_valid_from, self.options, encode_partial_page=True, **options,
        )  # fmt: skip


CASES = [
    ([95, 40, 63], [1, 1, 1], {}),
    ([95, 62, 160], [1, 3, 0], {"key_bits": 2, "value_bits": 2}),
    ([31, 250, 90], [16, 5, 6], {"mean_bits": 16}),
    ([95, 127], [1, 1], {"key_centering": "none"}),
    ([95, 127], [1, 1], {"exact_pages": 1, "page_size": 64}),
]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("lengths", "counts", "changes"), CASES, ids=str)
def test_a_step_is_an_append_and_attention(lengths, counts, changes, feedback):
    cfg = CFG.replace(**changes)
    one, two, theirs = (Step(cfg, lengths, counts, feedback=feedback) for _ in range(3))
    found = one.run()
    two.append(cuda)
    expected = two.attend(cuda)
    theirs.append(reference)
    assert torch.equal(one.cache.pages, two.cache.pages)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    differ = (one.cache.pages != theirs.cache.pages).any(-1)
    assert int(differ.sum()) <= (1 if cfg.centered else 0)  # a mean may be a tie


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("lengths", "counts", "changes"), CASES, ids=str)
def test_attention_reads_no_page_that_is_being_sealed(lengths, counts, changes, feedback):
    """Whatever is in it: a kernel may be writing it."""
    step = Step(CFG.replace(**changes), lengths, counts, feedback=feedback)
    step.append(cuda)
    expected = step.attend(cuda)
    size, sealed = step.cache.layout.page_size, 0
    for row, before, count in zip(step.cache.table.rows, lengths, counts, strict=True):
        for page in range(before // size, (before + count) // size):
            step.cache.pages[row.pages[page]] = 0xFF  # NaN
            sealed += 1
    assert sealed
    found = step.attend(cuda)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def launches(monkeypatch, step):
    made = []

    class Module:
        def __init__(self, name):
            self.name = name

        def launch(self, name, grid, threads, params, *more, **options):
            early = getattr(params, "seals", None)
            made.append(f"{self.name} {name}" + (" early" if early else ""))

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_module", lambda name, *_: Module(name))
        step.run()
    return made


def test_sealing_is_launched_between_attention_and_its_merge(monkeypatch):
    """But not where attention may read what is sealed, or where there is nothing to seal."""
    monkeypatch.setattr(decode_plan, "num_splits_heuristic", lambda *_: 2)
    rest = ["append append", "decode decode early"]
    plain = Step(CFG, [95, 40], [1, 1])
    assert launches(monkeypatch, plain) == [*rest, "seal seal", "decode merge"]
    fed = Step(CFG, [95, 40], [1, 1], feedback=True)
    assert launches(monkeypatch, fed) == [*rest, "seal_with_feedback seal", "decode merge"]
    drafts = Step(CFG.replace(exact_pages=1), [95, 40], [2, 1], feedback=True)
    after = ["append append", "seal_with_feedback seal", "decode decode", "decode merge"]
    assert launches(monkeypatch, drafts) == after
    uncentered = Step(CFG.replace(key_centering="none"), [95, 40], [1, 1])
    assert launches(monkeypatch, uncentered) == ["append append", "decode decode", "decode merge"]


def test_a_step_that_other_kernels_attend_seals_before(monkeypatch):
    step = Step(CFG, [95, 40], [1, 1], feedback=True)
    order = []
    monkeypatch.setattr(cuda, "_seal", lambda *_: order.append("seal"))
    found = (step.query, step.query)
    monkeypatch.setattr(cuda.triton_kernels, "attend", lambda *_: order.append("attend") or found)
    step.query = step.query.float()
    step.run()
    assert order == ["seal", "attend"]


def test_centers_of_a_step():
    centers = tuple(
        torch.randn(2, 64, generator=torch.Generator().manual_seed(i)).to(DEVICE, torch.bfloat16)
        for i in range(2)
    )
    one, two = (Step(CFG, [95, 40], [1, 1], feedback=True) for _ in range(2))
    out, lse = one.run(centers=centers)
    two.new = [x - center for x, center in zip(two.new, centers, strict=True)]
    two.append(cuda)
    expected, expected_lse = two.attend(cuda)
    expected.unflatten(1, (2, -1)).add_(centers[1][:, None])
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.02)
    assert torch.equal(lse, expected_lse) and torch.equal(one.cache.pages, two.cache.pages)


@pytest.mark.parametrize("changes", [{}, {"key_centering": "none"}], ids=str)
def test_what_was_coded_is_not_coded_again(changes):
    """Values of a page that is complete, and keys that are not relative to its mean."""
    cfg = CFG.replace(**changes)
    step, clean = (Step(cfg, [95], [1]) for _ in range(2))
    step.cache.ring_value.fill_(math.nan)
    if not cfg.centered:
        step.cache.ring_key.fill_(math.nan)
    step.append(cuda)
    clean.append(reference)
    assert torch.equal(step.cache.pages, clean.cache.pages)
