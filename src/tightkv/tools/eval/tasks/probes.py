"""Probes: right answers to questions about a long context, scored by their likelihood.

The answer's tokens are given, not generated, so that every probe counts by how likely the model
finds it and not by one near-tie; the same probes go through the uncompressed cache.
"""

import json
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from tightkv.tools.eval.forward import Advance, MakeCache, after_prefix, shared_tokens
from tightkv.tools.eval.tasks.base import Data, Task, paired
from tightkv.tools.eval.tasks.needles import FACTS, Needle, build_haystack, says
from tightkv.tools.eval.text import ask, begin_reply, encode

# Names that share no word; each owns one code.
_OWNERS = FACTS["passkey owners"]
MAX_DEPTHS = len(_OWNERS)
_DIGITS = 5
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_LEAST_PAIRS = 2
_ROOM = 16  # tokens: a value, and keys that have more tokens than the first


@dataclass(frozen=True)
class Probe:
    """A question and its answer, as the tokens that follow the passage's prefix."""

    expected: str
    depth: float  # where the answer stands in the context: 0 is the beginning, 1 the end
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
                log_probs, top = run.score(ids, len(probe.answer))
                log_prob = float(log_probs.double().sum())
                scores.append({"log_prob": log_prob, "top": bool(top.all())})
                advance(1)
        return {"probes": scores}

    def compare(self, own: Data, exact: Data) -> Data:
        scores, reference = own["probes"], exact["probes"]
        probes = [(passage.context, p) for passage in self.passages for p in passage.probes]
        rows = []
        for (context, probe), score, exact in zip(probes, scores, reference, strict=True):
            row = {"context": context, "depth": probe.depth, "expected": probe.expected}
            row |= {"log_prob": score["log_prob"], "reference": exact["log_prob"]}
            rows.append({**row, "top": score["top"]})
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


# --- passkeys: secret codes at several depths of a long text ---
def make_passkeys(count: int, seed: int, text: str) -> list[Needle]:
    """Codes of five digits, which the text does not have."""
    if not 1 <= count <= MAX_DEPTHS:
        raise ValueError(f"depths={count}; allowed: 1 to {MAX_DEPTHS}")
    rng = random.Random(seed)
    needles: list[Needle] = []
    for owner in rng.sample(_OWNERS, count):
        code = _code(rng)
        while says(text, code) or any(code == needle.answer for needle in needles):
            code = _code(rng)
        fact = f"The secret code of {owner} is {code}."
        needles.append(Needle(fact, f"Which secret code belongs to {owner}?", code))
    return needles


def build_passkeys(tokenizer: Any, text: str, context: int, depths: int, seed: int) -> Passage:
    """At most `context` tokens, answers included; code i of n stands at depth (i + 1/2) / n."""
    needles = make_passkeys(depths, seed, text)
    owners = [needle.question.split()[-1].rstrip("?") for needle in needles]
    replies = [begin_reply(tokenizer, f"The code that belongs to {owner} is") for owner in owners]
    answers = [encode(tokenizer, f" {needle.answer}") for needle in needles]
    room = max(map(len, replies)) + max(map(len, answers))
    haystack = build_haystack(tokenizer, text, context, needles, room)
    prompts = [[*prompt, *reply] for prompt, reply in zip(haystack.prompts, replies, strict=True)]
    places = [(i + 0.5) / depths for i in range(depths)]
    expected = [needle.answer for needle in needles]
    return build_passage(context, prompts, answers, expected, places)


def _code(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(_DIGITS))


# --- recall: a JSON object with many random keys ---
def build_recall(tokenizer: Any, context: int, depths: int, seed: int) -> Passage:
    """As many pairs as `context` tokens hold; `depths` of them, evenly spread, are asked for."""
    pairs = _pairs(seed, context)

    def tokens(count: int) -> int:
        return len(_prompt(tokenizer, pairs[:count], pairs[0][0])) + _ROOM

    low = bisect_right(range(1, len(pairs) + 1), context, key=tokens)  # the most pairs that fit
    if low < max(_LEAST_PAIRS, depths):
        raise ValueError(
            f"a context of {context} tokens holds {low} pairs of keys and values; at least "
            f"{max(_LEAST_PAIRS, depths)} are needed: take longer --contexts or fewer --depths"
        )
    pairs = pairs[:low]
    asked = [pairs[(2 * i + 1) * low // (2 * depths)] for i in range(depths)]
    prompts = [_prompt(tokenizer, pairs, key) for key, _ in asked]
    answers = [encode(tokenizer, value) for _, value in asked]
    places = [pairs.index(pair) / low for pair in asked]
    return build_passage(context, prompts, answers, [value for _, value in asked], places)


def _prompt(tokenizer: Any, pairs: list[tuple[str, str]], key: str) -> list[int]:
    question = f'Which value belongs to the key "{key}"?'
    reply = begin_reply(tokenizer, f'The value of the key "{key}" is "')
    return ask(tokenizer, json.dumps(dict(pairs), indent=0), [question])[0] + reply


def _pairs(seed: int, context: int) -> list[tuple[str, str]]:
    """Different keys of six letters and values of six digits, more than the context can hold."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < context // 4 + 8:
        key = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))
        found[key] = f"{rng.randrange(10**6):06}"
    return list(found.items())
