"""Claim 5: compressed keys rank like exact ones, for queries that are no copies of keys.

The theory gives more than a threshold: the error of a score is noise of a known variance, so
recall and rank correlation must be what exact scores plus that noise give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.tools.validate.distortion import MODE_ERRORS, lloyd_max
from tightkv.tools.validate.inputs import Problem, attention_problem, fill, normal
from tightkv.tools.validate.report import Claim, Options
from tightkv.tools.validate.stats import Z, rank_correlation, recall


def check(options: Options) -> Iterator[Claim]:
    """Recall@1, recall@10 and Spearman's correlation of every preset's scores."""
    problem = attention_problem(
        options.stream("retrieval"), options.dim, queries=options.samples(256, 48)
    )
    exact = problem.scores(problem.key)
    noise = normal(options.stream("score noise"), 0, *exact.shape)
    predictions: dict[KVQuantConfig, dict[str, Tensor]] = {}  # presets often share their keys
    for name in PRESETS:
        cfg = KVQuantConfig.preset(name, seed=options.seed)
        keys_alone = cfg.replace(value_bits=16)
        if keys_alone not in predictions:
            # A tenth more noise than predicted: the theory leaves out float16 scales and means.
            predicted = exact + 1.1 * noise * predicted_noise(cfg, problem)
            predictions[keys_alone] = measures(exact, predicted)
        found = measures(exact, problem.scores(fill(cfg, problem).dequantize()[0][0]))
        yield from _preset_rows(name, exact.shape[-1], found, predictions[keys_alone])


def measures(exact: Tensor, approximate: Tensor) -> dict[str, Tensor]:
    """Each measure for every head and query, [heads, queries]."""
    return {
        "recall@1": recall(exact, approximate, 1),
        "recall@10": recall(exact, approximate, 10),
        "rank correlation": rank_correlation(exact, approximate),
    }


def predicted_noise(cfg: KVQuantConfig, problem: Problem) -> Tensor:
    """Standard deviation of each score's error by the theory, [heads, queries, tokens].

    The scale mode leaves an error of known size relative to |k - mean|, which the rotation
    spreads evenly over the dimensions (docs/math.md).
    """
    tokens, _, dim = problem.key.shape
    pages = problem.key.unflatten(0, (tokens // cfg.page_size, cfg.page_size))
    rest = (pages - pages.mean(1, keepdim=True)).flatten(0, 1)
    squared = torch.minimum(rest.square().sum(-1), problem.key.square().sum(-1))
    distortion = MODE_ERRORS[cfg.key_scale](lloyd_max(cfg.codebook, cfg.key_bits, dim))
    error = (distortion * squared).sqrt().T  # [heads, tokens]
    query = problem.query.norm(dim=-1).T  # [heads, queries]
    return query[:, :, None] * error[:, None, :] / dim


def _preset_rows(
    name: str, keys: int, found: dict[str, Tensor], predicted: dict[str, Tensor]
) -> Iterator[Claim]:
    for measure, got in found.items():
        want = predicted[measure]
        half_width = Z * math.sqrt(float(got.var() + want.var()) / got.numel())
        setting, mean = f"{name}, {keys} keys, {got.numel()} queries", float(want.mean())
        claim, bounds = f"{measure} as the predicted noise allows", (mean - half_width, None)
        row = Claim("5 retrieval", claim, setting, float(got.mean()), *bounds, half_width)
        yield replace(row, detail={"predicted": mean})
