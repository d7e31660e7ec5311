"""A fact hidden in a long prompt, which every cache is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tightkv.tools.eval.tasks.needles import Needle, make_needles, says

NEEDLE_TOKENS = 24  # of an answer
DEPTH = 0.5


@dataclass(frozen=True)
class AskedNeedle:
    """A needle, and the prompt that ends with its question, encoded; None: the only prompt."""

    needle: Needle
    inputs: Any = None

    def as_json(self, answers: Sequence[str]) -> dict[str, Any]:
        """With what each cache answered."""
        return {
            "fact": self.needle.fact,
            "question": self.needle.question,
            "expected": self.needle.answer,
            "depth": DEPTH,
            "answers": [
                {"text": text, "found": says(text, self.needle.answer)} for text in answers
            ],
        }


def choose_needle(text: str) -> Needle:
    """The same one at every run; its answer is not in the text.

    A small model goes on after its answer, where words are nearly equally likely, unless told not.
    """
    needle = make_needles(1, 0, text)[0]
    return replace(needle, question=f"{needle.question} Answer in one sentence.")


def hide(text: str, fact: str) -> str:
    """The text with the fact as a paragraph of its own, after the first that ends past DEPTH."""
    at = text.find("\n\n", int(DEPTH * len(text)))
    at = len(text) if at < 0 else at
    return f"{text[:at]}\n\n{fact}{text[at:]}"
