"""Loads: how many sequences of which lengths, all equal or ragged."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

_LENGTH = r"(\d+|\d+(?:\.\d+)?k)"
_TEXT = re.compile(rf"(\d+)x{_LENGTH}(?:-{_LENGTH})?")


def draw_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """Uniformly random lengths with both bounds, the same in every run, in any phase of a page.

    They are drawn in pairs about the middle, so that all together hold as many tokens as equal
    sequences of the middle's length: a ratio to those is not one of tokens.
    """
    choose = random.Random(0)
    half = [choose.randint(shortest, longest) for _ in range(count // 2)]
    found = [*half, *(shortest + longest - length for length in half)]
    found += [(shortest + longest) // 2] * (count % 2)
    choose.shuffle(found)
    return found


@dataclass(frozen=True)
class Load:
    """`batch` sequences of `shortest` to `longest` tokens."""

    batch: int
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        least = min(self.batch, self.shortest)
        if least < 1:
            raise ValueError(f"size {self.text}: {least}; it must be at least 1")
        if self.longest < self.shortest:
            raise ValueError(f"size {self.text}; the longest must not be below the shortest")

    @classmethod
    def equal(cls, batch: int, tokens: int) -> Load:
        return cls(batch, tokens, tokens)

    @classmethod
    def parse(cls, text: str) -> Load:
        """As in 32x8k, of equal lengths, and 32x6k-10k, of lengths drawn from there; k is 1024."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"--size {text!r}; give BATCHxCONTEXT, as in 32x8192 or 32x8k, or "
                "BATCHxSHORTEST-LONGEST, as in 32x6k-10k"
            )
        batch, shortest, longest = match.groups()
        return cls(int(batch), _tokens(shortest), _tokens(longest or shortest))

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> Load:
        """That of a row with a "batch" and a "context" (or "tokens"), and "ragged" bounds."""
        middle = row["context"] if "context" in row else row["tokens"]
        return cls(row["batch"], *row.get("ragged", (middle, middle)))

    @property
    def ragged(self) -> bool:
        return self.shortest < self.longest

    @property
    def context(self) -> int:
        """The middle: what a sequence has on average."""
        return (self.shortest + self.longest) // 2

    @property
    def lengths(self) -> list[int]:
        return draw_lengths(self.batch, self.shortest, self.longest)

    @property
    def fields(self) -> dict[str, Any]:
        """Of a row."""
        return {"ragged": [self.shortest, self.longest]} if self.ragged else {}

    @property
    def text(self) -> str:
        lengths = f"-{self.longest}" if self.shortest != self.longest else ""
        return f"{self.batch}x{self.shortest}{lengths}"

    def longer(self, tokens: int) -> Load:
        """Each sequence has so many tokens more."""
        return replace(self, shortest=self.shortest + tokens, longest=self.longest + tokens)

    def __str__(self) -> str:
        return self.text.replace("x", " x ")


def _tokens(text: str) -> int:
    return int(float(text[:-1]) * 1024) if text.endswith("k") else int(text)
