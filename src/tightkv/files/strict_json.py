"""Strict JSON, and values of it that know their place, for errors that name it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

_INT64 = 1 << 63


def parse_json(text: str | bytes) -> Any:
    """JSON without repeated names, NaN, Infinity or numbers of more than 64 bits."""
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_no_number,
        )
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its JSON has the name {short(name)} twice in one object")
        found[name] = value
    return found


def _integer(text: str) -> int:
    if len(text) > 20 or not -_INT64 <= int(text) < _INT64:
        raise ValueError(f"its JSON has the number {short(text)}, which is not one of 64 bits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if abs(value) == float("inf"):
        _no_number(text)
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"its JSON has {short(text)}, which is no finite number")


def short(value: object) -> str:
    """A value as an error shows it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text)} characters)"


@dataclass(frozen=True)
class Field:
    """A value of a header, and where it was found: cut, for a file may have names of any length."""

    value: Any
    where: str

    def wrong(self, allowed: str) -> ValueError:
        return ValueError(f"{self.where}={short(self.value)}; allowed: {allowed}")

    def record(self, *names: str) -> dict[str, Field]:
        """An object with exactly these names."""
        found = self.record_of_any()
        if set(found) != set(names):
            raise ValueError(
                f"{self.where or 'the header'} has the names {short(sorted(found))}; "
                f"allowed: exactly {', '.join(names)}"
            )
        return found

    def record_of_any(self) -> dict[str, Field]:
        if type(self.value) is not dict:
            raise self.wrong("an object")
        dot = f"{self.where}." if self.where else ""
        return {name: Field(value, (dot + name)[:99]) for name, value in self.value.items()}

    def items(self) -> list[Field]:
        if type(self.value) is not list:
            raise self.wrong("a list")
        return [Field(value, f"{self.where}[{i}]"[:99]) for i, value in enumerate(self.value)]

    def integer(self, low: int, high: int) -> int:
        if type(self.value) is not int or not low <= self.value <= high:
            raise self.wrong(f"a whole number from {low} to {high}")
        return self.value

    def number(self, low: float, high: float) -> float:
        if type(self.value) not in (int, float) or not low <= self.value <= high:
            raise self.wrong(f"a number from {low} to {high}")
        return float(self.value)

    def boolean(self) -> bool:
        if type(self.value) is not bool:
            raise self.wrong("true or false")
        return self.value

    def text(self) -> str:
        if type(self.value) is not str:
            raise self.wrong("a string")
        return self.value

    def one_of(self, *allowed: str) -> str:
        if type(self.value) is not str or self.value not in allowed:
            raise self.wrong(", ".join(allowed))
        return self.value
