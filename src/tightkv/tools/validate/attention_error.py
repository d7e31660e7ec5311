"""An attention problem stored in a real cache, and what attention over it gets wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.kernels.registry import choose
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout
from tightkv.tools.validate.inputs import Problem
from tightkv.tools.validate.stats import softmax_kl


def fill(cfg: KVQuantConfig, problem: Problem) -> PagedKV:
    """A cache that holds the problem's tokens as one sequence."""
    tokens, heads, dim = problem.key.shape
    table = SequenceTable(cfg)
    layout = PageLayout(cfg, heads, dim, torch.float32)
    # By name: that some of the configs that are measured here are slow is no news.
    kernels = choose("auto", problem.key.device, layout).name
    cache = PagedKV(layout, table, kernels=kernels)
    rows = table.add_rows([0])
    cache.append(table.append(rows, [tokens]), problem.key[None], problem.value[None])
    return cache


def stored_keys(cfg: KVQuantConfig, problem: Problem) -> Tensor:
    """Keys [tokens, heads, dim] as attention reads them from compressed pages alone."""
    cache = fill(cfg, problem)
    cache.table.drop_exact(0)
    return cache.dequantize()[0][0]


@dataclass(frozen=True)
class AttentionError:
    """Means over heads and queries of attention over stored keys and values."""

    score: float  # root mean square error of a score, in logits
    kl: float  # of the softmax, in nats
    output: float  # norm of the output's error over the norm of the output


def attention_error(cfg: KVQuantConfig, problem: Problem, *, exact: bool = False) -> AttentionError:
    """What storing `problem` by `cfg` does to its attention.

    Everything is read from compressed pages unless `exact` keeps the ring and the sinks.
    """
    cache = fill(cfg, problem)
    if not exact:
        cache.table.drop_exact(0)
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
