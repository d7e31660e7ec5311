"""Passkeys: secret codes at several depths of a long text, scored by their likelihood."""

from __future__ import annotations

import random
from typing import Any

from tightkv.tools.eval.prompts import begin_reply
from tightkv.tools.eval.tasks.needles import FACTS, Needle, build_haystack, says
from tightkv.tools.eval.tasks.probes import Passage, build_passage
from tightkv.tools.eval.windows import encode

# Names that share no word; each owns one code.
_OWNERS = FACTS["passkey owners"]
MAX_DEPTHS = len(_OWNERS)
_DIGITS = 5


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
