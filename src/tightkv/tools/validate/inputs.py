"""Seeded inputs: unit vectors that are easy or hard for a rotation, and attention problems."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.kernels.registry import choose
from tightkv.math.random import random_bits, random_normal, random_signs
from tightkv.math.rotation import Rotation, make_rotation
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout

UNIT_KINDS = ("gaussian", "uneven", "one-hot", "sparse", "flat", "huge channels")
# Extra score of the first key and of the newest, where others have a standard deviation of 2.
_SINK_SCORE, _LOCAL_SCORE = 8.0, 6.0


def normal(seed: int, stream: int, *shape: int) -> Tensor:
    """float32 standard normal samples."""
    return random_normal(seed, stream, shape).float()


def integers(seed: int, stream: int, n: int, below: int) -> Tensor:
    """int64 [n], each in [0, below)."""
    return random_bits(seed, stream, n).remainder(below)


def filled(layout: PageLayout, key: Tensor, value: Tensor) -> PagedKV:
    """A cache whose one sequence holds these keys and values [tokens, heads, dim]."""
    table = SequenceTable(layout.cfg)
    # By name: that some of the configs that are measured here are slow is no news.
    kernels = choose("auto", key.device, layout).name
    cache, rows = PagedKV(layout, table, kernels=kernels), table.add_rows([0])
    cache.append(table.append(rows, [len(key)]), key[None], value[None])
    return cache


@lru_cache(maxsize=16)
def unit_vectors(kind: str, seed: int, count: int, dim: int) -> Tensor:
    """[count, dim] of unit length; cached, so read-only.

    uneven: a mean and a spread that double over the channels; sparse: 8 channels;
    flat: +-1 everywhere; huge channels: 3 of them 30 times the rest.
    """
    noise = normal(seed, 0, count, dim)
    if kind == "gaussian":
        x = noise
    elif kind == "uneven":
        x = (noise + 0.6) * torch.linspace(-0.4, 0.4, dim, dtype=torch.float32, device="cpu").exp()
    elif kind == "one-hot":
        x = _one_hot(integers(seed, 1, count, dim), dim)
    elif kind == "sparse":
        x = noise * (normal(seed, 1, count, dim).argsort(-1) < 8)
    elif kind == "flat":
        x = random_signs(seed, 1, count * dim).view(count, dim)
    elif kind == "huge channels":
        x = noise + 30 * _one_hot(normal(seed, 1, count, dim).argsort(-1)[:, :3], dim).sum(1)
    else:
        raise ValueError(f"kind={kind!r}; supported: {', '.join(UNIT_KINDS)}")
    return x / x.norm(dim=-1, keepdim=True)


def _one_hot(index: Tensor, dim: int) -> Tensor:
    return torch.nn.functional.one_hot(index, dim).float()


@dataclass(frozen=True, eq=False)
class ManyRotations(Rotation):
    """Rotation i on x[i] for x [rotations, ..., dim]: many independent draws, one quantizer."""

    parts: tuple[Rotation, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.stack([part(row) for part, row in zip(self.parts, x, strict=True)])

    def inverse(self, y: Tensor) -> Tensor:
        return torch.stack([part.inverse(row) for part, row in zip(self.parts, y, strict=True)])


def many_rotations(kind: str, dim: int, seed: int, count: int) -> ManyRotations:
    """`count` rotations of one kind with seeds of their own."""
    return ManyRotations(kind, dim, tuple(make_rotation(kind, dim, seed + i) for i in range(count)))


def rope(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, dim] at positions [tokens], base 10000, split halves."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
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
    heads: int = 4,
    bias: float = 2.0,
    bias_in: str = "slow",
    spread: float = 0.5,
    gain: float = 1.5,
) -> Problem:
    """Keys as a transformer with rotary embedding makes them; no query is a copy of a key.

    Before RoPE a key is a mean of length bias * sqrt(dim) in a quarter of the channel pairs (the
    ones RoPE turns slowest, or fastest), plus its topic's centre in a 16-dimensional subspace,
    plus as much noise; topics last 32 tokens. The scales of the channel pairs are log-normal with
    this `spread`. A query is a topic's centre plus noise of its own, small where the mean is
    large, so that the mean does not decide the attention. Every query scores the first token (a
    sink) and its nearest neighbours high.
    """
    topics, rank = tokens // 32, 16
    basis = normal(seed, 1, heads, rank, dim) / math.sqrt(rank)
    centres = torch.einsum("thr,hrd->thd", normal(seed, 2, topics, heads, rank), basis)
    biased, fast = _channels(dim, bias_in, 8), _channels(dim, "fast", 4)  # [dim], 0 or 1
    mean = bias * math.sqrt(dim) * _direction(seed, 3, heads, biased)
    scale = (spread * normal(seed, 4, heads, dim // 2)).exp().repeat(1, 2)
    scale = scale / scale.square().mean(-1, keepdim=True).sqrt()
    topic = (torch.arange(tokens, device="cpu") // 32).clamp(max=topics - 1)
    key = scale * 0.7 * (centres[topic] + normal(seed, 5, tokens, heads, dim)) + mean
    wanted = integers(seed, 6, queries, topics)
    query = gain * 0.7 * (centres[wanted] + normal(seed, 7, queries, heads, dim))
    query = query * (1 - biased * bias / (1 + bias))

    # What all queries share with all keys fades with their distance, as RoPE turns it.
    near = _direction(seed, 8, heads, fast)
    key, query = key + 0.5 * math.sqrt(dim) * near, query + 2 * _LOCAL_SCORE * near
    key, query = (
        rope(key, torch.arange(tokens, device="cpu")),
        rope(query, torch.full((queries,), tokens, device="cpu")),
    )
    shared = _direction(seed, 9, heads, 1 - biased)
    query = query + math.sqrt(dim) * shared
    key[0] = 0.3 * normal(seed, 10, heads, dim) + _SINK_SCORE * shared
    value = normal(seed, 11, tokens, heads, dim) + normal(seed, 12, heads, dim)
    return Problem(key, value, query)


def _channels(dim: int, which: str, part: int) -> Tensor:
    """1 in the dim / part channel pairs that RoPE turns fastest or slowest, else 0."""
    half, count = dim // 2, dim // part
    pair = torch.arange(dim, device="cpu") % half  # RoPE turns pair 0 fastest
    return (pair >= half - count if which == "slow" else pair < count).float()


def _direction(seed: int, stream: int, heads: int, channels: Tensor) -> Tensor:
    """A random unit vector for each head inside the channels marked 1, [heads, dim]."""
    x = normal(seed, stream, heads, channels.numel()) * channels
    return x / x.norm(dim=-1, keepdim=True)


def fill(cfg: KVQuantConfig, problem: Problem, exact: bool = False) -> PagedKV:
    """A cache with the problem's tokens, read from pages alone unless `exact` keeps the rest."""
    _, heads, dim = problem.key.shape
    cache = filled(PageLayout(cfg, heads, dim, torch.float32), problem.key, problem.value)
    if not exact:
        cache.table.drop_exact(0)
    return cache
