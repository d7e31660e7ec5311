"""GSM8K from a local file: word problems answered through the cache, graded by the final number."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import fmean
from typing import Any

from tightkv.tools.eval.forward import Advance, CacheRun, MakeCache
from tightkv.tools.eval.prompts import beginning, encode
from tightkv.tools.eval.tasks.base import Data, Task, paired
from tightkv.tools.eval.text import read_examples

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_STOP = "\n\n"


@dataclass(frozen=True)
class MathTask(Task):
    """Greedy answers to prompts of solved problems and one more."""

    tokenizer: Any
    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[str, ...]
    answer_tokens: int
    batch: int
    name = "gsm8k"
    options = ("answer_tokens",)

    @property
    def inputs(self) -> Any:
        return self.prompts, self.answers

    @property
    def steps(self) -> int:
        return len(self.prompts)

    def compare(self, own: Data, exact: Data) -> Data:
        both = own["replies"], exact["replies"]
        right = [[float(reply["correct"]) for reply in replies] for replies in both]
        same = [a["got"] == b["got"] for a, b in zip(*both, strict=True)]
        return {"accuracy": paired(*right), "same": fmean(same), **own}

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> Data:
        # Prompts of one length need the least padding.
        order = sorted(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        found: dict[int, Data] = {}
        for first in range(0, len(order), self.batch):
            rows = order[first : first + self.batch]
            prompts = [self.prompts[i] for i in rows]
            run = CacheRun(model, None if make is None else make())
            texts = run.write(self.tokenizer, prompts, self.answer_tokens, lambda x: _STOP in x)
            for i, text in zip(rows, texts, strict=True):
                text = text.split(_STOP)[0]
                got = final_number(text)
                right = got is not None and Decimal(got) == Decimal(self.answers[i])
                row = {"expected": self.answers[i], "got": got, "correct": right}
                found[i] = {**row, "reply": text}
            advance(len(rows))
        return {"replies": [found[i] for i in range(len(order))]}


def build_gsm8k(
    tokenizer: Any, path: str | Path, shots: int, limit: int, answer_tokens: int, batch: int
) -> MathTask:
    """The first `shots` problems are shown with their solutions; at most `limit` are asked."""
    rows = read_examples(path, ["question", "answer"])
    answers = []
    for number, row in enumerate(rows, 1):
        found = final_number(row["answer"]) if "####" in row["answer"] else None
        if found is None:
            raise ValueError(
                f"file {str(path)!r}: answer {number} must end in '#### NUMBER', "
                f"but is {row['answer'][-40:]!r}"
            )
        answers.append(found)
    if len(rows) <= shots:
        raise ValueError(
            f"file {str(path)!r} has {len(rows)} problems; --shots {shots} leaves none to ask"
        )
    shown = "".join(
        f"Question: {r['question']}\nAnswer: {r['answer']}{_STOP}" for r in rows[:shots]
    )
    asked = rows[shots : shots + limit]
    prompts = [
        beginning(tokenizer) + encode(tokenizer, f"{shown}Question: {row['question']}\nAnswer:")
        for row in asked
    ]
    own = answers[shots : shots + limit]
    return MathTask(tokenizer, tuple(map(tuple, prompts)), tuple(own), answer_tokens, batch)


def final_number(text: str) -> str | None:
    """The number after the first '####', else the last one of the text, without commas."""
    _, mark, rest = text.partition("####")
    numbers = _NUMBER.findall(rest if mark else text)
    return None if not numbers else (numbers[0] if mark else numbers[-1]).replace(",", "")
