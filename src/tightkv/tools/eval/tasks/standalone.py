"""The tasks whose measurements also stand alone: quality, needles and greedy match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tightkv.tools.eval import results
from tightkv.tools.eval.forward import Advance, CacheRun, MakeCache
from tightkv.tools.eval.tasks.base import Data, Task, digest
from tightkv.tools.eval.tasks.greedy import GreedyMatch, greedy_tokens, same_tokens
from tightkv.tools.eval.tasks.needles import Haystack, measure_needles
from tightkv.tools.eval.tasks.quality import Schedule, measure_quality, quality_passes
from tightkv.tools.eval.windows import Windows

_SHOWN_TOKENS = 48  # of the worst position's context


@dataclass(frozen=True)
class QualityTask(Task):
    """Perplexity, KL and top-1; the uncompressed cache runs alongside."""

    tokenizer: Any
    windows: Windows
    schedule: Schedule
    name = "quality"

    @property
    def settings(self) -> Data:
        return {
            "prefill": self.schedule.prefill,
            "chunk": self.schedule.chunk,
            "inputs": digest([self.windows.ids.tolist(), self.windows.sources]),
        }

    @property
    def steps(self) -> int:
        return quality_passes(len(self.windows), self.windows.ids.shape[1], 1, self.schedule)

    def measure(self, model: Any, make: MakeCache, reference: Data, advance: Advance) -> Data:
        caches = {"it": make}
        quality = measure_quality(model, self.windows, caches, self.schedule, advance)["it"]
        worst = quality.scores.worst(self.schedule.prefill)
        ids, at = self.windows.ids[worst.window], worst.position
        return {
            **results.quality_data(quality),
            "worst": {
                "kl": worst.kl,
                "text": self.windows.sources[worst.window],
                "window": worst.window,
                "position": at,
                "context": str(self.tokenizer.decode(ids[max(0, at - _SHOWN_TOKENS) : at])),
                "next": str(self.tokenizer.decode(ids[at : at + 1])),
            },
        }


@dataclass(frozen=True)
class NeedleTask(Task):
    """Needles found by the model's own generation."""

    tokenizer: Any
    haystacks: tuple[Haystack, ...]
    name = "needles"

    @property
    def settings(self) -> Data:
        inputs = [[list(p) for p in hay.prompts] for hay in self.haystacks]
        return {"inputs": digest(inputs)}

    @property
    def steps(self) -> int:
        return sum(len(haystack.prompts) for haystack in self.haystacks)

    @property
    def reference_steps(self) -> int:
        return self.steps

    def reference(self, model: Any, advance: Advance) -> Any:
        return self._found(model, None, advance)

    def measure(self, model: Any, make: MakeCache, reference: Any, advance: Advance) -> Any:
        return self._found(model, make, advance)

    def _found(self, model: Any, make: MakeCache | None, advance: Advance) -> list[Data]:
        done = measure_needles(model, self.tokenizer, self.haystacks, {"it": make}, advance)
        return results.needles_data(self.haystacks, done["it"])


@dataclass(frozen=True)
class GreedyTask(Task):
    """Tokens before greedy texts diverge."""

    prompts: Windows
    new_tokens: int
    name = "greedy"

    @property
    def settings(self) -> Data:
        return {"new_tokens": self.new_tokens, "inputs": digest(self.prompts.ids.tolist())}

    @property
    def steps(self) -> int:
        return self.new_tokens

    @property
    def reference_steps(self) -> int:
        return self.steps

    def reference(self, model: Any, advance: Advance) -> Data:
        tokens = greedy_tokens(CacheRun(model), self.prompts, self.new_tokens, advance)
        return {"tokens": tokens.tolist()}

    def measure(self, model: Any, make: MakeCache, reference: Data, advance: Advance) -> Data:
        got = greedy_tokens(CacheRun(model, make()), self.prompts, self.new_tokens, advance)
        lengths = same_tokens(torch.tensor(reference["tokens"], device="cpu"), got)
        return results.greedy_data(GreedyMatch(tuple(lengths), self.new_tokens))
