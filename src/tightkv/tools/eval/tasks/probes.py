"""Probes: right answers to questions about a long context, scored by their likelihood.

The answer's tokens are given, not generated, so that every probe counts by how likely the model
finds it and not by one near-tie; the same probes go through the uncompressed cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from tightkv.tools.eval.forward import Advance, MakeCache, after_prefix, shared_tokens
from tightkv.tools.eval.tasks.base import Data, Task, paired


@dataclass(frozen=True)
class Probe:
    """A question and its answer, as the tokens that follow the passage's prefix."""

    expected: str
    depth: float
    """Where the answer stands in the context: 0 is the beginning, 1 the end."""
    question: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Passage:
    """Tokens that go into the cache once, and probes that follow them one at a time."""

    context: int
    prefix: tuple[int, ...]
    probes: tuple[Probe, ...]


def build_passage(
    context: int,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    expected: Sequence[str],
    depths: Sequence[float],
) -> Passage:
    """The last 64 tokens that prompts share are read with each question, over the cache."""
    shared = shared_tokens(prompts)
    probes = [
        Probe(word, depth, tuple(prompt[shared:]), tuple(answer))
        for word, depth, prompt, answer in zip(expected, depths, prompts, answers, strict=True)
    ]
    return Passage(context, tuple(prompts[0][:shared]), tuple(probes))


@dataclass(frozen=True)
class ProbeTask(Task):
    """Log-probabilities of the right answers, in nats per answer."""

    name: str
    passages: tuple[Passage, ...]
    chunk: int | None = None
    """Tokens of question and answer a pass; None takes them in one."""
    options = ("chunk",)

    @property
    def inputs(self) -> Any:
        return [
            [passage.prefix, [[p.question, p.answer] for p in passage.probes]]
            for passage in self.passages
        ]

    @property
    def steps(self) -> int:
        return sum(len(passage.probes) for passage in self.passages)

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        scores = []
        for passage in self.passages:
            runs = after_prefix(model, make, passage.prefix, len(passage.probes))
            for probe, run in zip(passage.probes, runs, strict=True):
                ids = torch.tensor([probe.question + probe.answer], device="cpu")
                got = run.score(ids, len(probe.answer), self.chunk)
                log_prob = float(got.log_probs.double().sum())
                scores.append({"log_prob": log_prob, "top": bool(got.top.all())})
                advance(1)
        return {"probes": scores}

    def compare(self, own: Data, exact: Data) -> Data:
        scores, reference = own["probes"], exact["probes"]
        probes = [(passage.context, p) for passage in self.passages for p in passage.probes]
        rows = [
            {
                "context": context,
                "depth": probe.depth,
                "expected": probe.expected,
                "log_prob": score["log_prob"],
                "reference": exact["log_prob"],
                "top": score["top"],
            }
            for (context, probe), score, exact in zip(probes, scores, reference, strict=True)
        ]
        return {
            "log_prob": _paired(rows),
            "top": fmean(score["top"] for score in scores),
            "reference_top": fmean(exact["top"] for exact in reference),
            "by_context": [
                {"context": c, **_paired([row for row in rows if row["context"] == c])}
                for c in dict.fromkeys(row["context"] for row in rows)
            ],
            "probes": rows,
        }


def _paired(rows: Sequence[Data]) -> Data:
    return paired([row["log_prob"] for row in rows], [row["reference"] for row in rows])
