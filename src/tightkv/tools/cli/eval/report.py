"""The text and the file rows of `tightkv eval`, from the objects that --json prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""A title, and what it says of a row."""


def as_text(data: dict[str, Any]) -> str:
    """Quality in a table of its own, all other tasks in another."""
    rows, s = _rows(data), data["settings"]
    texts = ", ".join(text["name"] for text in data["texts"])
    parts = [
        f"{data['model']['name']} ({data['model']['dtype']} on "
        f"{data['machine']['gpu'] or data['model']['device']}); texts: {texts}; "
        f"{data['seconds']:.0f} s"
    ]
    if quality := rows[0]["quality"]:
        title = (
            f"{s['windows']} windows of {s['window']} tokens, {quality['positions']} positions "
            f"scored after a prefill of {s['prefill']}, {s['chunk']} tokens per pass; "
            f"perplexity of the uncompressed cache {data['reference']['perplexity']:.3f}:"
        )
        parts += ["", title, _table(rows, _quality_columns(s["window"]))]
    if columns := [c for task in _COLUMNS if rows[0][task] is not None for c in _COLUMNS[task]]:
        title = "Against the uncompressed cache (its own figures in parentheses):"
        parts += ["", title, _table(rows, columns)]
    return "\n".join([*parts, *(f"note: {note}" for note in data["notes"])])


def file_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row with everything that says where it comes from."""
    shared = {name: value for name, value in data.items() if name != "rows"}
    return [{"kind": "eval", **shared, **row} for row in data["rows"]]


def worst_first(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By the largest loss of any config: KL, or the first task that was run."""

    def loss(data: dict[str, Any]) -> float:
        rows = _rows(data)
        task = next((task for task in _LOSSES if rows[0][task] is not None), None)
        return 0.0 if task is None else max(float(_LOSSES[task](row)) for row in rows)

    return sorted(models, key=loss, reverse=True)


def _rows(data: dict[str, Any]) -> list[Row]:
    """Its rows, each with its uncompressed cache."""
    return [{**row, "exact": data["reference"]} for row in data["rows"]]


def _table(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """A line per config."""
    columns = [("cache", lambda row: row["name"]), *columns]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return format_table([title for title, _ in columns], cells)


# --- what stands in a table, and what is worse than what ---
def _figure(title: str, field: str, form: str) -> Column:
    """Of the task quality."""
    return title, lambda row: form.format(row["quality"][field])


def _bits(title: str, side: str) -> Column:
    return title, lambda row: f"{row['bits'][side]:.3g}"


def _quality_columns(window: int) -> list[Column]:
    return [
        _bits("bits K", "key"),
        _bits("bits V", "value"),
        _figure("KL", "kl", "{:.5f}"),
        _figure("KL p99", "kl_p99", "{:.4f}"),
        _figure("KL p99.9", "kl_p999", "{:.4f}"),
        _figure("top-1", "top1", "{:.2%}"),
        _figure("perplexity", "perplexity", "{:.3f}"),
        _figure("change", "perplexity_increase", "{:+.2%}"),
        (f"bytes at {window}", lambda row: human_bytes(row["quality"]["bytes_held"])),
        _figure("smaller", "ratio", "{:.2f}x"),
    ]


def _difference(title: str, task: str) -> Column:
    """Of the log-probability to that of the uncompressed cache, with its error."""

    def cell(row: Row) -> str:
        own = row[task]["log_prob"]
        error = "" if own["stderr"] is None else f" ± {own['stderr']:.3f}"
        return f"{own['difference']:+.3f}{error}"

    return title, cell


def _found(task: str) -> Column:
    return "found", lambda row: f"{row[task]['top']:.0%} ({row[task]['reference_top']:.0%})"


def _same_tokens(title: str, task: str) -> Column:
    return title, lambda row: f"{row[task]['median']:g} of {row[task]['cap']}"


def _tools(row: Row) -> str:
    own = row["tools"]
    return f"{own['valid']} ({own['reference_valid']}) of {own['asked']}"


def _sum(entries: Sequence[dict[str, Any]], field: str = "found") -> int:
    return sum(entry[field] for entry in entries)


def _needles(row: Row) -> str:
    own = row["needles"]
    return f"{_sum(own)} ({_sum(row['exact']['needles'])}) of {_sum(own, 'asked')}"


_COLUMNS: dict[str, list[Column]] = {
    "free": [
        _difference("free log p", "free"),
        ("free KL", lambda row: f"{row['free']['kl']:.4f}"),
        _same_tokens("same tokens", "free"),
    ],
    "passkey": [_difference("passkey log p", "passkey"), _found("passkey")],
    "recall": [_difference("recall log p", "recall"), _found("recall")],
    "tools": [("valid calls", _tools)],
    "needles": [("needles", _needles)],
    "greedy": [_same_tokens("greedy", "greedy")],
}
_LOSSES: dict[str, Callable[[Row], float]] = {
    "quality": lambda row: row["quality"]["kl"],
    "free": lambda row: row["free"]["kl"],
    "passkey": lambda row: -row["passkey"]["log_prob"]["difference"],
    "recall": lambda row: -row["recall"]["log_prob"]["difference"],
    "tools": lambda row: row["tools"]["reference_valid"] - row["tools"]["valid"],
    "needles": lambda row: _sum(row["exact"]["needles"]) - _sum(row["needles"]),
    "greedy": lambda row: -row["greedy"]["median"],
}
