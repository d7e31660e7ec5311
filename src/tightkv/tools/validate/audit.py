"""The audit: what each weakness of the method costs. Its rows inform and never fail."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tightkv.config import KVQuantConfig
from tightkv.paged.attention import attend
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.tools.validate import claims
from tightkv.tools.validate.inputs import Problem, attention_problem, fill, normal
from tightkv.tools.validate.report import AuditRow, Options
from tightkv.tools.validate.stats import softmax_kl

BIASES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
NATS = "nats of softmax KL"
OUTPUT = "relative output error"
TIMES = "x the Lloyd-Max distortion"


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
    """Keys compressed to `bits` outside the default window, values left alone."""
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


# --- codec: inputs that a rotation cannot help ---
def _ratio(options: Options, kind: str, bits: int, mode: str) -> float:
    """Distortion under Hadamard rotations over what the law promises."""
    samples = claims.squared_errors(options, kind, bits, codebook="beta", scale_mode=mode)
    return float(samples.mean()) / claims.lloyd_max("beta", bits, options.dim)


def _hard_vectors(options: Options) -> Iterator[AuditRow]:
    if options.dim & (options.dim - 1):  # there is no Hadamard transform of this size
        return
    for kind in ("one-hot", "sparse", "flat", "huge channels"):
        for bits in (2, 3, 4):
            plain, fixed = (_ratio(options, kind, bits, mode) for mode in ("norm", "corrected"))
            above = plain * claims.lloyd_max("beta", bits, options.dim) > claims.UPPER * 4.0**-bits
            reading = (
                f"Few sign patterns give few distinct values: {'above' if above else 'below'} "
                f"Theorem 1's bound; {fixed:.2g}x with a corrected scale."
            )
            what, setting = f"{kind} vectors, Hadamard", f"b={bits}, norm scale"
            yield AuditRow(what, setting, plain, TIMES, reading, {"bits": bits, "corrected": fixed})


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


AUDIT: tuple[Callable[[Options], Iterator[AuditRow]], ...] = (
    _key_bits,
    _window,
    _biases,
    _rotation,
    _prod,
    _hard_vectors,
    _outlier_token,
)
