"""Needles: facts hidden in a long text, asked for one by one with the model's own generation."""

import json
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from tightkv.tools.eval.forward import TAIL_TOKENS, Advance, MakeCache, write_lines
from tightkv.tools.eval.tasks.base import Data, Task
from tightkv.tools.eval.text import ask, encode

ANSWER_TOKENS = 24

# Facts, questions in other words, whom they can be about, and what the answers can be.
_KINDS = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))["needles"]
MAX_NEEDLES = len(_KINDS)


@dataclass(frozen=True)
class Needle:
    """A fact, the question for it, and the word or number that answers it."""

    fact: str
    question: str
    answer: str


@dataclass(frozen=True)
class Haystack:
    """A text with needles in it, as one prompt a needle; the prompts begin alike."""

    context: int  # tokens asked for
    needles: tuple[Needle, ...]
    prompts: tuple[tuple[int, ...], ...]


def make_needles(count: int, seed: int, text: str) -> list[Needle]:
    """Different kinds of facts, whose answers the text does not have."""
    if not 1 <= count <= MAX_NEEDLES:
        raise ValueError(f"needles={count}; allowed: 1 to {MAX_NEEDLES}")
    rng = random.Random(seed)
    needles = []
    for kind in _KINDS[:count]:
        new = [answer for answer in kind["answers"] if not says(text, answer)]
        if not new:
            taken = ", ".join(kind["answers"])
            raise ValueError(f"the text already has every one of {taken}; give another --text")
        owner, answer = rng.choice(kind["owners"]), rng.choice(new)
        fact, question = kind["fact"].format(owner, answer), kind["question"].format(owner)
        needles.append(Needle(fact, question, answer))
    return needles


def build_haystack(tokenizer: Any, text: str, context: int, needles: Sequence[Needle]) -> Haystack:
    """Prompts of at most `context` tokens, the answer included, needles at even depths."""
    sentences = [s for s in re.split(r"(?<=[.!?:])\s+|\n+", text) if s]
    lengths = [len(encode(tokenizer, f" {sentence}")) for sentence in sentences]
    questions = [needle.question for needle in needles]
    frame = ask(tokenizer, "", questions)
    facts = sum(len(encode(tokenizer, f"{needle.fact}\n\n")) for needle in needles)
    budget = context - ANSWER_TOKENS - max(map(len, frame)) - facts
    count = bisect_right(list(accumulate(lengths)), budget)
    if count == len(sentences):
        raise ValueError(
            f"the text has {sum(lengths)} tokens, too few to fill a context of {context}; "
            "give a longer --text or smaller --contexts"
        )
    if budget < TAIL_TOKENS or count < len(needles):
        raise ValueError(f"a context of {context} tokens has no room for text; take 512 or more")
    while True:
        document = _document(sentences[:count], lengths[:count], needles)
        prompts = ask(tokenizer, document, questions)
        if max(map(len, prompts)) + ANSWER_TOKENS <= context:
            return Haystack(context, tuple(needles), tuple(map(tuple, prompts)))
        count -= 1


def says(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) is not None


def _document(sentences: Sequence[str], lengths: Sequence[int], needles: Sequence[Needle]) -> str:
    """Needle i of n stands at depth (i + 1/2) / n, as a paragraph of its own."""
    total, seen, parts, part = sum(lengths), 0, [], list[str]()
    waiting = list(needles)
    for sentence, length in zip(sentences, lengths, strict=True):
        depth = (len(needles) - len(waiting) + 0.5) / len(needles)
        if waiting and seen + length / 2 >= depth * total:
            parts += [" ".join(part), waiting.pop(0).fact]
            part = []
        part.append(sentence)
        seen += length
    parts += [" ".join(part), *(needle.fact for needle in waiting)]
    return "\n\n".join(filter(None, parts))


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
        return sum(map(len, self.inputs))

    def read(self, model: Any, make: MakeCache | None, advance: Advance) -> list[Data]:
        found = []
        for hay in self.haystacks:
            lines = write_lines(model, make, self.tokenizer, hay.prompts, ANSWER_TOKENS, advance)
            answers = list[Data]()
            for needle, line in zip(hay.needles, lines, strict=True):
                asked = {"question": needle.question, "expected": needle.answer}
                answers.append({**asked, "answer": line, "found": says(line, needle.answer)})
            row: Data = {"context": hay.context, "prompt_tokens": max(map(len, hay.prompts))}
            row["found"] = sum(answer["found"] for answer in answers)
            found.append({**row, "asked": len(answers), "answers": answers})
        return found
