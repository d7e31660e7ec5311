"""The audit: what each weakness of the method costs. Its rows inform and never fail."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tightkv.config import PRESETS, SCALE_MODES, KVQuantConfig
from tightkv.math.codebook import get_codebook
from tightkv.paged.attention import attend
from tightkv.paged.cache import POOL_GROWTH
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.tools.validate import claims
from tightkv.tools.validate.inputs import Problem, attention_problem, fill, filled, normal
from tightkv.tools.validate.report import AuditRow, Options
from tightkv.tools.validate.stats import softmax_kl

BIASES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
NATS = "nats of softmax KL"
OUTPUT = "relative output error"
TIMES = "x the Lloyd-Max distortion"
POOL_PAGES = 4 * POOL_GROWTH  # so many that growing by a share is more than by a page


# --- attention: synthetic transformer keys ---
@dataclass(frozen=True)
class AttentionError:
    """Means over heads and queries of attention over stored keys and values."""

    score: float  # root mean square error of a score, in logits
    kl: float  # of the softmax, in nats
    output: float  # norm of the output's error over the norm of the output


def attention_error(cfg: KVQuantConfig, problem: Problem, *, exact: bool = True) -> AttentionError:
    """What storing `problem` by `cfg` does to its attention."""
    cache = fill(cfg, problem, exact)
    scores = problem.scores(problem.key)
    stored_scores = problem.scores(cache.dequantize()[0][0])
    # A shift common to all keys of a query changes nothing: it is no error.
    delta = stored_scores - scores
    delta = delta - delta.mean(-1, keepdim=True)
    out, _ = attend(cache, problem.query[None], causal=False)
    want = torch.einsum("hqt,thd->qhd", scores.softmax(-1), problem.value)
    off = (out[0] - want).norm(dim=-1) / want.norm(dim=-1)
    score, kl = delta.square().mean().sqrt(), softmax_kl(scores, stored_scores).mean()
    return AttentionError(float(score), float(kl), float(off.mean()))


def _problem(options: Options, extra_tokens: int = 0, **changes: Any) -> Problem:
    changes["tokens"] = options.samples(1024, 512) + extra_tokens
    changes |= {"queries": options.samples(64, 32), "heads": options.samples(6, 2)}
    return attention_problem(options.stream("audit"), options.dim, **changes)


def _keys(problem: Problem, bits: int, **options: str | float) -> AttentionError:
    """Keys compressed to `bits` outside the default exact window, values left alone."""
    cfg = KVQuantConfig.from_dict({"key_bits": bits, "value_bits": 16, **options})
    return attention_error(cfg, problem)


def _key_bits(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options)
    p = problem.scores(problem.key).softmax(-1)
    for bits in (8, 4, 3, 2):
        cfg, error = KVQuantConfig(key_bits=bits), _keys(problem, bits)
        variance = claims.predicted_noise(cfg, problem).square()
        variance[..., : cfg.sinks] = 0
        variance[..., -cfg.exact_pages * cfg.page_size :] = 0
        # half of the variance under the softmax of independent score errors (docs/math.md)
        predicted = float((p * (1 - p) * variance).sum(-1).mean()) / 2
        reading = (
            f"Scores are off by {error.score:.3f} logits (rms); half the variance the theory "
            f"gives them predicts a KL of {predicted:.2g}."
        )
        detail = {"bits": bits, "score_error": error.score, "predicted_kl": predicted}
        yield AuditRow("key bits", f"{bits}-bit keys", error.kl, NATS, reading, detail)


def _window(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options, extra_tokens=1)  # one token past a page: the smallest ring window
    for name in ("k4v4", "k2v2"):
        default = KVQuantConfig.preset(name)
        least = default.replace(exact_pages=1, sinks=0)
        base = attention_error(default, problem).output
        for setting, cfg, exact in (
            (f"exact_pages={default.exact_pages}, sinks={default.sinks} (default)", default, True),
            ("exact_pages=1, sinks=0, one token past a page", least, True),
            ("ring and sinks lost", default, False),
        ):
            error = attention_error(cfg, problem, exact=exact)
            times = f"{error.output / base:.1f}x the default's error; softmax KL {error.kl:.4f}."
            setting, detail = f"{name}, {setting}", {"kl": error.kl}
            yield AuditRow("no exact window", setting, error.output, OUTPUT, times, detail)


def _biases(options: Options) -> Iterator[AuditRow]:
    what = "biased keys"

    def centered(**changes: Any) -> tuple[AttentionError, AttentionError]:
        """Keys without centering, and with that of pages."""
        problem = _problem(options, **changes)
        return _keys(problem, 3, key_centering="none"), _keys(problem, 3, key_centering="page")

    for bias in BIASES:
        errors = centered(bias=bias)
        readings = (
            f"Quantizes {1 + bias**2:.0f}x the energy that tells keys apart.",
            f"{errors[0].kl / errors[1].kl:.1f}x less than without centering.",
        )
        for i, how in enumerate(("none", "page")):
            setting = f"3-bit keys, mean {bias:g}x the rest, key_centering={how}"
            detail = {"bias": bias, "centered": float(i)}
            yield AuditRow(what, setting, errors[i].kl, NATS, readings[i], detail)
    plain, page = (error.score for error in centered(bias=4.0, bias_in="fast"))
    setting = "3-bit keys, mean 4x the rest in the fastest RoPE channels, key_centering=page"
    reading = (
        "RoPE turns this mean around within a page: centering takes only "
        f"{1 - page / plain:.0%} off the error ({plain:.3g} without)."
    )
    unit = "logits of score error (rms)"
    yield AuditRow(what, setting, page, unit, reading, {"uncentered": plain})


def _rotation(options: Options) -> Iterator[AuditRow]:
    for spread in (0.5, 1.0):
        problem = _problem(options, spread=spread)
        turned, plain = (_keys(problem, 3, rotation=kind).kl for kind in ("hadamard", "none"))
        setting = f"3-bit keys, channel scales spread by e^{spread:g}"
        reading = f"{plain / turned:.1f}x the KL with the Hadamard rotation ({turned:.4f})."
        yield AuditRow("no rotation", setting, plain, NATS, reading, {"with_rotation": turned})


def _prod(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options)
    for bits in (2, 3, 4):
        mse = _keys(problem, bits).kl
        prod = _keys(problem, bits, key_method="prod", key_scale="norm").kl
        reading = (
            f"{prod / mse:.1f}x the KL of mse at the same bits ({mse:.4f}): softmax punishes "
            "variance, not bias."
        )
        yield AuditRow("prod (QJL) keys", f"{bits}-bit keys", prod, NATS, reading, {"mse": mse})


def _outlier_channels(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options)
    two, three = _keys(problem, 2).kl, _keys(problem, 3).kl
    split = _keys(problem, 2, outlier_share=0.5, outlier_side="keys").kl
    reading = (
        f"{(two - split) / (two - three):.0%} of the way from 2 bits ({two:.4f}) to 3 bits "
        f"({three:.4f}) for half of the bits: the slowest RoPE channels are no outliers once the "
        "page's mean is out."
    )
    setting, detail = "2.5-bit keys: half of the channels with 3 bits", {"two_bits": two}
    detail["three_bits"] = three
    yield AuditRow("outlier channels", setting, split, NATS, reading, detail)


def _scale_modes(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options)
    for side, other, unit in (("key", "value", NATS), ("value", "key", OUTPUT)):
        numbers = {}
        for mode in SCALE_MODES:
            cfg = {f"{side}_bits": 2, f"{other}_bits": 16, f"{side}_scale": mode}
            error = attention_error(KVQuantConfig.from_dict(cfg), problem)
            numbers[mode] = error.kl if side == "key" else error.output
        best = min(numbers, key=lambda mode: numbers[mode])
        for mode, number in numbers.items():
            times = f"{number / numbers[best]:.2f}x that of {best}."
            reading = "The least of the four." if mode == best else times
            setting = f"2-bit {side}s, {side}_scale={mode}"
            yield AuditRow("scale modes", setting, number, unit, reading)


def _presets(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options)
    for name in PRESETS:
        error = attention_error(KVQuantConfig.preset(name), problem)
        reading = f"Softmax KL {error.kl:.5f}, score error {error.score:.4f} logits."
        setting, detail = f"{name}, default window", {"kl": error.kl, "score_error": error.score}
        yield AuditRow("presets", setting, error.output, OUTPUT, reading, detail)


# --- codec: inputs that a rotation cannot help ---
def _ratio(options: Options, kind: str, bits: int, mode: str = "norm") -> float:
    """Distortion under Hadamard rotations over what the law promises."""
    samples = claims.squared_errors(options, kind, bits, codebook="beta", scale_mode=mode)
    return float(samples.mean()) / claims.lloyd_max("beta", bits, options.dim)


def _hard_vectors(options: Options) -> Iterator[AuditRow]:
    if options.dim & (options.dim - 1):  # there is no Hadamard transform of this size
        return
    for bits in claims.BITS:
        plain, fixed = (_ratio(options, "one-hot", bits, mode) for mode in ("norm", "corrected"))
        above = plain * claims.lloyd_max("beta", bits, options.dim) > claims.UPPER * 4.0**-bits
        reading = (
            "All rotated coordinates have one magnitude, no Beta law: "
            f"{'above' if above else 'below'} Theorem 1's bound; a corrected scale repairs it "
            f"({fixed:.2g}x)."
        )
        what, setting = "one-hot vectors, Hadamard", f"b={bits}, norm scale"
        yield AuditRow(what, setting, plain, TIMES, reading, {"bits": bits, "corrected": fixed})
    for kind in ("sparse", "flat", "huge channels"):
        ratios = {bits: _ratio(options, kind, bits) for bits in claims.BITS}
        worst = max(ratios, key=lambda bits: abs(ratios[bits] - 1))
        what, setting = "structured vectors, Hadamard", f"b={worst}, {kind}, norm scale"
        reading = (
            "The width that strays most from the law: few sign patterns give few distinct values."
        )
        detail = {f"ratio_{bits}_bits": value for bits, value in ratios.items()}
        yield AuditRow(what, setting, ratios[worst], TIMES, reading, detail)


def _outlier_token(options: Options) -> Iterator[AuditRow]:
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
    yield AuditRow(
        "outlier token in a page",
        f"4-bit keys, one of {cfg.page_size} is 30x as long",
        errors[1] / errors[0],
        "x the squared error of the others",
        "It pulls the mean that the others are centered on; the per-token choice bounds the harm.",
    )


def _integer_book(options: Options) -> Iterator[AuditRow]:
    scaled, free = (get_codebook(book, 8).distortion * 4.0**8 for book in ("fp8", "gaussian"))
    reading = (
        f"Theorem 1 promises {claims.UPPER:.2f}; integer levels give up {scaled / free:.1f}x for "
        "exact arithmetic."
    )
    setting = "fp8 book at 8 bits (int8 levels)"
    yield AuditRow("8-bit book is uniform", setting, scaled, "x 4^-8", reading)


# --- bytes that do not pay ---
def _short_contexts(options: Options) -> Iterator[AuditRow]:
    """As TightCache holds them: tokens of the window have no codes yet."""
    layout = PageLayout(KVQuantConfig.preset("k4v4"), claims.HEADS, 128)
    what, exact = "short contexts", layout.exact_bytes_per_token
    kept: dict[str, Any] = {"encode_partial_page": False}
    share = layout.ring_bytes_per_token / exact
    for tokens in (32, 128, 512):
        held = claims.allocated_bytes(layout, tokens, options.stream("short"), **kept)
        newest = min(tokens, layout.ring_tokens)
        reading = f"The newest {newest} tokens take {share:.2f} of bf16 each."
        unit = "bf16 bytes over allocated bytes"
        yield AuditRow(what, f"k4v4, {tokens} tokens", tokens * exact / held, unit, reading)

    def first(times: int) -> int:
        lengths = range(1, 100_000)
        return next(n for n in lengths if times * layout.total_bytes(n, **kept) < n * exact)

    setting = "k4v4, length from which the cache is smaller than bf16"
    reading = f"Half of bf16 is reached at {first(2)} tokens."
    yield AuditRow(what, setting, first(1), "tokens", reading, {"half_size_tokens": first(2)})


def _pool_growth(options: Options) -> Iterator[AuditRow]:
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 1, 64)
    most = POOL_PAGES * layout.page_size
    x = normal(options.stream("growth"), 0, most + 1, 1, 64).to(torch.bfloat16)
    cache = filled(layout, *((part, part) for part in x.split(most)))
    share = cache.allocated_bytes() / layout.total_bytes(most + 1) - 1
    setting = f"k4v4, one token after {most} appended at once"
    unit, more = "share of bytes held in reserve", f"up to a {POOL_GROWTH}th more pages"
    reading = f"A growing pool takes {more} than it needs; reserve() avoids it."
    yield AuditRow("pool growth", setting, share, unit, reading)


AUDIT: tuple[Callable[[Options], Iterator[AuditRow]], ...] = (
    *(_key_bits, _window, _biases, _rotation, _prod, _outlier_channels, _scale_modes, _presets),
    *(_hard_vectors, _outlier_token, _integer_book, _short_contexts, _pool_growth),
)
