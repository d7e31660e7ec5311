"""Key-value recall: a JSON object with many random keys, and the likelihood of single values."""

from __future__ import annotations

import json
import random
from typing import Any

from tightkv.tools.eval.prompts import ask, begin_reply
from tightkv.tools.eval.tasks.probes import Passage, build_passage
from tightkv.tools.eval.windows import encode

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_LEAST_PAIRS = 2
_ROOM = 16  # tokens: a value, and keys that have more tokens than the first


def build_recall(tokenizer: Any, context: int, depths: int, seed: int) -> Passage:
    """As many pairs as `context` tokens hold; `depths` of them, evenly spread, are asked for."""
    if depths < 1:
        raise ValueError(f"depths={depths}; it must be at least 1")
    pairs = _pairs(seed, context)
    low, high = 0, len(pairs)  # the most pairs that fit, by halves
    while low < high:
        count = (low + high + 1) // 2
        fits = len(_prompt(tokenizer, pairs[:count], pairs[0][0])) + _ROOM <= context
        low, high = (count, high) if fits else (low, count - 1)
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
