"""The tasks whose measurements also stand alone: quality, needles and greedy match."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from tightkv.tools.eval.forward import Advance, CacheRun, MakeCache
from tightkv.tools.eval.tasks.base import Data, Task
from tightkv.tools.eval.tasks.greedy import GreedyMatch, greedy_tokens, same_tokens
from tightkv.tools.eval.tasks.needles import Haystack, Retrieval, measure_needles
from tightkv.tools.eval.tasks.quality import Schedule, Worst, measure_quality, quality_passes
from tightkv.tools.eval.windows import Windows

_SHOWN_TOKENS = 48  # of the worst position's context


@dataclass(frozen=True)
class QualityTask(Task):
    """Perplexity, KL and top-1; the uncompressed cache runs alongside."""

    tokenizer: Any
    windows: Windows
    schedule: Schedule
    name = "quality"
    reference_steps = 0

    @property
    def options(self) -> Data:
        return {"prefill": self.schedule.prefill, "chunk": self.schedule.chunk}

    @property
    def inputs(self) -> Any:
        return self.windows.ids.tolist(), self.windows.sources

    @property
    def steps(self) -> int:
        return quality_passes(len(self.windows), self.windows.ids.shape[1], 1, self.schedule)

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        if make is None:
            return {}
        caches = {"it": make}
        found = measure_quality(model, self.windows, caches, self.schedule, advance)["it"]
        summary = found.summary
        return {
            **asdict(summary),
            "perplexity_increase": summary.perplexity / summary.reference_perplexity - 1,
            "by_text": [{"text": text, **asdict(own)} for text, own in found.by_text().items()],
            "bytes_held": found.bytes_held,
            "bytes_bf16": found.bytes_bf16,
            "ratio": found.bytes_bf16 / found.bytes_held,
            "seconds": found.seconds,
            "worst": self._worst(found.scores.worst(self.schedule.prefill)),
        }

    def _worst(self, worst: Worst) -> Data:
        ids, at = self.windows.ids[worst.window], worst.position
        return {
            **asdict(worst),
            "text": self.windows.sources[worst.window],
            "context": str(self.tokenizer.decode(ids[max(0, at - _SHOWN_TOKENS) : at])),
            "next": str(self.tokenizer.decode(ids[at : at + 1])),
        }


@dataclass(frozen=True)
class NeedleTask(Task):
    """Needles found by the model's own generation."""

    tokenizer: Any
    haystacks: tuple[Haystack, ...]
    name = "needles"

    @property
    def inputs(self) -> Any:
        return [hay.prompts for hay in self.haystacks]

    @property
    def steps(self) -> int:
        return sum(len(haystack.prompts) for haystack in self.haystacks)

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> list[Data]:
        done = measure_needles(model, self.tokenizer, self.haystacks, {"it": make}, advance)
        return list(map(_retrieved, self.haystacks, done["it"]))


def _retrieved(haystack: Haystack, got: Retrieval) -> Data:
    answers = zip(haystack.needles, got.answers, got.found, strict=True)
    return {
        "context": got.context,
        "prompt_tokens": got.prompt_tokens,
        "found": got.score,
        "asked": len(got.found),
        "answers": [
            {"question": of.question, "expected": of.answer, "answer": answer, "found": found}
            for of, answer, found in answers
        ],
    }


@dataclass(frozen=True)
class GreedyTask(Task):
    """Tokens before greedy texts diverge."""

    prompts: Windows
    new_tokens: int
    name = "greedy"

    @property
    def options(self) -> Data:
        return {"new_tokens": self.new_tokens}

    @property
    def inputs(self) -> Any:
        return self.prompts.ids.tolist()

    @property
    def steps(self) -> int:
        return self.new_tokens

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        run = CacheRun(model, None if make is None else make())
        tokens = greedy_tokens(run, self.prompts, self.new_tokens, advance)
        return {"tokens": tokens.tolist()}

    def compare(self, own: Data, exact: Data) -> Data:
        tokens = (torch.tensor(x["tokens"], device="cpu") for x in (exact, own))
        match = GreedyMatch(tuple(same_tokens(*tokens)), self.new_tokens)
        return {**asdict(match), "median": match.median, "min": match.min}
