"""Pages that an append of the CUDA kernels completes, against the reference."""

import dataclasses
import math
from typing import Any

import pytest
import torch

import cuda_on_host
from helpers import make_cache, tokens
from kernel_caches import DEVICE, anisotropic_metric
from rounding import following
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.kernels.cuda import backend as cuda
from tightkv.kernels.view import AppendOptions, SealedLayer
from tightkv.math.feedback import QueryMetric
from tightkv.pages.layout import RING_SLACK

ON_GPU = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(
    not ON_GPU and cuda_on_host.COMPILER is None, reason="neither a GPU nor g++"
)
CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=2)


@pytest.fixture(autouse=True)
def _on_host(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(cuda, "_module", cuda_on_host.module)
        monkeypatch.setattr(cuda, "processor_count", lambda device: 8)


class Append:
    """A cache of a few tokens, and the next ones of each row, of which some complete a page."""

    def __init__(self, cfg, lengths, counts, *, feedback=False, dim=64, partial=True, drop=()):
        rows, heads = len(lengths), 2
        self.cache = make_cache(
            cfg, rows=rows, heads=heads, dim=dim, dtype=torch.bfloat16, device=DEVICE,
            encode_partial_page=partial,
        )  # fmt: skip
        self.cache._kernels = "reference"
        lengths = [length + self.cache.table.lag for length in lengths]
        if feedback:
            self.cache.use_metric(QueryMetric(anisotropic_metric(heads, dim)))
        key, value = (x.to(DEVICE, torch.bfloat16) for x in tokens(rows, 300, heads=heads, dim=dim))
        self.cache.append(self.cache.table.append(range(rows), lengths), key, value)
        for row in drop:
            self.cache.table.drop_exact(row)
        plan = self.cache.table.append(range(rows), counts)
        self.cache._fit_pages()
        self.cache._fit_exact(plan)
        lag = self.cache.table.lag
        self.options = AppendOptions(*plan.tensors(DEVICE), max(counts), partial, lag)
        self.new = [
            torch.cat([x[row, 200 : 200 + count] for row, count in enumerate(counts)])
            for x in (key, value)
        ]

    def run(self, kernels, **changes):
        view = dataclasses.replace(self.cache.view(), feedback=self.cache.feedback, **changes)
        kernels.append(self.cache.codec, view, *self.new, self.options)
        return self.cache.pages


def assert_runs_alike(ours, theirs):
    ours.run(cuda)
    with following(ours.cache):
        theirs.run(reference)
    assert torch.equal(ours.cache.pages, theirs.cache.pages)


CASES: list[tuple[list[int], list[int], dict[str, Any]]] = [
    ([95, 40, 63], [1, 1, 1], {}),
    ([95, 62, 160], [1, 3, 0], {"key_bits": 2, "value_bits": 2}),
    ([31, 250, 90], [16, 5, 6], {"mean_bits": 16, "value_bits": 3}),
    ([95, 127], [1, 1], {"key_centering": "none", "value_bits": 8}),
    ([95, 127], [1, 2], {"exact_pages": 1, "page_size": 64, "key_bits": 3}),
    ([95, 127], [1, 2], {"page_size": 128}),
    ([95, 40, 63], [1, 5, 1], {"window_bits": 8}),
    ([31, 127], [33, 2], {"window_bits": 8, "key_bits": 3, "exact_pages": 1, "page_size": 64}),
]


@pytest.mark.sampled
@pytest.mark.parametrize("processors", [1, 8], ids=["two launches", "one launch"])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(("lengths", "counts", "changes"), CASES, ids=str)
def test_pages_are_those_of_the_reference(
    lengths, counts, changes, partial, feedback, processors, monkeypatch
):
    monkeypatch.setattr(cuda, "processor_count", lambda device: processors)
    cfg = CFG.replace(**changes)
    drop = [0] if partial else []  # its older tokens keep their codes
    ours, theirs = (
        Append(cfg, lengths, counts, feedback=feedback, partial=partial, drop=drop)
        for _ in range(2)
    )
    before = ours.cache.pages.clone()
    assert_runs_alike(ours, theirs)
    assert (ours.cache.pages != before).any()


@pytest.mark.sampled
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_values_from_an_odd_token_on(bits, dim):
    """Two tokens share a word; one of them is no longer exact and keeps its code."""
    cfg = CFG.replace(value_bits=bits, key_bits=bits, key_centering="none", exact_pages=1)
    ours, theirs = (Append(cfg, [95], [1], dim=dim, partial=False) for _ in range(2))
    for one in (ours, theirs):
        valid_from = one.options.ring_valid_from * 0 + 77
        one.options = one.options._replace(ring_valid_from=valid_from)
    assert_runs_alike(ours, theirs)


def test_keys_at_odd_addresses(monkeypatch):
    """They are read 16 bytes at a time, from a copy if need be: a GPU would refuse others."""
    ours, theirs = (Append(CFG, [95, 40], [1, 1], feedback=True) for _ in range(2))
    for gap in (1, 3):  # before the keys, and between tokens
        key = ours.new[0]
        room = torch.zeros(len(key), key[0].numel() + gap, dtype=key.dtype, device=DEVICE)
        room[:, gap:] = key.flatten(1)
        ours.new[0] = room[:, gap:].unflatten(1, key.shape[1:])
        assert torch.equal(ours.new[0], key)
        read: list[tuple[int, int, int]] = []
        seal = cuda._seal

        def seen(layout, view, params, *more, read=read, seal=seal, **options):
            read.append((params.key, 2 * params.key_n, 2 * params.key_h))
            seal(layout, view, params, *more, **options)

        with monkeypatch.context() as patch:
            patch.setattr(cuda, "_seal", seen)
            assert_runs_alike(ours, theirs)
        assert len(read) == 1 and not any(x % 16 for x in read[0])
        ours.new[0] = key


@pytest.mark.parametrize("changes", [{}, {"key_centering": "none"}], ids=str)
def test_what_was_coded_is_not_coded_again(changes):
    """Values of a page that is complete, and keys that are not relative to its mean."""
    cfg = CFG.replace(window_bits=16, **changes)
    ours, theirs = (Append(cfg, [95], [1]) for _ in range(2))
    ours.cache.ring_value.fill_(math.nan)
    if not cfg.centered:
        ours.cache.ring_key.fill_(math.nan)
    assert_runs_alike(ours, theirs)


# --- sealing after the step, of all layers at once ---


FEW = [case for case in CASES if max(case[1]) <= RING_SLACK]  # more are sealed at once
LATER = [case for case in FEW if case[2].get("key_centering") != "none"]


def seal_later(kernels, layers, chosen):
    """`seal_layers` of caches with the same lengths: (row, page's first token) of each page."""
    codec, view = layers[0].cache.codec, layers[0].cache.view()
    rows = [[len(chosen), 0, 0, 0]]
    for row, at in chosen:
        page = view.block_table[row, at // codec.cfg.page_size]
        exact = layers[0].options.ring_valid_from
        rows.append([int(view.ring_rows[row]), at, int(page), int(exact[row])])
    given = []
    for layer in layers:
        own = layer.cache.view()
        feedback = layer.cache.feedback
        ring = own.ring_key, own.ring_value, feedback, own.ring_scales
        given.append(SealedLayer(own.pages, *ring))
    todo = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
    kernels.seal_layers(codec, kernels.sealed_layers(given), todo)


@pytest.mark.sampled
@pytest.mark.parametrize("kernels", [cuda, reference], ids=["cuda", "reference"])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("processors", [1, 8])
@pytest.mark.parametrize(("lengths", "counts", "changes"), LATER, ids=str)
def test_pages_sealed_later_are_those_of_the_append(
    lengths, counts, changes, processors, feedback, kernels, monkeypatch
):
    monkeypatch.setattr(cuda, "processor_count", lambda device: processors)
    cfg = CFG.replace(**changes)
    steps = [1.0, -2.5, 0.25]  # layers differ
    at_once, later = (
        [Append(cfg, lengths, counts, feedback=feedback) for _ in steps] for _ in range(2)
    )
    for layer, factor in zip(at_once + later, steps + steps, strict=True):
        ring = layer.cache.ring_scales if cfg.window_bits == 8 else layer.cache.ring_key
        ring.mul_(abs(factor) if cfg.window_bits == 8 else factor)
        layer.new[0] *= factor
    for layer in at_once:
        layer.run(kernels)
    for layer in later:
        layer.run(kernels, seals_later=True)
    size = cfg.page_size
    chosen = [
        (row, page * size)
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
        for page in range(length // size, (length + count) // size)
    ]
    assert chosen
    different = [
        not torch.equal(a.cache.pages, b.cache.pages) for a, b in zip(at_once, later, strict=True)
    ]
    seal_later(kernels, later, [])
    assert all(different)
    seal_later(kernels, later, chosen)
    for one, other in zip(at_once, later, strict=True):
        assert torch.equal(one.cache.pages, other.cache.pages)
