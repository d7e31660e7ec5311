"""Error feedback: keys coded in the metric of their queries, alike in every encoder."""

import math

import pytest
import torch

from tightkv import KVQuantConfig
from tightkv.cache import PagedKV
from tightkv.layout import page_layout
from tightkv.math.feedback import QueryMetric, feedback_factors
from tightkv.math.rotation import make_rotation
from tightkv.sequences import SequenceTable

PRESETS = ("k4v4", "k3v3", "k2v2")


def anisotropic_metric(heads, dim, seed=0):
    """E[q q^T] of queries that lie mostly in a few directions."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, 4 * dim, dim, generator=generator)
    q *= torch.logspace(0.7, -0.7, dim)
    turn = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator)).Q
    q = q @ turn
    return q.mT @ q / q.shape[1]


def keys(heads, dim, tokens, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, heads, dim, generator=generator)
    return x + 2 * torch.randn(1, 1, heads, dim, generator=generator)


def filled(layout, key, value, metric=None, kernels="auto", device="cpu", steps=None):
    """A PagedKV with one sequence, its tokens appended in the given steps."""
    table = SequenceTable(layout.cfg, open_codes=False)
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


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_native_pages_are_those_of_the_reference(preset, head_dim):
    layout = page_layout(KVQuantConfig.preset(preset), 2, head_dim, torch.float32)
    metric = anisotropic_metric(2, head_dim)
    key, value = keys(2, head_dim, 210), keys(2, head_dim, 210, seed=2)
    key[0, 70] = 0.0
    key[0, 80, 0, 3], key[0, 81, 1, 5] = math.nan, math.inf
    pages = [
        filled(layout, key, value, metric, kernels, steps=[100, 1, 1, 108]).pages
        for kernels in ("reference", "cpu")
    ]
    assert torch.equal(*pages)


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
