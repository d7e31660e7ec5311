"""The audit's attention rows: what each weakness costs on synthetic transformer keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tightkv.config import PRESETS, SCALE_MODES, KVQuantConfig
from tightkv.paged.attention import attend
from tightkv.tools.validate.inputs import Problem, attention_problem, fill
from tightkv.tools.validate.report import AuditRow, Options
from tightkv.tools.validate.retrieval import predicted_noise
from tightkv.tools.validate.stats import softmax_kl

BIASES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)
NATS = "nats of softmax KL"


def rows(options: Options) -> Iterator[AuditRow]:
    """Every attention row of the audit."""
    problem = _problem(options)
    yield from _key_bits(problem)
    yield from _window(options)
    yield from _biases(options)
    yield from _rotation(options)
    yield from _prod(problem)
    yield from _outlier_channels(problem)
    yield from _scale_modes(problem)
    yield from _presets(problem)


@dataclass(frozen=True)
class AttentionError:
    """Means over heads and queries of attention over stored keys and values."""

    score: float  # root mean square error of a score, in logits
    kl: float  # of the softmax, in nats
    output: float  # norm of the output's error over the norm of the output


def attention_error(cfg: KVQuantConfig, problem: Problem, *, exact: bool = False) -> AttentionError:
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
    return AttentionError(
        score=float(delta.square().mean().sqrt()),
        kl=float(softmax_kl(scores, stored_scores).mean()),
        output=float(off.mean()),
    )


def _problem(options: Options, extra_tokens: int = 0, **changes: Any) -> Problem:
    return attention_problem(
        options.stream("audit"),
        options.dim,
        tokens=options.samples(1024, 512) + extra_tokens,
        queries=options.samples(64, 32),
        heads=options.samples(6, 2),
        **changes,
    )


def _keys(problem: Problem, bits: int, **options: str | float) -> AttentionError:
    """Keys compressed to `bits` outside the default exact window, values left alone."""
    cfg = KVQuantConfig.from_dict({"key_bits": bits, "value_bits": 16, **options})
    return attention_error(cfg, problem, exact=True)


def _key_bits(problem: Problem) -> Iterator[AuditRow]:
    for bits in (8, 4, 3, 2):
        error = _keys(problem, bits)
        predicted = _predicted_kl(problem, KVQuantConfig(key_bits=bits))
        yield AuditRow(
            "key bits",
            f"{bits}-bit keys",
            error.kl,
            NATS,
            f"Scores are off by {error.score:.3f} logits (rms); half the variance the theory "
            f"gives them predicts a KL of {predicted:.2g}.",
            {"bits": bits, "score_error": error.score, "predicted_kl": predicted},
        )


def _predicted_kl(problem: Problem, cfg: KVQuantConfig) -> float:
    """Half of the variance under the softmax of independent score errors (docs/math.md)."""
    p = problem.scores(problem.key).softmax(-1)
    variance = predicted_noise(cfg, problem).square()
    variance[..., : cfg.sinks] = 0
    variance[..., -cfg.exact_pages * cfg.page_size :] = 0
    return float((p * (1 - p) * variance).sum(-1).mean()) / 2


def _window(options: Options) -> Iterator[AuditRow]:
    problem = _problem(options, extra_tokens=1)  # one token past a page: the smallest ring window
    for name in ("k4v4", "k2v2"):
        default = KVQuantConfig.preset(name)
        least = default.replace(exact_pages=1, sinks=0)
        base = attention_error(default, problem, exact=True).output
        for setting, cfg, exact in (
            (f"exact_pages={default.exact_pages}, sinks={default.sinks} (default)", default, True),
            ("exact_pages=1, sinks=0, one token past a page", least, True),
            ("ring and sinks lost", default, False),
        ):
            error = attention_error(cfg, problem, exact=exact)
            yield AuditRow(
                "no exact window",
                f"{name}, {setting}",
                error.output,
                "relative output error",
                f"{error.output / base:.1f}x the default's error; softmax KL {error.kl:.4f}.",
                {"kl": error.kl},
            )


def _biases(options: Options) -> Iterator[AuditRow]:
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
            yield AuditRow("biased keys", setting, errors[i].kl, NATS, readings[i], detail)
    plain, page = (error.score for error in centered(bias=4.0, bias_in="fast"))
    yield AuditRow(
        "biased keys",
        "3-bit keys, mean 4x the rest in the fastest RoPE channels, key_centering=page",
        page,
        "logits of score error (rms)",
        f"RoPE turns this mean around within a page: centering takes only "
        f"{1 - page / plain:.0%} off the error ({plain:.3g} without).",
        {"uncentered": plain},
    )


def _rotation(options: Options) -> Iterator[AuditRow]:
    for spread in (0.5, 1.0):
        problem = _problem(options, spread=spread)
        turned, plain = (_keys(problem, 3, rotation=kind).kl for kind in ("hadamard", "none"))
        yield AuditRow(
            "no rotation",
            f"3-bit keys, channel scales spread by e^{spread:g}",
            plain,
            NATS,
            f"{plain / turned:.1f}x the KL with the Hadamard rotation ({turned:.4f}).",
            {"with_rotation": turned},
        )


def _prod(problem: Problem) -> Iterator[AuditRow]:
    for bits in (2, 3, 4):
        mse = _keys(problem, bits).kl
        prod = _keys(problem, bits, key_method="prod", key_scale="norm").kl
        yield AuditRow(
            "prod (QJL) keys",
            f"{bits}-bit keys",
            prod,
            NATS,
            f"{prod / mse:.1f}x the KL of mse at the same bits ({mse:.4f}): softmax punishes "
            "variance, not bias.",
            {"mse": mse},
        )


def _outlier_channels(problem: Problem) -> Iterator[AuditRow]:
    two, three = _keys(problem, 2).kl, _keys(problem, 3).kl
    split = _keys(problem, 2, outlier_share=0.5, outlier_side="keys").kl
    gain = (two - split) / (two - three)
    yield AuditRow(
        "outlier channels",
        "2.5-bit keys: half of the channels with 3 bits",
        split,
        NATS,
        f"{gain:.0%} of the way from 2 bits ({two:.4f}) to 3 bits ({three:.4f}) for half of the "
        "bits: the slowest RoPE channels are no outliers once the page's mean is out.",
        {"two_bits": two, "three_bits": three},
    )


def _scale_modes(problem: Problem) -> Iterator[AuditRow]:
    for side, unit in (("key", NATS), ("value", "relative output error")):
        other = "value" if side == "key" else "key"
        numbers = {}
        for mode in SCALE_MODES:
            cfg = {f"{side}_bits": 2, f"{other}_bits": 16, f"{side}_scale": mode}
            error = attention_error(KVQuantConfig.from_dict(cfg), problem, exact=True)
            numbers[mode] = error.kl if side == "key" else error.output
        best = min(numbers, key=lambda mode: numbers[mode])
        for mode, number in numbers.items():
            times = f"{number / numbers[best]:.2f}x that of {best}."
            reading = "The least of the four." if mode == best else times
            setting = f"2-bit {side}s, {side}_scale={mode}"
            yield AuditRow("scale modes", setting, number, unit, reading)


def _presets(problem: Problem) -> Iterator[AuditRow]:
    for name in PRESETS:
        error = attention_error(KVQuantConfig.preset(name), problem, exact=True)
        yield AuditRow(
            "presets",
            f"{name}, default window",
            error.output,
            "relative output error",
            f"Softmax KL {error.kl:.5f}, score error {error.score:.4f} logits.",
            {"kl": error.kl, "score_error": error.score},
        )
