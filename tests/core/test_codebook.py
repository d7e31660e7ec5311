"""Scalar codebooks: the numbers, re-derived without the package's solver, and the coding."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, optimize, special, stats

from scripts import load_script
from tightkv.math.codebook import TABLE_BITS, TABLE_FILE, Codebook, get_codebook
from tightkv.math.lloyd import BetaLaw, beta_cdf, solve
from tightkv.math.random import random_normal
from tightkv.math.rotation import make_rotation

TABLES = load_script("codebook_tables")
TABLE_DIMS = TABLES.TABLE_DIMS
CODEBOOKS = {"fp8": (1, 2, 3, 4, 8), "gaussian": TABLE_BITS, "beta": TABLE_BITS}  # kind: bits
BOOKS = [(kind, bits) for kind, widths in CODEBOOKS.items() for bits in widths]
TABLE_BOOKS = [("gaussian", None)] + [("beta", dim) for dim in TABLE_DIMS]
NODES, WEIGHTS = np.polynomial.legendre.leggauss(100)
Density = Callable[[np.ndarray], np.ndarray]


def normal_density(t: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)


def density_of(kind: str, dim: int | None) -> tuple[Density, float]:
    """The density of the law of a book, and where it ends."""
    if kind != "beta":
        return normal_density, math.inf
    assert dim is not None
    half = (dim - 1) / 2  # (1 + coordinate) / 2 follows Beta(half, half)
    end = math.sqrt(dim)
    return lambda t: stats.beta.pdf((1 + t / end) / 2, half, half) / (2 * end), end


def cell_integrals(
    magnitudes: np.ndarray, density: Density, end: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each positive cell, and the distortion it adds, by Gauss-Legendre."""
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    low = np.concatenate([[0.0], middles])
    high = np.concatenate([middles, [min(end, low[-1] + 12)]])
    x = (low + high)[:, None] / 2 + (high - low)[:, None] / 2 * NODES
    mass = density(x) * WEIGHTS * (high - low)[:, None] / 2
    means = (mass * x).sum(1) / mass.sum(1)
    return means, (mass * (x - magnitudes[:, None]) ** 2).sum(1)


# --- the numbers ---


@pytest.mark.parametrize(("kind", "dim"), TABLE_BOOKS)
def test_tables_are_lloyd_max(kind: str, dim: int | None) -> None:
    """Each centroid is the mean of its cell (for these laws that is the optimum)."""
    density, end = density_of(kind, dim)
    for bits in CODEBOOKS[kind]:
        book = get_codebook(kind, bits, dim)
        magnitudes = np.array(book.magnitudes)
        assert len(magnitudes) == 2 ** (bits - 1)
        assert magnitudes[0] > 0
        assert (np.diff(magnitudes) > 0).all()
        means, distortion = cell_integrals(magnitudes, density, end)
        np.testing.assert_allclose(magnitudes, means, rtol=2e-11)
        assert book.distortion == pytest.approx(2 * distortion.sum(), rel=1e-9)


def cell_mean(low: float, high: float, dim: int | None) -> float:
    """Mean of the law (dim None: Gaussian) between low and high, from its unscaled density."""
    x = (low + high) / 2 + (high - low) / 2 * NODES
    density = np.exp(-x * x / 2) if dim is None else (1 - x * x / dim) ** ((dim - 3) / 2)
    mass = density * WEIGHTS
    return float((mass * x).sum() / mass.sum())


def shoot(first: float, count: int, end: float, dim: int | None) -> tuple[list[float], float]:
    """Let each cell's mean fix the next centroid; how far the last one is above its own mean."""
    magnitudes, low = [first], 0.0
    while len(magnitudes) < count:
        centroid = magnitudes[-1]
        if centroid >= cell_mean(low, end, dim):
            return magnitudes, 1.0  # no cell reaches this mean: the shot was too long
        high = optimize.brentq(
            lambda t, a=low, c=centroid: cell_mean(a, t, dim) - c, centroid, end, xtol=1e-14
        )
        magnitudes, low = [*magnitudes, 2 * high - centroid], high
    return magnitudes, magnitudes[-1] - cell_mean(low, end, dim)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [None, 16, 64, 128])
def test_tables_by_shooting(dim: int | None, bits: int) -> None:
    """Find the first centroid for which the last one lands on the mean of its cell."""
    count, end = 2 ** (bits - 1), 14.0 if dim is None else math.sqrt(dim)
    guess = 0.8 / count
    first = optimize.brentq(
        lambda c: shoot(c, count, end, dim)[1], 0.7 * guess, 1.5 * guess, xtol=1e-14
    )
    book = get_codebook("gaussian" if dim is None else "beta", bits, dim)
    np.testing.assert_allclose(book.magnitudes, shoot(first, count, end, dim)[0], rtol=1e-9)


def test_table_file_is_what_the_solver_writes(tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    TABLES.write_tables(path)
    rows = json.loads(path.read_text())
    assert len(rows) == len(json.loads(TABLE_FILE.read_text())) == 8 * len(TABLE_BOOKS) + 5
    for row in rows:
        book = get_codebook(row["kind"], row["bits"], row["dim"])
        levels = np.array(row.get("native") or row["magnitudes"]) * row.get("unit", 1.0)
        np.testing.assert_allclose(book.magnitudes, levels, rtol=1e-10)
        assert book.distortion == pytest.approx(row["distortion"], rel=1e-8)


@pytest.mark.parametrize(
    ("bits", "known"), [(1, "0.3634"), (2, "0.1175"), (3, "0.03455"), (4, "0.009501")]
)
def test_known_gaussian_distortions(bits: int, known: str) -> None:
    half_a_digit = 0.5 * 10.0 ** -(len(known) - 2)
    assert abs(get_codebook("gaussian", bits).distortion - float(known)) <= half_a_digit


def test_beta_books_tend_to_the_gaussian_one() -> None:
    gaussian = get_codebook("gaussian", 4)
    gaps = [1 - get_codebook("beta", 4, dim).distortion / gaussian.distortion for dim in TABLE_DIMS]
    assert gaps == sorted(gaps, reverse=True)  # the sphere's law has lighter tails
    assert 0 < gaps[-1] < 0.02
    far, _ = solve(BetaLaw(10**6), 4)
    np.testing.assert_allclose(far.numpy(), gaussian.magnitudes, rtol=1e-5)


@pytest.mark.parametrize("dim", [4, 5, 7, 72, 257])
def test_other_sizes_are_solved_when_asked_for(dim: int) -> None:
    magnitudes, distortion = solve(BetaLaw(dim), 8)
    book = get_codebook("beta", 8, dim)
    assert book is get_codebook(kind="beta", dim=dim, bits=8)  # cached
    np.testing.assert_allclose(book.magnitudes, magnitudes.numpy(), rtol=1e-11)
    assert book.magnitudes[-1] < math.sqrt(dim)
    # The density of even sizes ends like a root: leave the last cell to adaptive quadrature.
    density, end = density_of("beta", dim)
    means, parts = cell_integrals(magnitudes.numpy(), density, end)
    np.testing.assert_allclose(magnitudes.numpy()[:-1], means[:-1], rtol=1e-10)
    low, last = float(magnitudes[-2:].mean()), float(magnitudes[-1])
    mass = integrate.quad(density, low, end, epsabs=0, epsrel=1e-9)[0]
    moment = integrate.quad(lambda t: t * density(t), low, end, epsabs=0, epsrel=1e-9)[0]
    assert last == pytest.approx(moment / mass, rel=1e-8)
    assert distortion == pytest.approx(2 * parts.sum(), rel=1e-5)


@pytest.mark.parametrize("dim", [4, 5, 16, 64, 257, 5000])
def test_beta_cdf(dim: int) -> None:
    end = math.sqrt(dim)
    t = torch.cat((torch.linspace(-end, end, 501), torch.linspace(-6, 6, 501))).double()
    expected = stats.beta.cdf((1 + t.numpy() / end) / 2, (dim - 1) / 2, (dim - 1) / 2)
    np.testing.assert_allclose(beta_cdf(t, dim).numpy(), expected, rtol=1e-9, atol=1e-14)
    beyond = torch.tensor([-2 * end, 0.0, 2 * end])
    np.testing.assert_allclose(beta_cdf(beyond, dim).numpy(), [0, 0.5, 1], atol=1e-14)


# --- the fp8 books ---


def gaussian_distortion(magnitudes: np.ndarray) -> float:
    return float(2 * cell_integrals(magnitudes, normal_density, math.inf)[1].sum())


@pytest.mark.parametrize("bits", CODEBOOKS["fp8"])
def test_fp8_unit_is_the_best_scale(bits: int) -> None:
    book = get_codebook("fp8", bits)
    native = np.array(book.native)
    np.testing.assert_allclose(book.magnitudes, book.unit * native, rtol=1e-15)
    scales = book.unit * np.geomspace(0.5, 2, 61)  # the book's own unit is in the middle
    distortions = [gaussian_distortion(scale * native) for scale in scales]
    assert np.argmin(distortions) == 30
    best = optimize.minimize_scalar(
        lambda scale: gaussian_distortion(scale * native),
        bounds=(scales[29], scales[31]),
        method="bounded",
        options={"xatol": 1e-9},
    )
    assert book.unit == pytest.approx(best.x, rel=1e-5)
    assert book.distortion == pytest.approx(best.fun, rel=1e-8)


@pytest.mark.parametrize(("bits", "excess"), [(1, 0), (2, 0), (3, 0.0012), (4, 0.0076)])
def test_fp8_costs_little_over_lloyd_max(bits: int, excess: float) -> None:
    ratio = get_codebook("fp8", bits).distortion / get_codebook("gaussian", bits).distortion
    assert ratio - 1 == pytest.approx(excess, abs=5e-5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_fp8_magnitudes_are_e4m3_values(bits: int) -> None:
    native = torch.tensor(get_codebook("fp8", bits).native)
    assert torch.equal(native.to(torch.float8_e4m3fn).float(), native)
    assert native.min() >= 2.0**-6  # no subnormals
    assert native.max() <= 126  # one more is still a signed byte, as the CUDA kernels need it
    assert torch.equal(native.round(), native)


def interval_cost(low: np.ndarray, high: np.ndarray, centroid: np.ndarray) -> np.ndarray:
    """E (X - centroid)^2 over [low, high] under N(0, 1), elementwise."""
    mass = special.ndtr(high) - special.ndtr(low)
    moment = normal_density(low) - normal_density(high)
    second = mass + low * normal_density(low) - high * normal_density(high)
    return second - 2 * centroid * moment + centroid**2 * mass


def best_subset_distortion(levels: np.ndarray, count: int) -> float:
    """The least distortion of `count` of the positive levels, by dynamic programming."""
    low, high = levels[:, None], levels[None, :]
    middle = (low + high) / 2
    between = interval_cost(low, middle, low) + interval_cost(middle, high, high)
    between[np.tril_indices(len(levels))] = np.inf
    cost = interval_cost(np.zeros_like(levels), levels, levels)
    for _ in range(count - 1):
        cost = (cost[:, None] + between).min(0)
    return float(2 * (cost + interval_cost(levels, np.full_like(levels, 60.0), levels)).min())


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_no_whole_e4m3_magnitudes_do_better(bits: int) -> None:
    """Search every set of e4m3 values that are whole numbers to 126, at 601 scales."""
    bytes_ = torch.arange(1, 127, dtype=torch.uint8)  # positive and finite
    levels = bytes_.view(torch.float8_e4m3fn).double().numpy()
    levels = levels[(levels == levels.round()) & (levels <= 126)]
    book = get_codebook("fp8", bits)
    scales = np.geomspace(2.0**-6, 1, 601)  # the largest level is at least 1.9
    best = min(best_subset_distortion(scale * levels, 2 ** (bits - 1)) for scale in scales)
    assert book.distortion <= best * (1 + 1e-6)
    assert best == pytest.approx(book.distortion, rel=1e-3)  # the search does reach the book


# --- the coding ---


def codebook(kind: str, bits: int) -> Codebook:
    return get_codebook(kind, bits, 128)


@pytest.mark.parametrize(("kind", "bits"), [b for b in BOOKS if b != ("fp8", 8)])
def test_code_order_is_sign_magnitude(kind: str, bits: int) -> None:
    book = codebook(kind, bits)
    half = 2 ** (bits - 1)
    positive = torch.tensor(book.magnitudes, dtype=torch.float32)
    assert torch.equal(book.table(), torch.cat((positive, -positive)))
    codes = torch.arange(2 * half, dtype=torch.uint8)
    assert torch.equal(book.decode(codes), book.table())
    assert torch.equal(book.encode(book.table()), codes)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e30, -1e-30])
    assert book.encode(edges).tolist() == [0, 0, half - 1, 2 * half - 1, half - 1, half]


def test_a_tie_goes_to_the_smaller_magnitude() -> None:
    book = Codebook("gaussian", 2, None, (1.0, 3.0), distortion=0.0)
    assert book.thresholds == (2.0,)
    assert book.encode(torch.tensor([2.0, -2.0, 2.0000002, -2.0000002])).tolist() == [0, 2, 1, 3]


def test_int8_code_order_is_twos_complement() -> None:
    book = get_codebook("fp8", 8)
    assert book.native == tuple(range(128))
    levels = torch.cat((torch.arange(128), torch.arange(-128, 0)))
    # As kernels multiply; with the unit in float64 some were one place off, and then scales.
    assert torch.equal(book.table(), levels.float() * book.unit)
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(codes.view(torch.int8).long(), levels)
    assert torch.equal(book.decode(codes), book.table())
    possible = codes[codes != 128]
    assert torch.equal(book.encode(book.table()[possible.long()]), possible)
    edges = torch.tensor([0.0, -0.0, math.inf, -math.inf, -128 * book.unit, -1e-30])
    assert book.encode(edges).tolist() == [0, 0, 127, 129, 129, 0]


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_encode_picks_the_nearest_centroid(kind: str, bits: int) -> None:
    book = codebook(kind, bits)
    y = torch.cat((torch.randn(3000), 6 * torch.rand(1000) - 3, 5 * torch.randn(200)))
    distance = torch.cdist(y.double()[:, None], book.table().double()[:, None])
    if (kind, bits) == ("fp8", 8):
        distance[:, 128] = math.inf  # -128 is not a level
    nearest, runner_up = distance.topk(2, largest=False).values.unbind(1)
    clear = runner_up - nearest > 1e-6
    assert clear.float().mean() > 0.99
    assert torch.equal(book.encode(y)[clear].long(), distance.argmin(1)[clear])


@lru_cache(maxsize=1)
def normal_samples() -> torch.Tensor:
    return random_normal(1, 1, (8000, 128)).float()


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_empirical_distortion(kind: str, bits: int) -> None:
    book = codebook(kind, bits)
    x = normal_samples()
    if kind == "beta":
        x = x * (128**0.5 / x.norm(dim=1, keepdim=True))
    error = (x - book.decode(book.encode(x))).double().square().mean().item()
    assert error == pytest.approx(book.distortion, rel=0.01)


@given(
    book=st.sampled_from(BOOKS),
    shape=st.lists(st.integers(0, 5), max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_encode_any_shape_and_dtype(
    book: tuple[str, int], shape: list[int], dtype: torch.dtype
) -> None:
    chosen = codebook(*book)
    y = random_normal(2, 2, tuple(shape)).to(dtype)
    codes = chosen.encode(y)
    assert codes.dtype == torch.uint8
    assert codes.shape == y.shape
    assert torch.equal(codes, chosen.encode(y.float()))
    assert (codes.long() < 2**chosen.bits).all()
    decoded = chosen.decode(codes)
    assert decoded.dtype == torch.float32
    assert decoded.shape == y.shape


@pytest.mark.parametrize(("kind", "bits"), BOOKS)
@pytest.mark.filterwarnings("error")
def test_encode_non_contiguous(kind: str, bits: int) -> None:
    book = codebook(kind, bits)
    y = torch.randn(12, 10, 8)[::2, :, 1::3].transpose(0, 2)
    assert not y.is_contiguous()
    codes = book.encode(y)
    assert torch.equal(codes, book.encode(y.contiguous()))
    assert torch.equal(book.decode(codes.transpose(0, 1)), book.decode(codes).transpose(0, 1))


def test_books_are_cached_and_tables_kept() -> None:
    assert get_codebook("gaussian", 3, 64) is get_codebook("gaussian", 3)
    assert get_codebook("beta", 3, 64) is not get_codebook("beta", 3, 128)
    book = get_codebook("beta", 3, 64)
    assert (book.kind, book.bits, book.dim) == ("beta", 3, 64)
    assert book.table() is book.table("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "bits"), BOOKS)
def test_cpu_and_gpu_make_the_same_codes(kind: str, bits: int) -> None:
    book = codebook(kind, bits)
    for rotation_kind, dim in (("hadamard", 64), ("hadamard", 128), ("hadamard", 256)):
        x = torch.randn(4096, dim).to(torch.bfloat16)
        rotation = make_rotation(rotation_kind, dim, seed=5)
        y = rotation(x)
        assert torch.equal(rotation(x.cuda()).cpu(), y)
        assert torch.equal(rotation.inverse(y.cuda()).cpu(), rotation.inverse(y))
        codes = book.encode(y)
        assert torch.equal(book.encode(y.cuda()).cpu(), codes)
        assert torch.equal(book.decode(codes.cuda()).cpu(), book.decode(codes))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [80, 96, 112, 192])
def test_haar_codes_agree_on_cpu_and_gpu(dim: int) -> None:
    x = torch.randn(4096, dim).to(torch.bfloat16)
    rotation, book = make_rotation("haar", dim, seed=5), get_codebook("fp8", 4)
    assert torch.equal(book.encode(rotation(x.cuda())).cpu(), book.encode(rotation(x)))
