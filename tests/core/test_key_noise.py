"""The noise of coded keys in scores: predicted from weights, against codes that are really made."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tightkv.config import BITS, KVQuantConfig
from tightkv.fit.key_noise import (
    LayerScores,
    Vectors,
    needed_key_bits,
    protected_layer_bits,
    turned_energy,
    turned_share,
)
from tightkv.math.quantize import TurboQuantMSE

HIDDEN, HEADS, KV_HEADS, DIM, PAGE = 96, 4, 2, 64, 64
INV_FREQ = 10000.0 ** (-torch.arange(0, DIM, 2) / DIM)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vectors(weight: Tensor, bias: Tensor, norm: Tensor | None = None) -> Vectors:
    """Of the matrix [heads * DIM, HIDDEN] after a norm, and its biases."""
    weight = weight if norm is None else weight * norm
    return Vectors(weight.view(-1, DIM * HIDDEN).square().sum(1), bias.view(-1, DIM))


def layer_scores(query: Vectors, key: Vectors, scale: float = DIM**-0.5) -> LayerScores:
    return LayerScores(query, key, INV_FREQ, scale)


def rope(x: Tensor, start: int, inv_freq: Tensor = INV_FREQ, interleaved: bool = False) -> Tensor:
    """x [..., tokens, dim] turned to positions start, start + 1, ..."""
    pairs = inv_freq.numel()
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    angle = (start + torch.arange(x.shape[-2]))[:, None] * inv_freq
    split = turned.unflatten(-1, (pairs, 2)) if interleaved else turned.unflatten(-1, (2, pairs))
    a, b = split.unbind(-1 if interleaved else -2)
    a, b = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    joined = torch.stack([a, b], -1 if interleaved else -2).flatten(-2)
    return torch.cat([joined, rest], -1)


@pytest.mark.parametrize("page_size", [32, 64, 256])
def test_share_left_by_a_page_mean(page_size: int) -> None:
    share = turned_share(torch.tensor([0.0, 1e-4, 2 * math.pi / page_size, 1.0]), page_size)
    assert share[0] == 0
    assert share[1] < 1e-3
    assert share[2] == pytest.approx(1, abs=1e-6)  # one whole turn: the mean is zero
    length = math.sin(page_size / 2) / (page_size * math.sin(0.5))
    assert share[3] == pytest.approx(1 - length**2, abs=1e-6)


@pytest.mark.parametrize("start", [0, 4096])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [32, 12])
def test_turned_energy_is_what_a_page_mean_leaves(
    start: int, interleaved: bool, pairs: int
) -> None:
    bias, inv_freq = draw(KV_HEADS, DIM, seed=1), INV_FREQ[:pairs].double()
    keys = bias[:, None].double().expand(-1, PAGE, -1)
    keys = rope(keys, start, inv_freq, interleaved)
    left = (keys - keys.mean(1, keepdim=True)).square().sum(-1).mean(1)
    found = turned_energy(bias, inv_freq, PAGE, interleaved)
    assert torch.allclose(found.double().sum(1), left, rtol=1e-5)


def test_more_pairs_than_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="32 RoPE pairs do not fit a head of 48 channels"):
        turned_energy(torch.zeros(1, 48), INV_FREQ, PAGE)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("bias_size", [0.0, 3.0])
def test_predicted_noise_is_that_of_real_codes(bits: int, bias_size: float) -> None:
    norm = 1 + 0.5 * draw(HIDDEN, seed=2)
    loud = torch.tensor([1.0, 3.0, 1.0, 1.0]).repeat_interleave(DIM)  # one query head of four
    query = (
        draw(HEADS * DIM, HIDDEN, seed=3) / 8 * loud[:, None],
        loud * draw(HEADS * DIM, seed=4),
    )
    sizes = torch.tensor([1.0, 2.0]).repeat_interleave(DIM)  # heads that differ
    key = (
        draw(KV_HEADS * DIM, HIDDEN, seed=5) / 8 * sizes[:, None],
        bias_size * sizes * draw(KV_HEADS * DIM, seed=6),
    )
    tokens = draw(40, PAGE, HIDDEN, seed=7) * norm  # 40 pages

    def project(weight: Tensor, bias: Tensor) -> Tensor:
        made = tokens @ weight.T + bias
        return rope(made.unflatten(-1, (-1, DIM)).transpose(1, 2), 128)

    queries, keys = project(*query), project(*key)  # [pages, heads, PAGE, DIM]
    rest = keys - keys.mean(2, keepdim=True)
    code = TurboQuantMSE(DIM, bits, scale_mode="least_squares")
    error = code.decode(code.encode(rest)) - rest
    grouped = queries.unflatten(1, (KV_HEADS, -1))
    scores = grouped @ error[:, :, None].transpose(-1, -2) * DIM**-0.5
    measured = scores.square().mean((0, 2, 3, 4))
    made = layer_scores(vectors(*query, norm), vectors(*key, norm))
    predicted = made.noise(PAGE) * code.codebook.distortion
    assert torch.allclose(measured, predicted, rtol=0.15)


def test_scale_of_the_scores() -> None:
    weights = vectors(draw(DIM, HIDDEN, seed=8), torch.zeros(DIM))
    usual, half = (layer_scores(weights, weights, s * DIM**-0.5).noise(PAGE) for s in (1, 0.5))
    assert torch.allclose(half, usual / 4)


def test_uneven_heads_are_refused() -> None:
    query, key = (Vectors(torch.zeros(n), torch.zeros(n, DIM)) for n in (3, 2))
    with pytest.raises(ValueError, match="3 query heads do not share 2 KV heads"):
        layer_scores(query, key).noise(PAGE)


def test_biases_alone_give_a_lower_bound() -> None:
    """As of a checkpoint whose matrices are quantized."""
    weight, bias = draw(DIM, HIDDEN, seed=11) / 8, 9 * draw(DIM, seed=12)
    whole, known = vectors(weight, bias), Vectors(torch.zeros(1), bias[None])
    assert layer_scores(Vectors(torch.zeros(1), torch.zeros(1, DIM)), known).noise(PAGE) == 0
    bound = layer_scores(known, known).noise(PAGE)
    turned = turned_energy(bias[None], INV_FREQ, PAGE).sum(1)
    assert torch.allclose(bound, bias.square().sum() * turned / DIM**2)
    assert bound < layer_scores(whole, whole).noise(PAGE)


# Noise of a score at distortion 1, worst head of a layer: the largest of SmolLM2-135M, of
# Qwen2.5-Coder-1.5B, of Qwen2.5-Coder-0.5B but for its first layer, and that layer.
QUIET, LOUD = (20.5, 16.5, 29.1), 4702.0


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v3", "k3v2", "k2v2"])
def test_bits_for_layers_of_real_models(preset: str) -> None:
    cfg = KVQuantConfig.preset(preset)
    assert [needed_key_bits(cfg, noise) for noise in QUIET] == [cfg.key_bits] * 3
    assert needed_key_bits(cfg, LOUD) == 8


def test_bits_grow_with_the_noise_up_to_16() -> None:
    cfg = KVQuantConfig.preset("k2v2")
    bits = [needed_key_bits(cfg, 10.0 ** (step / 4)) for step in range(-12, 40)]
    assert bits == sorted(bits)
    assert set(bits) == set(BITS)
    assert needed_key_bits(cfg, math.inf) == 16


@pytest.mark.parametrize("noise", [-1.0, math.nan])
def test_noise_that_is_no_variance_is_refused(noise: float) -> None:
    with pytest.raises(ValueError, match="a variance is a number of at least 0"):
        needed_key_bits(KVQuantConfig(), noise)


@pytest.mark.parametrize(
    ("preset", "options", "text"),
    [
        ("k4v4", {}, "3=k8v4,5=k16v16"),
        ("k8v4", {}, "5=k16v16"),
        ("k2v2", {"layer_bits": "9=k3v3"}, "3=k8v2,5=k16v16,9=k3v3"),
        ("k4v4", {"layer_bits": "3=k4v2 5=k2v2"}, "3=k4v2,5=k2v2"),
        ("k4v2", {"protected_first": 1}, "3=k8v2,5=k16v16"),
        ("k4v2", {"protected_first": 2}, "5=k16v16"),  # layer 3 is the second that is compressed
        ("k4v2", {"protected_first": 2, "protected_bits": 4}, "3=k8v4,5=k16v16"),
    ],
)
def test_layers_with_noise_get_bits(preset: str, options: dict[str, object], text: str) -> None:
    cfg = KVQuantConfig.preset(preset, **options)
    noise = {5: math.inf, 1: 0.0, 3: LOUD, 7: QUIET[0]}
    assert protected_layer_bits(cfg, noise) == text
