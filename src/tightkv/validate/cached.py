"""An attention problem stored in a real cache, and what attention over it gets wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightkv.cache import PagedKV
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.layout import PageLayout
from tightkv.sequences import SequenceTable
from tightkv.validate.inputs import Problem
from tightkv.validate.stats import softmax_kl


def fill(cfg: KVQuantConfig, problem: Problem) -> PagedKV:
    """A cache that holds the problem's tokens as one sequence."""
    tokens, heads, dim = problem.key.shape
    table = SequenceTable(cfg)
    cache = PagedKV(PageLayout(cfg, heads, dim, torch.float32), table)
    rows = table.add_rows([0])
    cache.append(table.append(rows, [tokens]), problem.key[None], problem.value[None])
    return cache


def stored(cfg: KVQuantConfig, problem: Problem, *, exact: bool = False) -> tuple[Tensor, Tensor]:
    """Keys and values [tokens, heads, dim] as attention sees them.

    Only from compressed pages unless `exact` lets it read the ring and the sinks too.
    """
    cache = fill(cfg, problem)
    if not exact:
        cache.table.drop_exact(0)
    key, value = cache.dequantize()
    return key[0], value[0]


@dataclass(frozen=True)
class AttentionError:
    """Means over heads and queries of attention over stored keys and values."""

    score: float  # root mean square error of a score, in logits
    kl: float  # of the softmax, in nats
    output: float  # norm of the output's error over the norm of the output


def attention_error(
    cfg: KVQuantConfig, problem: Problem, *, exact: bool = False
) -> AttentionError:
    """What storing `problem` by `cfg` does to its attention."""
    key, value = stored(cfg, problem, exact=exact)
    scores, stored_scores = problem.scores(problem.key), problem.scores(key)
    # A shift common to all keys of a query changes nothing: it is no error.
    delta = stored_scores - scores
    delta = delta - delta.mean(-1, keepdim=True)
    return AttentionError(
        score=float(delta.square().mean().sqrt()),
        kl=float(softmax_kl(scores, stored_scores).mean()),
        output=output_error(cfg, problem, exact=exact),
    )


def output_error(cfg: KVQuantConfig, problem: Problem, *, exact: bool = False) -> float:
    """Relative error of the output of the reference attention over the compressed cache."""
    cache = fill(cfg, problem)
    if not exact:
        cache.table.drop_exact(0)
    query = problem.query[None]
    out, _ = reference.attend(cache.codec, query, cache.view(), causal=False)
    weights = problem.scores(problem.key).softmax(-1)
    want = torch.einsum("hqt,thd->qhd", weights, problem.value)
    return float(((out[0] - want).norm(dim=-1) / want.norm(dim=-1)).mean())
