"""Seeded inputs: unit vectors that are easy or hard for a rotation, and attention problems."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tightkv.math.random import random_bits, random_normal, random_signs

UNIT_KINDS = ("gaussian", "uneven", "one-hot", "sparse", "constant", "huge channels")
_SINK_SCORE = 8.0  # of the first key, where other scores have a standard deviation of 2


def normal(seed: int, stream: int, *shape: int) -> Tensor:
    """float32 standard normal samples."""
    return random_normal(seed, stream, shape).float()


def integers(seed: int, stream: int, n: int, below: int) -> Tensor:
    """int64 [n], each in [0, below)."""
    return random_bits(seed, stream, n).remainder(below)


def unit_vectors(kind: str, seed: int, count: int, dim: int) -> Tensor:
    """[count, dim] of unit length.

    uneven: a mean and a spread that grow 11-fold over the channels; sparse: 8 channels;
    huge channels: 3 of them 30 times the rest.
    """
    noise = normal(seed, 0, count, dim)
    if kind == "gaussian":
        x = noise
    elif kind == "uneven":
        x = (noise + 1) * torch.linspace(-1.2, 1.2, dim).exp()
    elif kind == "one-hot":
        x = _one_hot(integers(seed, 1, count, dim), dim)
    elif kind == "sparse":
        x = noise * (normal(seed, 1, count, dim).argsort(-1) < 8)
    elif kind == "constant":
        x = random_signs(seed, 1, count)[:, None].expand(count, dim)
    elif kind == "huge channels":
        x = noise + 30 * _one_hot(normal(seed, 1, count, dim).argsort(-1)[:, :3], dim).sum(1)
    else:
        raise ValueError(f"kind={kind!r}; supported: {', '.join(UNIT_KINDS)}")
    return x / x.norm(dim=-1, keepdim=True)


def _one_hot(index: Tensor, dim: int) -> Tensor:
    return torch.nn.functional.one_hot(index, dim).float()


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, dim] at positions [tokens], base 10000, split halves."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = (positions.double()[:, None] * speed)[:, None, :]  # [tokens, 1, half]
    cos, sin = angle.cos().float(), angle.sin().float()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass(frozen=True)
class Problem:
    """Keys and values of one sequence and queries that come after it; scores are q.k / sqrt(d)."""

    key: Tensor  # [tokens, heads, dim]
    value: Tensor  # [tokens, heads, dim]
    query: Tensor  # [queries, heads, dim]

    def scores(self, key: Tensor) -> Tensor:
        """[heads, queries, tokens] of any version of the keys."""
        return torch.einsum("qhd,thd->hqt", self.query, key) / math.sqrt(key.shape[-1])


def attention_problem(
    seed: int,
    dim: int,
    *,
    tokens: int = 1024,
    queries: int = 64,
    heads: int = 2,
    bias: float = 2.0,
    bias_in: str = "slow",
    gain: float = 1.5,
) -> Problem:
    """Keys as a transformer with rotary embedding makes them; no query is a copy of a key.

    Before RoPE a key is a mean of length bias * sqrt(dim) in a quarter of the channel pairs (the
    ones RoPE turns slowest, or fastest), plus its topic's centre in a 16-dimensional subspace,
    plus as much noise; topics last 32 tokens. A query is a topic's centre plus noise of its own,
    small where the mean is large, so that the mean does not decide the attention; half of the
    queries ask for the newest topic. The first token is a sink: every query scores it high.
    """
    topics, rank = tokens // 32, 16
    basis = normal(seed, 1, heads, rank, dim) / math.sqrt(rank)
    centres = torch.einsum("thr,hrd->thd", normal(seed, 2, topics, heads, rank), basis)
    biased = _biased_channels(dim, bias_in)  # [dim], 0 or 1
    mean = normal(seed, 3, heads, dim) * biased
    mean = mean * (bias * math.sqrt(dim) / mean.norm(dim=-1, keepdim=True))

    topic = torch.arange(tokens) // 32
    key = mean + 0.7 * centres[topic] + 0.7 * normal(seed, 4, tokens, heads, dim)
    wanted = integers(seed, 5, queries, topics)
    wanted[::2] = topics - 1
    query = gain * (0.7 * centres[wanted] + 0.7 * normal(seed, 6, queries, heads, dim))
    query = query * (1 - biased * bias / (1 + bias))
    key, query = rope(key, torch.arange(tokens)), rope(query, torch.full((queries,), tokens))

    shared = normal(seed, 7, heads, dim) * (1 - biased)
    shared = shared / shared.norm(dim=-1, keepdim=True)
    query = query + shared * dim**0.5
    key[0] = 0.3 * normal(seed, 8, heads, dim) + _SINK_SCORE * shared
    value = normal(seed, 9, tokens, heads, dim) + normal(seed, 10, heads, dim)
    return Problem(key, value, query)


def _biased_channels(dim: int, where: str) -> Tensor:
    half, count = dim // 2, dim // 8
    pair = torch.arange(dim) % half  # RoPE turns pair 0 fastest
    return (pair >= half - count if where == "slow" else pair < count).float()
