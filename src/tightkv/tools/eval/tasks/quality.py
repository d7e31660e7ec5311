"""Perplexity, KL and top-1 agreement of compressed caches, teacher-forced through the cache.

A window's first tokens are prefilled; the rest goes in chunks, each of which attends over the
compressed pages as decoding does. The uncompressed cache is fed the same tokens alongside, so
that only a few positions' logits are held at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.pages.layout import ring_tokens
from tightkv.tools.eval.forward import CacheRun, MakeCache
from tightkv.tools.eval.windows import Windows

_REFERENCE_BYTES = 128 << 20  # reference log-probabilities held at a time


@dataclass(frozen=True)
class Schedule:
    """How windows go through a cache."""

    prefill: int = 256
    """First tokens, which attend to one another exactly and are not scored."""
    chunk: int = 16
    """Tokens a forward pass after that."""
    batch: int = 8
    """Windows at a time, as rows of one cache."""

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

    def steps(self, tokens: int) -> int:
        """Forward passes after the prefill; the last token of a window is only a target."""
        return -(-(tokens - 1 - self.prefill) // self.chunk)


def check_compresses(cfg: KVQuantConfig, tokens: int) -> None:
    """Raise if so many tokens all stay exact, so that nothing would be measured."""
    exact = ring_tokens(cfg)
    if cfg.compresses and tokens - 1 <= exact:
        raise ValueError(
            f"{tokens} tokens are too few to measure {cfg.name}: it keeps the newest {exact} exact "
            f"(exact_pages={cfg.exact_pages} of {cfg.page_size}); take more than {exact + 1}"
        )


@dataclass(frozen=True)
class Summary:
    """Means over scored positions."""

    positions: int
    perplexity: float
    reference_perplexity: float
    kl: float
    """Mean KL(reference || compressed), nats per token."""
    kl_p99: float
    """99th percentile of the KL of a position."""
    kl_p999: float
    """99.9th percentile."""
    top1: float
    """Share of positions with the same likeliest token."""


@dataclass(frozen=True)
class Worst:
    """The position with the largest KL."""

    window: int
    position: int
    """Tokens of the window before the next token it predicts."""
    kl: float


@dataclass
class Scores:
    """Per scored position, [windows, positions]."""

    nll: Tensor
    reference_nll: Tensor
    kl: Tensor
    same_top: Tensor

    def summary(self, rows: Sequence[int] | None = None) -> Summary:
        """Over all windows, or over some."""
        pick = slice(None) if rows is None else list(rows)
        kl = self.kl[pick].double().flatten()
        return Summary(
            positions=kl.numel(),
            perplexity=self.nll[pick].double().mean().exp().item(),
            reference_perplexity=self.reference_nll[pick].double().mean().exp().item(),
            kl=kl.mean().item(),
            kl_p99=_percentile(kl, 0.99),
            kl_p999=_percentile(kl, 0.999),
            top1=self.same_top[pick].double().mean().item(),
        )

    def worst(self, prefill: int) -> Worst:
        """Scores begin with the token after the `prefill` first ones."""
        window, at = divmod(int(self.kl.argmax()), self.kl.shape[1])
        return Worst(window, prefill + at + 1, float(self.kl[window, at]))


@dataclass
class Quality:
    """One cache against the uncompressed one."""

    scores: Scores
    sources: tuple[str, ...]
    bytes_held: int
    """Of one window at its end: pages, ring, sinks and tables."""
    bytes_bf16: int
    """Of the same tokens at 16 bits."""
    seconds: float

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
    advance: Callable[[int], None] | None = None,
    reference: Tensor | None = None,
) -> dict[str, Quality]:
    """Each named cache on every window. `advance` is told of every forward pass.

    `reference`: the uncompressed cache's log-probabilities [windows, scored positions, V], where
    they are known already.
    """
    schedule = schedule or Schedule()
    schedule.check_window(windows.ids.shape[1])
    tracks = {name: _Track() for name in caches}
    for first in range(0, len(windows), schedule.batch):
        ids = windows.ids[first : first + schedule.batch]
        runs = {name: CacheRun(model, make()) for name, make in caches.items()}
        known = None if reference is None else reference[first : first + schedule.batch]
        _score_batch(model, ids, runs, tracks, schedule, advance or (lambda passes: None), known)
        for name, run in runs.items():
            tracks[name].weigh(run, len(ids))
    return {name: track.quality(windows.sources) for name, track in tracks.items()}


def quality_passes(windows: int, tokens: int, caches: int, schedule: Schedule) -> int:
    """How often `measure_quality` calls `advance(1)`."""
    batches = -(-windows // schedule.batch)
    return batches * caches * (1 + schedule.steps(tokens))


def _score_batch(
    model: Any,
    ids: Tensor,
    runs: Mapping[str, CacheRun],
    tracks: Mapping[str, _Track],
    schedule: Schedule,
    advance: Callable[[int], None],
    known: Tensor | None,
) -> None:
    """Feed one batch of windows [B, N] to the reference and to every run, block by block."""
    reference, end = CacheRun(model), ids.shape[1] - 1
    if known is None:
        reference.feed(ids[:, : schedule.prefill], last_only=True)
    for name, run in runs.items():
        with tracks[name].clock:
            run.feed(ids[:, : schedule.prefill], last_only=True)
        advance(1)
    block = _block_tokens(model, len(ids), schedule.chunk)
    for start in range(schedule.prefill, end, block):
        stop = min(end, start + block)
        if known is None:
            log_p = reference.feed(ids[:, start:stop]).float().log_softmax(-1)  # [B, T, V]
        else:
            log_p = known[:, start - schedule.prefill : stop - schedule.prefill]
        for name, run in runs.items():
            for at in range(start, stop, schedule.chunk):
                to = min(stop, at + schedule.chunk)
                with tracks[name].clock:
                    logits = run.feed(ids[:, at:to])
                targets = ids[:, at + 1 : to + 1].to(logits.device)
                tracks[name].add(compare(log_p[:, at - start : to - start], logits, targets))
                advance(1)


def _block_tokens(model: Any, rows: int, chunk: int) -> int:
    """Whole chunks whose reference log-probabilities fit the bound."""
    vocabulary = model.config.get_text_config().vocab_size
    return chunk * max(1, _REFERENCE_BYTES // (4 * rows * chunk * vocabulary))


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


class _Clock:
    """Adds up the seconds spent inside."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start


@dataclass
class _Track:
    """What has been measured of one cache so far."""

    clock: _Clock = field(default_factory=_Clock)
    batches: list[list[Scores]] = field(default_factory=lambda: [[]])
    held: int = 0
    bf16: int = 0
    rows: int = 0

    def add(self, scores: Scores) -> None:
        if not bool(scores.kl.isfinite().all()):
            raise ValueError("the compressed cache gave logits that are not finite")
        self.batches[-1].append(scores)

    def weigh(self, run: CacheRun, rows: int) -> None:
        """Note the sizes of a cache that has seen its windows."""
        size = cache_size(run.cache.layers)
        self.held += size.bytes
        self.bf16 += size.bf16_bytes
        self.rows += rows
        self.batches.append([])

    def quality(self, sources: tuple[str, ...]) -> Quality:
        whole = {
            name: torch.cat(
                [torch.cat([getattr(s, name) for s in batch], 1) for batch in self.batches if batch]
            )
            for name in ("nll", "reference_nll", "kl", "same_top")
        }
        return Quality(
            Scores(**whole),
            sources,
            self.held // self.rows,
            self.bf16 // self.rows,
            self.clock.seconds,
        )


def _percentile(values: Tensor, share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    rank = max(1, math.ceil(share * values.numel()))
    return values.kthvalue(rank).values.item()
