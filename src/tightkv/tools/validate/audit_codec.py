"""The audit's codec and byte rows: inputs a rotation cannot help, and bytes that do not pay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tightkv.config import KVQuantConfig
from tightkv.math.codebook import get_codebook
from tightkv.paged.cache import POOL_GROWTH
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.tools.validate.distortion import BITS, UPPER, lloyd_max, squared_errors
from tightkv.tools.validate.inputs import filled, normal
from tightkv.tools.validate.report import AuditRow, Options
from tightkv.tools.validate.sizes import HEADS, allocated_bytes

TIMES = "x the Lloyd-Max distortion"
POOL_PAGES = 4 * POOL_GROWTH  # so many that growing by a share is more than by a page


def rows(options: Options) -> Iterator[AuditRow]:
    """Every codec and byte row of the audit."""
    if options.dim & (options.dim - 1) == 0:  # other sizes have no Hadamard transform
        yield from _one_hot(options)
        yield from _structured(options)
    yield _outlier_token(options)
    yield _integer_book()
    yield from _short_contexts(options)
    yield _pool_growth(options)


def _ratio(options: Options, kind: str, bits: int, mode: str = "norm") -> float:
    """Distortion under Hadamard rotations over what the law promises."""
    samples = squared_errors(options, kind, bits, codebook="beta", scale_mode=mode)
    return float(samples.mean()) / lloyd_max("beta", bits, options.dim)


def _one_hot(options: Options) -> Iterator[AuditRow]:
    for bits in BITS:
        plain, fixed = (_ratio(options, "one-hot", bits, mode) for mode in ("norm", "corrected"))
        above = plain * lloyd_max("beta", bits, options.dim) > UPPER * 4.0**-bits
        bound = "above" if above else "below"
        yield AuditRow(
            "one-hot vectors, Hadamard",
            f"b={bits}, norm scale",
            plain,
            TIMES,
            f"All rotated coordinates have one magnitude, no Beta law: {bound} Theorem 1's bound; "
            f"a corrected scale repairs it ({fixed:.2g}x).",
            {"bits": bits, "corrected": fixed},
        )


def _structured(options: Options) -> Iterator[AuditRow]:
    for kind in ("sparse", "flat", "huge channels"):
        ratios = {bits: _ratio(options, kind, bits) for bits in BITS}
        worst = max(ratios, key=lambda bits: abs(ratios[bits] - 1))
        yield AuditRow(
            "structured vectors, Hadamard",
            f"b={worst}, {kind}, norm scale",
            ratios[worst],
            TIMES,
            "The width that strays most from the law: few sign patterns give few distinct values.",
            {f"ratio_{bits}_bits": value for bits, value in ratios.items()},
        )


def _outlier_token(options: Options) -> AuditRow:
    """One key of 30 times the usual length pulls the mean of its page."""
    cfg = KVQuantConfig.preset("k4v4")
    codec = Codec(PageLayout(cfg, 1, options.dim))
    seed = options.stream("outlier token")
    key = normal(seed, 0, 64, cfg.page_size, options.dim) + 2 * normal(seed, 1, 64, 1, options.dim)
    errors = []
    for length in (1.0, 30.0):
        key[:, 0] = length * normal(seed, 2, 64, options.dim)
        y = codec.rotate("key", key)
        mean = y.mean(1, keepdim=True)
        rest = codec.decode_keys(codec.encode_centered(y, mean), mean) - y
        errors.append(float(rest[:, 1:].square().sum(-1).mean()))
    return AuditRow(
        "outlier token in a page",
        f"4-bit keys, one of {cfg.page_size} is 30x as long",
        errors[1] / errors[0],
        "x the squared error of the others",
        "It pulls the mean that the others are centered on; the per-token choice bounds the harm.",
    )


def _integer_book() -> AuditRow:
    scaled = get_codebook("fp8", 8).distortion * 4.0**8
    return AuditRow(
        "8-bit book is uniform",
        "fp8 book at 8 bits (int8 levels)",
        scaled,
        "x 4^-8",
        f"Theorem 1 promises {UPPER:.2f}; integer levels give up "
        f"{scaled / (get_codebook('gaussian', 8).distortion * 4.0**8):.1f}x for exact arithmetic.",
    )


def _short_contexts(options: Options) -> Iterator[AuditRow]:
    """As TightCache holds them: without pages up to a limit."""
    layout = PageLayout(KVQuantConfig.preset("k4v4"), HEADS, 128)
    kept: dict[str, Any] = {"encode_partial_page": False, "exact_limit": layout.exact_limit}
    for tokens in (32, 128, 512):
        allocated = allocated_bytes(layout, tokens, options.stream("short"), **kept)
        yield AuditRow(
            "short contexts",
            f"k4v4, {tokens} tokens",
            tokens * layout.exact_bytes_per_token / allocated,
            "bf16 bytes over allocated bytes",
            "All tokens are exact, so nothing is saved."
            if tokens <= layout.exact_limit
            else f"Of these, {layout.ring_tokens + layout.cfg.sinks} tokens are (also) exact.",
        )
    half = layout.exact_bytes_per_token / 2
    twice = next(n for n in range(1, 100_000) if layout.total_bytes(n, **kept) <= n * half)
    yield AuditRow(
        "short contexts",
        "k4v4, length from which the cache is smaller than bf16",
        layout.exact_limit + 1,
        "tokens",
        f"Half of bf16 is reached at {twice} tokens.",
        {"half_size_tokens": twice},
    )


def _pool_growth(options: Options) -> AuditRow:
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 1, 64)
    most = POOL_PAGES * layout.page_size
    x = normal(options.stream("growth"), 0, most + 1, 1, 64).to(torch.bfloat16)
    cache = filled(layout, *((part, part) for part in x.split(most)))
    return AuditRow(
        "pool growth",
        f"k4v4, one token after {most} appended at once",
        cache.allocated_bytes() / layout.total_bytes(most + 1) - 1,
        "share of bytes held in reserve",
        f"A growing pool takes up to a {POOL_GROWTH}th more pages than it needs; reserve() "
        "avoids it.",
    )
