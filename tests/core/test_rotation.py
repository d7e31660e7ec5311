"""The counter-based random numbers, and the rotations built on them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tightkv.config import ROTATIONS
from tightkv.math.lloyd import beta_cdf
from tightkv.math.random import random_bits, random_normal, random_signs
from tightkv.math.rotation import Rotation, make_rotation, split_rotation

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DIMS = (1, 2, 5, 16, 24, 64, 80, 96, 112, 128, 192, 256)


# --- random numbers ---


def splitmix64(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return word ^ (word >> 31)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40))
def test_random_bits_are_splitmix64(seed: int, stream: int) -> None:
    golden = 0x9E3779B97F4A7C15
    key = splitmix64((splitmix64((seed + golden) % 2**64) + stream) % 2**64)
    expected = [splitmix64((key + i * golden) % 2**64) for i in range(1, 6)]
    assert [word % 2**64 for word in random_bits(seed, stream, 5).tolist()] == expected


def test_random_golden_values() -> None:
    assert random_bits(7, 2, 3).tolist() == [
        880803625139316184,
        7438429489281277424,
        1483084274112130248,
    ]
    sign_bits = bytes((random_signs(0, 0, 4096) > 0).to(torch.uint8).tolist())
    assert hashlib.sha256(sign_bits).hexdigest() == (
        "f7883a25cccbced7f4d6307b7047e1c29178034b7e02cced51864784c75d6d28"
    )
    normal = [-0.17660189265402, -1.60213300016903, -0.92933372342161, 0.58165972011553]
    assert random_normal(0, 0, (2, 2)).view(4).tolist() == pytest.approx(normal, rel=1e-12)


def test_random_bits_do_not_depend_on_how_many_are_drawn() -> None:
    assert torch.equal(random_bits(1, 2, 100)[:7], random_bits(1, 2, 7))
    assert random_bits(1, 2, 0).shape == (0,)


def test_signs_are_balanced_and_streams_are_independent() -> None:
    n = 100_000
    first, second = random_signs(5, 0, n), random_signs(5, 1, n)
    other_seed = random_signs(6, 0, n)
    assert first.dtype == torch.float32
    assert torch.equal(first.abs(), torch.ones(n))
    for product in (first, second, first * second, first * other_seed, first[1:] * first[:-1]):
        assert abs(product.mean().item()) < 4 / n**0.5


def test_normal_samples_follow_the_normal_law() -> None:
    samples = random_normal(11, 3, (50, 1000))
    assert samples.shape == (50, 1000)
    assert samples.dtype == torch.float64
    assert stats.kstest(samples.view(-1).numpy(), "norm").pvalue > 0.01


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    before = torch.get_rng_state()
    first = make_rotation("haar", 10, seed=991).matrix()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(12345)
    assert torch.equal(random_normal(991, 0, (3,)), random_normal(991, 0, (3,)))
    assert torch.equal(make_rotation("haar", 10, seed=991).matrix(), first)


# --- rotations ---


def assert_orthogonal(rotation: Rotation) -> None:
    matrix = rotation.matrix()
    assert matrix.dtype == torch.float32
    assert matrix.shape == (rotation.dim, rotation.dim)
    gram = matrix.double() @ matrix.double().T
    torch.testing.assert_close(gram, torch.eye(rotation.dim).double(), rtol=0, atol=1e-5)


def assert_rotates(rotation: Rotation, x: torch.Tensor) -> None:
    """Matrix, norm and inverse agree with the call, to float32 rounding of the input's size."""
    y = rotation(x)
    assert y.dtype == torch.float32
    assert y.shape == x.shape
    assert y.device == x.device
    exact = x.double()
    size = max(1.0, exact.norm(dim=-1).max().item()) if x.numel() else 1.0
    close = {"rtol": 0, "atol": 1e-6 * size}
    torch.testing.assert_close(y.double(), exact @ rotation.matrix().double().T, **close)
    torch.testing.assert_close(y.double().norm(dim=-1), exact.norm(dim=-1), **close)
    torch.testing.assert_close(rotation.inverse(y).double(), exact, **close)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("kind", ROTATIONS)
def test_rotation_is_orthogonal(kind: str, dim: int) -> None:
    rotation = make_rotation(kind, dim, seed=4)
    assert rotation.dim == dim
    assert_orthogonal(rotation)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(ROTATIONS),
    dim=st.sampled_from(DIMS),
    lead=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32),
)
def test_rotation_of_any_shape_and_dtype(
    kind: str, dim: int, lead: list[int], dtype: torch.dtype, seed: int
) -> None:
    x = random_normal(seed, 9, (*lead, dim)).to(dtype)
    assert_rotates(make_rotation(kind, dim, seed), x)


@settings(max_examples=60)
@given(kind=st.sampled_from(ROTATIONS), dim=st.sampled_from(DIMS), dtype=st.sampled_from(DTYPES))
def test_rotation_of_non_contiguous_input(kind: str, dim: int, dtype: torch.dtype) -> None:
    base = random_normal(3, 9, (2, 2 * dim, 6)).to(dtype)
    x = base[:, ::2, 1::2].transpose(1, 2)  # [2, 3, dim]
    assert not x.is_contiguous()
    rotation = make_rotation(kind, dim, seed=8)
    assert_rotates(rotation, x)
    assert torch.equal(rotation(x), rotation(x.contiguous()))
    assert torch.equal(rotation.inverse(x), rotation.inverse(x.contiguous()))


@pytest.mark.parametrize("dim", [1, 2, 8, 64, 256])
def test_hadamard_is_the_sylvester_matrix_times_signs(dim: int) -> None:
    hadamard = torch.ones(1, 1)
    while len(hadamard) < dim:
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    rotation = make_rotation("hadamard", dim, seed=2, stream=5)
    assert rotation.kind == "hadamard"
    signs = random_signs(2, 5, dim)
    assert torch.equal(rotation.matrix(), hadamard * signs * dim**-0.5)
    x = torch.randint(-8, 9, (7, dim)).float()  # sums of small integers are exact
    assert torch.equal(rotation(x), (x * signs) @ hadamard.T * dim**-0.5)


@pytest.mark.parametrize("dim", [3, 80, 96, 112, 192])
def test_hadamard_means_haar_where_dim_is_not_a_power_of_two(dim: int) -> None:
    rotation = make_rotation("hadamard", dim, seed=6)
    assert rotation.kind == "haar"
    assert rotation is make_rotation("haar", dim, seed=6)


def test_haar_matrices_are_uniform() -> None:
    """First coordinates follow the law of the sphere; the trace has mean 0 and variance 1."""
    matrices = torch.stack([make_rotation("haar", 12, seed).matrix() for seed in range(600)])
    coordinates = matrices[:, 3, 7].double() * 12**0.5
    assert stats.kstest(beta_cdf(coordinates, 12).numpy(), "uniform").pvalue > 0.01
    traces = matrices.diagonal(dim1=1, dim2=2).sum(-1)
    assert abs(traces.mean().item()) < 4 / 600**0.5
    assert traces.std().item() == pytest.approx(1, abs=0.12)


def test_rotation_golden_values() -> None:
    hadamard = make_rotation("hadamard", 8, seed=1)(torch.arange(8.0)) * 8**0.5
    torch.testing.assert_close(hadamard, torch.tensor([6.0, -14, 14, 10, -14, 14, -2, -14]))
    haar = make_rotation("haar", 6, seed=3).matrix()[0]
    golden = torch.tensor([0.3505642, 0.3007906, -0.2852591, 0.2844723, 0.1948152, -0.7657543])
    torch.testing.assert_close(haar, golden, rtol=0, atol=2e-7)


@pytest.mark.parametrize(("kind", "dim"), [("hadamard", 64), ("haar", 40)])
def test_rotation_depends_on_seed_and_stream(kind: str, dim: int) -> None:
    base = make_rotation(kind, dim, seed=1, stream=0)
    assert base is make_rotation(dim=dim, kind=kind, seed=1)  # cached
    for other in (make_rotation(kind, dim, 2, 0), make_rotation(kind, dim, 1, 1)):
        assert not torch.equal(base.matrix(), other.matrix())


def test_none_copies() -> None:
    x = torch.randn(3, 8)
    rotation = make_rotation("none", 8)
    for y in (rotation(x), rotation.inverse(x)):
        assert torch.equal(y, x)
        assert y.data_ptr() != x.data_ptr()


def test_changing_the_matrix_leaves_the_rotation_alone() -> None:
    for kind in ROTATIONS:
        rotation = make_rotation(kind, 6)
        rotation.matrix().zero_()
        assert_orthogonal(rotation)


def test_rotation_made_under_other_modes_still_serves() -> None:
    with torch.inference_mode(), torch.device("meta"):
        rotation = make_rotation("haar", 6, seed=77)
        split = split_rotation("hadamard", 12, 77, (0, 3, 5, 11))
        inside = rotation(torch.ones(6, device="cpu"))
    x = torch.ones(6, requires_grad=True)
    assert torch.equal(rotation(x), inside)
    rotation(x)[0].backward()
    torch.testing.assert_close(x.grad, rotation.matrix()[0])
    z = torch.ones(12, requires_grad=True)
    split(z)[0].backward()
    torch.testing.assert_close(z.grad, split.matrix()[0])


# --- split rotations ---


@settings(max_examples=60)
@given(
    kind=st.sampled_from(ROTATIONS),
    dim=st.sampled_from([d for d in DIMS if d > 1]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_split_rotation(kind: str, dim: int, dtype: torch.dtype, data: st.DataObject) -> None:
    chosen = st.lists(st.integers(0, dim - 1), min_size=1, max_size=dim - 1, unique=True)
    channels = data.draw(chosen)
    rotation = split_rotation(kind, dim, 3, tuple(channels))
    assert_orthogonal(rotation)
    assert_rotates(rotation, random_normal(dim, 9, (4, dim)).to(dtype))

    others = [channel for channel in range(dim) if channel not in channels]
    matrix = rotation.matrix()
    k = len(channels)
    assert not matrix[:k, others].any()
    assert not matrix[k:, channels].any()
    if kind == "none":
        assert torch.equal(matrix, torch.eye(dim)[channels + others])


def test_split_rotation_halves_are_independent_and_cached() -> None:
    rotation = split_rotation("hadamard", 64, 5, tuple(range(0, 64, 2)))
    assert rotation is split_rotation("hadamard", 64, 5, tuple(range(0, 64, 2)))
    assert rotation is not split_rotation("hadamard", 64, 6, tuple(range(0, 64, 2)))
    matrix = rotation.matrix()
    assert not torch.equal(matrix[:32, 0::2], matrix[32:, 1::2])
