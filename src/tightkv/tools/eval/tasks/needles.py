"""Needles: facts hidden in a long text, asked for one by one with the model's own generation."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightkv.tools.eval.forward import (
    TAIL_TOKENS,
    Advance,
    CacheRun,
    MakeCache,
    after_prefix,
    ignore,
)
from tightkv.tools.eval.prompts import ask, common_prefix
from tightkv.tools.eval.windows import encode

ANSWER_TOKENS = 24

# A fact, a question in other words, whom it can be about, and what the answer can be.
_KINDS = (
    (
        "The magic number for {} is {}.",
        "What is the magic number that belongs to {}?",
        ("Lisbon", "Oslo", "Cairo", "Kyoto"),
        ("4821", "7350", "1964", "5207", "8613", "2931", "9376", "6048"),
    ),
    (
        "The lucky colour of {} is {}.",
        "What is the lucky colour that {} has?",
        ("Maria", "Victor", "Helen", "Oscar"),
        ("orange", "purple", "yellow", "pink", "turquoise", "green"),
    ),
    (
        "The best friend of {} is a {}.",
        "What kind of animal is the best friend that {} has?",
        ("the pirate", "the farmer", "the sailor", "the painter"),
        ("tortoise", "donkey", "parrot", "goat", "hamster", "camel"),
    ),
    (
        "The favourite fruit of {} is the {}.",
        "Which fruit does {} like most?",
        ("Doctor Olsen", "Doctor Rossi", "Doctor Novak", "Doctor Tanaka"),
        ("mango", "lemon", "cherry", "banana", "peach", "pineapple"),
    ),
    (
        "The train platform for {} is {}.",
        "What is the train platform where I leave for {}?",
        ("Vienna", "Madrid", "Dublin", "Athens"),
        ("17", "23", "31", "46", "58", "74"),
    ),
)
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
    shared: int  # tokens that all prompts begin with, less the tail


@dataclass(frozen=True)
class Retrieval:
    """What a model answered at one context."""

    context: int
    prompt_tokens: int
    answers: tuple[str, ...]
    found: tuple[bool, ...]

    @property
    def score(self) -> int:
        return sum(self.found)


def make_needles(count: int, seed: int, text: str) -> list[Needle]:
    """Different kinds of facts, whose answers the text does not have."""
    if not 1 <= count <= MAX_NEEDLES:
        raise ValueError(f"needles={count}; allowed: 1 to {MAX_NEEDLES}")
    rng = random.Random(seed)
    needles = []
    for fact, question, owners, answers in _KINDS[:count]:
        new = [answer for answer in answers if not says(text, answer)]
        if not new:
            raise ValueError(
                f"the text already has every one of {', '.join(answers)}; give another --text"
            )
        owner, answer = rng.choice(owners), rng.choice(new)
        needles.append(Needle(fact.format(owner, answer), question.format(owner), answer))
    return needles


def build_haystack(
    tokenizer: Any,
    text: str,
    context: int,
    needles: Sequence[Needle],
    answer_tokens: int = ANSWER_TOKENS,
) -> Haystack:
    """Prompts of at most `context` tokens, the answer included, needles at even depths."""
    sentences = [s for s in re.split(r"(?<=[.!?:])\s+|\n+", text) if s]
    lengths = [len(encode(tokenizer, f" {sentence}")) for sentence in sentences]
    questions = [needle.question for needle in needles]
    frame = ask(tokenizer, "", questions)
    facts = sum(len(encode(tokenizer, f"{needle.fact}\n\n")) for needle in needles)
    budget = context - answer_tokens - max(map(len, frame)) - facts
    count, used = 0, 0
    while count < len(sentences) and used + lengths[count] <= budget:
        used += lengths[count]
        count += 1
    if count == len(sentences):
        raise ValueError(
            f"the text has {used} tokens, too few to fill a context of {context}; "
            "give a longer --text or smaller --contexts"
        )
    if budget < TAIL_TOKENS or count < len(needles):
        raise ValueError(f"a context of {context} tokens has no room for text; take 512 or more")
    while True:
        document = _document(sentences[:count], lengths[:count], needles)
        prompts = ask(tokenizer, document, questions)
        if max(map(len, prompts)) + answer_tokens <= context:
            break
        count -= 1
    shared = common_prefix(prompts) - TAIL_TOKENS
    return Haystack(context, tuple(needles), tuple(map(tuple, prompts)), shared)


def measure_needles(
    model: Any,
    tokenizer: Any,
    haystacks: Sequence[Haystack],
    caches: Mapping[str, MakeCache | None],
    advance: Advance | None = None,
) -> dict[str, list[Retrieval]]:
    """Every haystack with every cache; None makes the uncompressed one."""
    out: dict[str, list[Retrieval]] = {name: [] for name in caches}
    for haystack in haystacks:
        for name, make in caches.items():
            answers = _ask_all(model, tokenizer, haystack, make, advance or ignore)
            pairs = zip(answers, haystack.needles, strict=True)
            found = [says(answer, needle.answer) for answer, needle in pairs]
            longest = max(map(len, haystack.prompts))
            out[name].append(Retrieval(haystack.context, longest, tuple(answers), tuple(found)))
    return out


def _ask_all(
    model: Any, tokenizer: Any, haystack: Haystack, make: MakeCache | None, advance: Advance
) -> list[str]:
    """The text goes into the cache once; each question is taken out again after its answer."""
    prefix, answers = haystack.prompts[0][: haystack.shared], []
    runs = after_prefix(model, make, prefix, len(haystack.prompts))
    for prompt, run in zip(haystack.prompts, runs, strict=True):
        answers.append(_answer(run, tokenizer, prompt[haystack.shared :]))
        advance(1)
    return answers


def _answer(run: CacheRun, tokenizer: Any, question: Sequence[int]) -> str:
    return run.write_line(tokenizer, question, ANSWER_TOKENS)


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
