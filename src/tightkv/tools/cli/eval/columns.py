"""The columns of the table of `tightkv eval`, by task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Column = tuple[str, Callable[[dict[str, Any]], str]]


def columns_of(tasks: Sequence[str]) -> list[Column]:
    """A title and what it says of a row, for every task in this order."""
    return [column for task in tasks for column in _COLUMNS[task]]


def _difference(task: str, field: str = "log_prob") -> Callable[[dict[str, Any]], str]:
    def cell(row: dict[str, Any]) -> str:
        own = row[task][field]
        error = "" if own["stderr"] is None else f" ± {own['stderr']:.3f}"
        return f"{own['difference']:+.3f}{error}"

    return cell


def _shares(task: str, field: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row[task][field]:.0%} ({row[task]['reference_' + field]:.0%})"


def _tools(row: dict[str, Any]) -> str:
    own = row["tools"]
    return f"{own['valid']} ({own['reference_valid']}) of {own['asked']}"


def _gsm8k(row: dict[str, Any]) -> str:
    own = row["gsm8k"]["accuracy"]
    return f"{own['mean']:.1%} ({own['reference']:.1%})"


def _needles(row: dict[str, Any]) -> str:
    found, exact = (
        sum(entry["found"] for entry in entries)
        for entries in (row["needles"], row["exact"]["needles"])
    )
    return f"{found} ({exact}) of {sum(entry['asked'] for entry in row['needles'])}"


# In parentheses: the uncompressed cache.
_COLUMNS: dict[str, list[Column]] = {
    "quality": [
        ("bits", lambda row: f"{row['bits']['mean']:.3g}"),
        ("KL", lambda row: f"{row['quality']['kl']:.5f}"),
        ("KL p99.9", lambda row: f"{row['quality']['kl_p999']:.4f}"),
        ("perplexity", lambda row: f"{row['quality']['perplexity_increase']:+.2%}"),
    ],
    "free": [
        ("free log p", _difference("free")),
        ("free KL", lambda row: f"{row['free']['kl']:.4f}"),
        ("same tokens", lambda row: f"{row['free']['median']:g} of {row['free']['cap']}"),
    ],
    "passkey": [("passkey log p", _difference("passkey")), ("found", _shares("passkey", "top"))],
    "recall": [("recall log p", _difference("recall")), ("found", _shares("recall", "top"))],
    "tools": [("valid calls", _tools)],
    "lambada": [("LAMBADA log p", _difference("lambada")), ("words", _shares("lambada", "top"))],
    "gsm8k": [("GSM8K", _gsm8k)],
    "needles": [("needles", _needles)],
    "greedy": [("greedy", lambda row: f"{row['greedy']['median']:g} of {row['greedy']['cap']}")],
}
