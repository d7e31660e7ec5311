"""The statistics a validation needs: intervals, Kolmogorov-Smirnov, ranks, divergence."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# A run makes about twenty random tests. At this level each, a correct build fails one of them
# by chance in about one run out of a hundred.
LEVEL = 0.01 / 20
Z = 3.4808  # P(|N(0, 1)| > Z) = LEVEL


def ks_test(samples: Tensor, cdf: Callable[[Tensor], Tensor]) -> tuple[float, float]:
    """Kolmogorov-Smirnov statistic of independent samples [n] under `cdf`, and its p-value."""
    x = samples.double().sort().values
    n = x.numel()
    steps = torch.arange(n + 1, dtype=torch.float64, device=x.device) / n
    at = cdf(x)
    distance = float(torch.maximum(steps[1:] - at, at - steps[:-1]).max())
    return distance, kolmogorov_tail(distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)))


def kolmogorov_tail(t: float) -> float:
    """P(K > t) for the limit law of sqrt(n) times the statistic."""
    if t < 0.2:  # the series below converges slowly there, and the tail is 1 - 1e-12
        return 1.0
    terms = ((-1) ** (k - 1) * math.exp(-2 * k * k * t * t) for k in range(1, 101))
    return min(1.0, max(0.0, 2 * math.fsum(terms)))


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's correlation of the rows of a and b, [..., n] -> [...]. Ties are not averaged."""
    ranks = [x.argsort(-1).argsort(-1).double() for x in (a, b)]
    centered = [r - r.mean(-1, keepdim=True) for r in ranks]
    norms = [c.square().sum(-1).sqrt() for c in centered]
    return (centered[0] * centered[1]).sum(-1) / (norms[0] * norms[1])


def recall(exact: Tensor, approximate: Tensor, k: int) -> Tensor:
    """Share of the k largest of `exact` among the k largest of `approximate`, [..., n] -> [...]."""
    top, found = exact.topk(k, -1).indices, approximate.topk(k, -1).indices
    hits = (top.unsqueeze(-1) == found.unsqueeze(-2)).any(-1)  # [..., k]
    return hits.double().mean(-1)


def softmax_kl(exact: Tensor, approximate: Tensor) -> Tensor:
    """KL(softmax(exact) || softmax(approximate)) in nats, [..., n] -> [...]."""
    log_p, log_q = (x.double().log_softmax(-1) for x in (exact, approximate))
    return (log_p.exp() * (log_p - log_q)).sum(-1)
