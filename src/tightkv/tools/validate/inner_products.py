"""Claim 2: inner products by TurboQuant-Prod, and what the scale modes do to their bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tightkv.math.quantize import Quantizer, TurboQuantMSE, TurboQuantProd
from tightkv.math.rotation import make_rotation
from tightkv.tools.validate.distortion import UPPER, lloyd_max
from tightkv.tools.validate.inputs import many_rotations, unit_vectors
from tightkv.tools.validate.report import Claim, Options, Progress
from tightkv.tools.validate.stats import mean_and_half_width

SECTION = "2 inner products"
BITS = (2, 3, 4)
PAIRS = 256


def check(options: Options, progress: Progress) -> list[Claim]:
    """Unbiasedness and variance of Prod, then the bias of MSE under two scale modes."""
    rows: list[Claim] = []
    for bits in BITS:
        progress(f"inner products: prod, {bits} bits")
        rows += _prod_rows(options, bits)
    progress("inner products: scale modes")
    for bits in (1, 2, 3, 4):
        rows.append(_norm_bias_row(options, bits))
    rows += [_unbiased_row(options, bits, aligned) for bits in (2, 4) for aligned in (True, False)]
    return rows


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


def _prod_rows(options: Options, bits: int) -> list[Claim]:
    own, other, want = _prod_errors(options, bits)
    # An interval that would hide a fifth of the bias MSE has at these bits proves nothing.
    widest = lloyd_max("fp8", bits, options.dim) / 5
    rows = []
    for query, errors in (("y = x", own), ("independent y", other)):
        mean, half_width = mean_and_half_width(errors.mean(-1))
        limit = min(half_width, widest)
        rows.append(
            Claim(
                section=SECTION,
                claim="prod unbiased: mean of <y, x^> - <y, x>",
                setting=f"b={bits}, {query}",
                measured=mean,
                half_width=half_width,
                lower=-limit,
                upper=limit,
            )
        )
    variance, half_width = mean_and_half_width(other.square().mean(-1))
    rows.append(
        Claim(
            section=SECTION,
            claim="prod variance below sqrt(3) pi^2 / d * 4^-b",
            setting=f"b={bits}, independent y",
            measured=variance,
            half_width=half_width,
            upper=2 * math.pi * UPPER / options.dim * 4.0**-bits,
        )
    )
    rows.append(
        Claim(
            section=SECTION,
            claim="prod variance within 5% of (pi/2 |r|^2 - <y, r>^2) / d",
            setting=f"b={bits}, independent y",
            measured=variance,
            half_width=half_width,
            lower=0.95 * want,
            upper=1.05 * want,
        )
    )
    return rows


def _over_rotations(options: Options, bits: int, mode: str) -> tuple[Quantizer, Tensor]:
    """A quantizer with many Haar rotations, and its inputs [rotations, 64, dim]."""
    count = options.samples(192, 64)
    many = many_rotations("haar", options.dim, options.stream("rotations"), count)
    x = _vectors(options, 64)[0].expand(count, -1, -1)
    return TurboQuantMSE(options.dim, bits, scale_mode=mode, codebook="beta", rotation=many), x


def _norm_bias_row(options: Options, bits: int) -> Claim:
    quantizer, x = _over_rotations(options, bits, "norm")
    errors = quantizer.inner_product(x, quantizer.encode(x)) - 1
    mean, half_width = mean_and_half_width(errors.mean(-1))
    want = -lloyd_max("beta", bits, options.dim)
    return Claim(
        section=SECTION,
        claim="mse, norm scale: biased low by D(b), within 10%",
        setting=f"b={bits}, y = x",
        measured=mean,
        half_width=half_width,
        lower=1.1 * want,
        upper=0.9 * want,
    )


def _unbiased_row(options: Options, bits: int, aligned: bool) -> Claim:
    """y = x: exact but for the scale's float16. y at 60 degrees: on average over rotations."""
    quantizer, x = _over_rotations(options, bits, "unbiased")
    fields = quantizer.encode(x)
    if aligned:
        errors = quantizer.inner_product(x, fields) - 1
        measured, limit, half_width = float(errors.abs().max()), 5e-4, None
        claim = "mse, unbiased scale: largest |<x, x^> - 1|"
    else:
        side = _vectors(options, 64)[1]
        side = side - (side * x[0]).sum(-1, keepdim=True) * x[0]
        y = 0.5 * x[0] + math.sqrt(0.75) * side / side.norm(dim=-1, keepdim=True)
        errors = quantizer.inner_product(y.expand_as(x), fields) - 0.5
        measured, half_width = mean_and_half_width(errors.mean(-1))
        limit = min(half_width, lloyd_max("beta", bits, options.dim) / 10)
        claim = "mse, unbiased scale: mean of <y, x^> - <y, x>"
    return Claim(
        section=SECTION,
        claim=claim,
        setting=f"b={bits}, {'y = x' if aligned else 'y at 60 degrees to x'}",
        measured=measured,
        half_width=half_width,
        lower=-limit,
        upper=limit,
    )
