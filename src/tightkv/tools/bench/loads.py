"""Loads: how many sequences of which lengths, all equal or ragged."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TEXT = re.compile(r"(\d+)x(\d+|\d+(?:\.\d+)?k)(?:-(\d+|\d+(?:\.\d+)?k))?")


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
        name, least = str(self).replace(" ", ""), min(self.batch, self.shortest)
        if least < 1:
            raise ValueError(f"size {name}: {least}; it must be at least 1")
        if self.longest < self.shortest:
            raise ValueError(f"size {name}; the longest must not be below the shortest")

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
        bounds = [
            int(float(length.rstrip("k")) * (1024 if "k" in length else 1))
            for length in (shortest, longest or shortest)
        ]
        return cls(int(batch), *bounds)

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

    def longer(self, tokens: int) -> Load:
        """Each sequence has so many tokens more."""
        return Load(self.batch, self.shortest + tokens, self.longest + tokens)

    def __str__(self) -> str:
        bounds = dict.fromkeys((self.shortest, self.longest))
        return f"{self.batch} x {'-'.join(map(str, bounds))}"
