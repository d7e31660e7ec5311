"""Perplexity, KL and top-1 agreement of compressed caches, teacher-forced through the cache.

A window's first tokens are prefilled; the rest goes in chunks, each of which attends over the
compressed pages as decoding does. The uncompressed cache is fed the same tokens alongside, so
that only a few positions' logits are held at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.pages.layout import ring_tokens
from tightkv.tools.eval.forward import Advance, CacheRun, MakeCache, ignore
from tightkv.tools.eval.tasks.base import Data, Task
from tightkv.tools.eval.windows import Windows

LARGE_KL = 0.1
_REFERENCE_BYTES = 128 << 20  # reference log-probabilities held at a time


@dataclass(frozen=True)
class Schedule:
    """How windows go through a cache."""

    prefill: int = 256  # first tokens, which attend to one another exactly and are not scored
    chunk: int = 16  # tokens a forward pass after that
    batch: int = 8  # windows at a time, as rows of one cache

    def __post_init__(self) -> None:
        for name in ("prefill", "chunk", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")

    def check_window(self, tokens: int) -> None:
        """Raise if nothing of such a window would be scored."""
        if self.prefill > tokens - 2:
            raise ValueError(
                f"prefill={self.prefill} leaves nothing to score of a window of {tokens} tokens; "
                f"allowed: 1 to {tokens - 2}"
            )

    def passes(self, windows: int, tokens: int) -> int:
        """Forward passes of a cache; the last token of a window is only a target."""
        steps = -(-(tokens - 1 - self.prefill) // self.chunk)
        return -(-windows // self.batch) * (1 + steps)


def check_compresses(cfg: KVQuantConfig, tokens: int) -> None:
    """Raise if a ring holds so many tokens, so that no page would be measured."""
    newest = ring_tokens(cfg)
    if cfg.compresses and tokens - 1 <= newest:
        raise ValueError(
            f"{tokens} tokens are too few to measure {cfg.name}: its ring holds {newest} tokens "
            f"(exact_pages={cfg.exact_pages} of {cfg.page_size}); take more than {newest + 1}"
        )


@dataclass(frozen=True)
class Summary:
    """Means over scored positions."""

    positions: int
    perplexity: float
    reference_perplexity: float
    kl: float  # mean KL(reference || compressed), nats per token
    kl_stderr: float | None  # of that mean, over windows; None for one window
    kl_p99: float  # 99th percentile of the KL of a position
    kl_p999: float  # 99.9th percentile
    kl_above: float  # share of positions with a KL above LARGE_KL
    top1: float  # share of positions with the same likeliest token


class Scores(NamedTuple):
    """Per scored position, [windows, positions]."""

    nll: Tensor
    reference_nll: Tensor
    kl: Tensor
    same_top: Tensor

    @classmethod
    def join(cls, parts: Sequence[Scores], dim: int) -> Scores:
        return cls(*(torch.cat(columns, dim) for columns in zip(*parts, strict=True)))

    def summary(self, rows: Sequence[int] | None = None) -> Summary:
        """Over all windows, or over some."""
        pick = slice(None) if rows is None else list(rows)
        by_window = self.kl[pick].double()
        kl, means = by_window.flatten(), by_window.mean(1)
        count = len(means)
        return Summary(
            positions=kl.numel(),
            perplexity=self.nll[pick].double().mean().exp().item(),
            reference_perplexity=self.reference_nll[pick].double().mean().exp().item(),
            kl=kl.mean().item(),
            kl_stderr=means.std().item() / math.sqrt(count) if count > 1 else None,
            kl_p99=_percentile(kl, 0.99),
            kl_p999=_percentile(kl, 0.999),
            kl_above=(kl > LARGE_KL).double().mean().item(),
            top1=self.same_top[pick].double().mean().item(),
        )


@dataclass
class Quality:
    """One cache against the uncompressed one."""

    scores: Scores
    sources: tuple[str, ...]
    bytes_held: int  # of one window at its end: pages, ring, sinks and tables
    bytes_bf16: int  # of the same tokens at 16 bits

    @property
    def summary(self) -> Summary:
        return self.scores.summary()

    def by_text(self) -> dict[str, Summary]:
        names = dict.fromkeys(self.sources)
        rows = {name: [i for i, own in enumerate(self.sources) if own == name] for name in names}
        return {name: self.scores.summary(own) for name, own in rows.items()}


def measure_quality(
    model: Any,
    windows: Windows,
    caches: Mapping[str, MakeCache],
    schedule: Schedule | None = None,
    advance: Advance = ignore,
) -> dict[str, Quality]:
    """Each named cache on every window. `advance` is told of every forward pass."""
    schedule = schedule or Schedule()
    schedule.check_window(windows.ids.shape[1])
    return {name: measure(model, windows, caches[name], schedule, advance) for name in caches}


def measure(
    model: Any,
    windows: Windows,
    make: MakeCache,
    schedule: Schedule,
    advance: Advance,
    known: Tensor | None = None,
) -> Quality:
    """One cache.

    `known`: the uncompressed cache's log-probabilities [windows, scored positions, V], where they
    are known already.
    """
    batches, held, bf16 = list[Scores](), 0, 0
    prefill, end = schedule.prefill, windows.ids.shape[1] - 1
    for first in range(0, len(windows), schedule.batch):
        rows = slice(first, first + schedule.batch)
        ids, run, parts = windows.ids[rows], CacheRun(model, make()), list[Scores]()
        run.feed(ids[:, :prefill], last_only=True)
        advance(1)
        exact: Iterable[Tensor] = _exact_log_p(model, ids, schedule)
        if known is not None:
            exact = known[rows].split(schedule.chunk, 1)
        for at, log_p in zip(range(prefill, end, schedule.chunk), exact, strict=True):
            to = at + log_p.shape[1]
            logits = run.feed(ids[:, at:to])
            advance(1)
            parts.append(compare(log_p, logits, ids[:, at + 1 : to + 1].to(logits.device)))
            if not bool(parts[-1].kl.isfinite().all()):
                raise ValueError("the compressed cache gave logits that are not finite")
        batches.append(Scores.join(parts, 1))
        size = cache_size(run.cache.layers)
        held, bf16 = held + size.bytes, bf16 + size.bf16_bytes
    count = len(windows)
    return Quality(Scores.join(batches, 0), windows.sources, held // count, bf16 // count)


def _exact_log_p(model: Any, ids: Tensor, schedule: Schedule) -> Iterator[Tensor]:
    """The uncompressed cache's log-probabilities of each chunk, [B, T, V].

    As many whole chunks go in one pass as `_REFERENCE_BYTES` hold.
    """
    run, end = CacheRun(model), ids.shape[1] - 1
    run.feed(ids[:, : schedule.prefill], last_only=True)
    chunk_bytes = 4 * len(ids) * schedule.chunk * model.config.get_text_config().vocab_size
    block = schedule.chunk * max(1, _REFERENCE_BYTES // chunk_bytes)
    for start in range(schedule.prefill, end, block):
        log_p = run.feed(ids[:, start : min(end, start + block)]).float().log_softmax(-1)
        yield from log_p.split(schedule.chunk, 1)


def compare(log_p: Tensor, logits: Tensor, targets: Tensor) -> Scores:
    """Reference log-probabilities and logits [B, T, V], targets [B, T]."""
    log_q = logits.float().log_softmax(-1)
    p = log_p.exp()
    kl = torch.where(p == 0, 0.0, p * (log_p - log_q)).sum(-1)
    at = targets[..., None]
    return Scores(
        nll=-log_q.gather(-1, at).squeeze(-1).cpu(),
        reference_nll=-log_p.gather(-1, at).squeeze(-1).cpu(),
        kl=kl.cpu(),
        same_top=(log_q.argmax(-1) == log_p.argmax(-1)).cpu(),
    )


def _percentile(values: Tensor, share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    rank = max(1, math.ceil(share * values.numel()))
    return values.kthvalue(rank).values.item()


@dataclass(frozen=True)
class QualityTask(Task):
    """Perplexity, KL and top-1; the uncompressed cache runs alongside."""

    windows: Windows
    schedule: Schedule
    name = "quality"
    reference_steps = 0

    @property
    def inputs(self) -> Any:
        how = self.schedule.prefill, self.schedule.chunk
        return self.windows.ids.tolist(), self.windows.sources, how

    @property
    def steps(self) -> int:
        return self.schedule.passes(*self.windows.ids.shape)

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        if make is None:
            return {}
        found = measure(model, self.windows, make, self.schedule, advance)
        summary = found.summary
        return {
            **asdict(summary),
            "perplexity_increase": summary.perplexity / summary.reference_perplexity - 1,
            "by_text": [{"text": text, **asdict(own)} for text, own in found.by_text().items()],
            "bytes_held": found.bytes_held,
            "bytes_bf16": found.bytes_bf16,
            "ratio": found.bytes_bf16 / found.bytes_held,
        }
