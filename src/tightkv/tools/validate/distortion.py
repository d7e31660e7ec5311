"""Claims 1 and 3: the distortion of TurboQuant-MSE, from above and from below."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tightkv.math.codebook import get_codebook
from tightkv.math.lloyd import BetaLaw, expected_distortion
from tightkv.math.quantize import TurboQuantMSE
from tightkv.tools.validate.inputs import UNIT_KINDS, many_rotations, unit_vectors
from tightkv.tools.validate.report import Claim, Options

SECTION = "1 distortion"
BITS = (1, 2, 3, 4)
TOLERANCE = 0.03  # of the Lloyd-Max value
UPPER = math.sqrt(3) * math.pi / 2  # Theorem 1: distortion <= UPPER * 4**-bits
VECTORS = 32  # under each rotation

# Squared error by scale mode, from the distortion of the norm scale (docs/math.md).
MODE_ERRORS: dict[str, Callable[[float], float]] = {
    "norm": lambda d: d,
    "corrected": lambda d: 2 - 2 * math.sqrt(1 - d),
    "least_squares": lambda d: d,
    "unbiased": lambda d: d / (1 - d),
}


def squared_errors(
    options: Options,
    kind: str,
    bits: int,
    *,
    codebook: str = "fp8",
    rotation: str = "hadamard",
    scale_mode: str = "norm",
) -> Tensor:
    """Mean squared error of unit vectors of this kind under each of many rotations, [rotations]."""
    count = options.samples(192, 80)  # fewer than the rotations kept in memory
    x = unit_vectors(kind, options.stream(f"unit {kind}"), count * VECTORS, options.dim)
    x = x.unflatten(0, (count, VECTORS))
    quantizer = TurboQuantMSE(
        options.dim,
        bits,
        scale_mode=scale_mode,
        codebook=codebook,
        rotation=many_rotations(rotation, options.dim, options.stream("rotations"), count),
    )
    rest = quantizer.decode(quantizer.encode(x)) - x
    return rest.square().sum(-1).mean(-1)


def _beta_haar(options: Options, kind: str, bits: int, **mode: str) -> Tensor:
    """Of the book and the rotation that the theory is about."""
    return squared_errors(options, kind, bits, codebook="beta", rotation="haar", **mode)


def lloyd_max(codebook: str, bits: int, dim: int) -> float:
    """The distortion this book must have: its cells integrated under the exact law at `dim`."""
    magnitudes = get_codebook(codebook, bits, dim).magnitudes
    return expected_distortion(
        BetaLaw(dim), torch.tensor(magnitudes, dtype=torch.float64, device="cpu")
    )


def check(options: Options) -> Iterator[Claim]:
    """Theorem 1, the Lloyd-Max value for every book, rotation and input, and Theorem 3."""
    rows, worst = list[Claim](), dict.fromkeys(BITS, 0.0)  # largest mean distortion at each width
    for codebook, rotation in (
        ("fp8", "hadamard"),
        ("gaussian", "hadamard"),
        ("beta", "hadamard"),
        ("fp8", "haar"),
    ):
        for bits in BITS:
            samples = squared_errors(options, "uneven", bits, codebook=codebook, rotation=rotation)
            row = _lloyd_max_row(options, codebook, rotation, bits, samples)
            worst[bits] = max(worst[bits], row.measured)
            rows.append(row)
    for kind in UNIT_KINDS:
        row, means = _hard_input_row(options, kind)
        worst = {bits: max(worst[bits], means[bits]) for bits in BITS}
        rows.append(row)
    for mode in ("corrected", "least_squares", "unbiased"):  # norm is every row above
        rows += [_scale_mode_row(options, mode, bits) for bits in (2, 4)]
    for bits, measured in worst.items():
        setting = f"b={bits}, largest of all settings below"
        claim = "MSE below sqrt(3) pi / 2 * 4^-b"
        yield Claim(SECTION, claim, setting, measured, upper=UPPER * 4.0**-bits)
    yield from rows
    yield from (_theorem_3_row(options, bits) for bits in range(1, 7))


def _lloyd_max_row(
    options: Options, codebook: str, rotation: str, bits: int, samples: Tensor
) -> Claim:
    want = lloyd_max(codebook, bits, options.dim)
    book = get_codebook(codebook, bits, options.dim).distortion
    return Claim.of(
        SECTION,
        "MSE within 3% of Lloyd-Max",
        f"b={bits}, {codebook} book, {rotation}",
        samples,
        lower=want * (1 - TOLERANCE),
        upper=want * (1 + TOLERANCE),
        detail={"bits": bits, "lloyd_max": want, "book_distortion": book},
    )


def _hard_input_row(options: Options, kind: str) -> tuple[Claim, dict[int, float]]:
    """Haar rotations treat every input alike; the width with the largest deviation counts."""
    means = {bits: float(_beta_haar(options, kind, bits).double().mean()) for bits in BITS}
    ratios = {bits: means[bits] / lloyd_max("beta", bits, options.dim) for bits in BITS}
    claim = Claim(
        SECTION,
        "hard inputs: MSE over Lloyd-Max",
        f"{kind} vectors, haar, worst of b=1 to 4",
        max(ratios.values(), key=lambda ratio: abs(ratio - 1)),
        lower=1 - TOLERANCE,
        upper=1 + TOLERANCE,
        detail={f"ratio_{bits}_bits": ratio for bits, ratio in ratios.items()},
    )
    return claim, means


def _scale_mode_row(options: Options, mode: str, bits: int) -> Claim:
    want = MODE_ERRORS[mode](lloyd_max("beta", bits, options.dim))
    gain = 3 / options.dim  # most that fitting a scale to each vector takes off the formula
    return Claim.of(
        SECTION,
        "MSE of a scale mode within 3% of its formula",
        f"b={bits}, {mode}, beta book, haar",
        _beta_haar(options, "gaussian", bits, scale_mode=mode),
        lower=want * (1 - TOLERANCE - gain),
        upper=want * (1 + TOLERANCE),
        detail={"bits": bits, "formula": want},
    )


def _theorem_3_row(options: Options, bits: int) -> Claim:
    return Claim.of(
        "3 scaling",
        "MSE * 4^b between 1 and sqrt(3) pi / 2",
        f"b={bits}, beta book, sparse vectors, haar",
        _beta_haar(options, "sparse", bits) * 4.0**bits,
        lower=1.0,
        upper=UPPER,
        detail={"bits": bits, "lloyd_max": lloyd_max("beta", bits, options.dim) * 4.0**bits},
    )
