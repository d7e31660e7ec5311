"""An attention problem stored in a real cache, and what attention over it gets wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tightkv.config import KVQuantConfig
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.pages.layout import PageLayout
from tightkv.tools.validate.inputs import Problem, filled
from tightkv.tools.validate.stats import softmax_kl


def fill(cfg: KVQuantConfig, problem: Problem, exact: bool = False) -> PagedKV:
    """A cache with the problem's tokens, read from pages alone unless `exact` keeps the rest."""
    _, heads, dim = problem.key.shape
    cache = filled(PageLayout(cfg, heads, dim, torch.float32), (problem.key, problem.value))
    if not exact:
        cache.table.drop_exact(0)
    return cache


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
