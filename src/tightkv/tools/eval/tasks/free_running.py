"""Free-running quality: the model writes through the compressed cache, the exact model grades it.

An error in one token changes everything that is written after it, which teacher-forced scores
cannot see. Both caches draw with the same random numbers (Gumbel noise by prompt and position),
so that they write the same text for as long as they agree, and the difference has little noise.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, median
from typing import Any, ClassVar

import torch
from torch import Tensor

from tightkv.tools.eval.forward import Advance, CacheRun, Choose, MakeCache, likeliest
from tightkv.tools.eval.tasks.base import Data, Task, digest, paired
from tightkv.tools.eval.windows import Windows

_GRADED_TOKENS = 32  # graded in one pass


@dataclass(frozen=True)
class FreeTask(Task):
    """Answers of `new_tokens` tokens to every prompt; temperature 0 is greedy."""

    prompts: Windows
    new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    batch: int = 8
    name = "free"
    options: ClassVar[tuple[str, ...]] = ("new_tokens", "temperature", "seed")

    @property
    def inputs(self) -> Any:
        return self.prompts.ids.tolist()

    @property
    def steps(self) -> int:
        return self.new_tokens * -(-len(self.prompts) // self.batch)

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        tokens, own = self._write(model, make, advance)
        return {"tokens": tokens.tolist(), "log_probs": self._grade(model, tokens), "own": own}

    def compare(self, own: Data, exact: Data) -> Data:
        lengths = same_tokens(exact["tokens"], own["tokens"])
        scores = own["log_probs"], exact["log_probs"], own["own"]
        names = "log_prob", "reference", "own"
        return {
            "log_prob": paired(own["log_probs"], exact["log_probs"]),
            "kl": fmean(map(operator.sub, own["own"], own["log_probs"])),
            "lengths": lengths,
            "median": float(median(lengths)),
            "cap": self.new_tokens,
            "prompts": [dict(zip(names, row, strict=True)) for row in zip(*scores, strict=True)],
        }

    def _write(
        self, model: Any, make: MakeCache | None, advance: Advance
    ) -> tuple[Tensor, list[float]]:
        """Tokens [prompts, new_tokens], and the mean log-probability the writer gave them."""
        found, own = [], []
        for first in range(0, len(self.prompts), self.batch):
            ids = self.prompts.ids[first : first + self.batch]
            run = CacheRun(model, None if make is None else make())
            tokens, log_probs = run.decode(ids, self.new_tokens, self._choose(first), advance)
            found.append(tokens)
            own += log_probs.double().mean(1).tolist()
        return torch.cat(found), own

    def _grade(self, model: Any, tokens: Tensor) -> list[float]:
        """Mean log-probability per token of each answer under the exact cache."""
        grades = []
        for first in range(0, len(self.prompts), self.batch):
            rows = slice(first, first + self.batch)
            run = CacheRun(model)
            run.feed(self.prompts.ids[rows, :-1], last_only=True)
            ids = torch.cat([self.prompts.ids[rows, -1:], tokens[rows]], 1)
            grades += run.score(ids, _GRADED_TOKENS).double().mean(1).tolist()
        return grades

    def _choose(self, first: int) -> Choose:
        """Rows are prompts from `first` on."""
        if not self.temperature:
            return likeliest

        def choose(logits: Tensor, step: int) -> Tensor:
            rows = range(first, first + len(logits))
            noise = _gumbel(self.seed, rows, step, logits.shape[1]).to(logits.device)
            return (logits.float() / self.temperature + noise).argmax(-1)

        return choose


def _gumbel(seed: int, rows: Sequence[int], step: int, vocabulary: int) -> Tensor:
    """[rows, vocabulary]: a draw is the argmax of log-probabilities plus this."""
    noise = torch.empty(len(rows), vocabulary, dtype=torch.float32, device="cpu")
    for row, own in zip(rows, noise, strict=True):
        number = int(digest([seed, row, step]), 16) >> 1
        own.exponential_(generator=torch.Generator("cpu").manual_seed(number))
    return noise.log_().neg_()


def same_tokens(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> list[int]:
    """How many leading tokens of each pair of texts are equal."""
    pairs = zip(first, second, strict=True)
    return [len(list(takewhile(bool, map(operator.eq, a, b)))) for a, b in pairs]
