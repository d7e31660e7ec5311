"""Claim 2: inner products by TurboQuant-Prod, and what the scale modes do to their bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tightkv.math.quantize import Quantizer, TurboQuantMSE, TurboQuantProd
from tightkv.math.rotation import make_rotation
from tightkv.tools.validate.distortion import UPPER, lloyd_max
from tightkv.tools.validate.inputs import many_rotations, unit_vectors
from tightkv.tools.validate.report import Claim, Options

SECTION = "2 inner products"
BITS = (2, 3, 4)
PAIRS = 256


def check(options: Options) -> Iterator[Claim]:
    """Unbiasedness and variance of Prod, then the bias of MSE under two scale modes."""
    for bits in BITS:
        yield from _prod_rows(options, bits)
    for bits in (1, 2, 3, 4):
        yield _norm_bias_row(options, bits)
    for bits in (2, 4):
        yield from (_unbiased_row(options, bits, aligned) for aligned in (True, False))


def _vectors(options: Options, count: int) -> tuple[Tensor, Tensor]:
    """Unit vectors x [count, dim] and independent unit queries."""
    x = unit_vectors("gaussian", options.stream("products x"), count, options.dim)
    return x, unit_vectors("gaussian", options.stream("products y"), count, options.dim)


def _prod_errors(options: Options, bits: int) -> tuple[Tensor, Tensor, float]:
    """<y, x^> - <y, x> for y = x and for independent y, [sketches, pairs] each.

    And the mean of the variance that the residual of each x predicts for independent y.
    """
    x, y = _vectors(options, PAIRS)
    rotation = make_rotation("hadamard", options.dim, options.seed)
    own, other = [], []
    for i in range(options.samples(400, 64)):
        seed = options.stream("sketches") + i
        quantizer = TurboQuantProd(options.dim, bits, rotation=rotation, seed=seed)
        fields = quantizer.encode(x)
        own.append(quantizer.inner_product(x, fields) - 1)
        other.append(quantizer.inner_product(y, fields) - (x * y).sum(-1))
    coarse = TurboQuantMSE(options.dim, bits - 1, rotation=rotation)
    rest = x - coarse.decode(coarse.encode(x))
    variance = math.pi / 2 * rest.square().sum(-1) - (y * rest).sum(-1).square()
    return torch.stack(own), torch.stack(other), float(variance.mean()) / options.dim


def _prod_rows(options: Options, bits: int) -> Iterator[Claim]:
    own, other, want = _prod_errors(options, bits)
    # An interval that would hide a fifth of the bias MSE has at these bits proves nothing.
    widest = lloyd_max("fp8", bits, options.dim) / 5
    for query, errors in (("y = x", own), ("independent y", other)):
        claim = "prod unbiased: mean of <y, x^> - <y, x>"
        yield _unbiased(claim, f"b={bits}, {query}", errors.mean(-1), widest)
    setting, squared = f"b={bits}, independent y", other.square().mean(-1)
    claim = "prod variance below sqrt(3) pi^2 / d * 4^-b"
    upper = 2 * math.pi * UPPER / options.dim * 4.0**-bits
    yield Claim.of(SECTION, claim, setting, squared, upper=upper)
    claim = "prod variance within 5% of (pi/2 |r|^2 - <y, r>^2) / d"
    yield Claim.of(SECTION, claim, setting, squared, lower=0.95 * want, upper=1.05 * want)


def _unbiased(claim: str, setting: str, errors: Tensor, widest: float) -> Claim:
    """Zero is in the interval of the mean, which may be no wider than so much to each side."""
    row = Claim.of(SECTION, claim, setting, errors)
    assert row.half_width is not None
    limit = min(row.half_width, widest)
    return replace(row, lower=-limit, upper=limit)


def _over_rotations(options: Options, bits: int, mode: str) -> tuple[Quantizer, Tensor]:
    """A quantizer with many Haar rotations, and its inputs [rotations, 64, dim]."""
    count = options.samples(192, 64)
    many = many_rotations("haar", options.dim, options.stream("rotations"), count)
    x = _vectors(options, 64)[0].expand(count, -1, -1)
    return TurboQuantMSE(options.dim, bits, scale_mode=mode, codebook="beta", rotation=many), x


def _norm_bias_row(options: Options, bits: int) -> Claim:
    quantizer, x = _over_rotations(options, bits, "norm")
    errors = quantizer.inner_product(x, quantizer.encode(x)) - 1
    want = -lloyd_max("beta", bits, options.dim)
    return Claim.of(
        SECTION,
        "mse, norm scale: biased low by D(b), within 10%",
        f"b={bits}, y = x",
        errors.mean(-1),
        lower=1.1 * want,
        upper=0.9 * want,
    )


def _unbiased_row(options: Options, bits: int, aligned: bool) -> Claim:
    """y = x: exact but for the scale's float16. y at 60 degrees: on average over rotations."""
    quantizer, x = _over_rotations(options, bits, "unbiased")
    fields = quantizer.encode(x)
    if aligned:
        worst = float((quantizer.inner_product(x, fields) - 1).abs().max())
        claim = "mse, unbiased scale: largest |<x, x^> - 1|"
        return Claim(SECTION, claim, f"b={bits}, y = x", worst, lower=-5e-4, upper=5e-4)
    side = _vectors(options, 64)[1]
    side = side - (side * x[0]).sum(-1, keepdim=True) * x[0]
    y = 0.5 * x[0] + math.sqrt(0.75) * side / side.norm(dim=-1, keepdim=True)
    errors = quantizer.inner_product(y.expand_as(x), fields) - 0.5
    setting = f"b={bits}, y at 60 degrees to x"
    claim = "mse, unbiased scale: mean of <y, x^> - <y, x>"
    return _unbiased(claim, setting, errors.mean(-1), lloyd_max("beta", bits, options.dim) / 10)
