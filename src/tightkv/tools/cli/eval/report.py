"""The text and the file rows of `tightkv eval`, from the objects that --json prints."""

from collections.abc import Sequence
from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes

Row = dict[str, Any]
Columns = Sequence[tuple[str, str]]
"""Titles, and what stands below them: forms that are filled with the fields of a row."""

_QUALITY: Columns = (
    ("bits K", "{bits[key]:.3g}"),
    ("bits V", "{bits[value]:.3g}"),
    ("KL", "{quality[kl]:.5f}"),
    ("KL p99", "{quality[kl_p99]:.4f}"),
    ("KL p99.9", "{quality[kl_p999]:.4f}"),
    ("top-1", "{quality[top1]:.2%}"),
    ("perplexity", "{quality[perplexity]:.3f}"),
    ("change", "{quality[perplexity_increase]:+.2%}"),
    ("bytes at {window}", "{bytes_held}"),
    ("smaller", "{quality[ratio]:.2f}x"),
)
_TASKS: dict[str, Columns] = {
    "free": (
        ("free log p", "{free_log_p}"),
        ("free KL", "{free[kl]:.4f}"),
        ("same tokens", "{free[median]:g} of {free[cap]}"),
    ),
    "needles": (("needles", "{needles_found}"),),
}


def as_text(data: dict[str, Any]) -> str:
    """Quality in a table of its own, all other tasks in another."""
    rows = [{**row, "exact": data["reference"]} for row in data["rows"]]
    s = data["settings"]
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
        parts += ["", title, _table(rows, _QUALITY, s["window"])]
    if columns := [c for task in _TASKS if rows[0][task] is not None for c in _TASKS[task]]:
        title = "Against the uncompressed cache (its own figures in parentheses):"
        parts += ["", title, _table(rows, columns)]
    return "\n".join([*parts, *(f"note: {note}" for note in data["notes"])])


def file_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row with everything that says where it comes from."""
    shared = {name: value for name, value in data.items() if name != "rows"}
    return [{"kind": "eval", **shared, **row} for row in data["rows"]]


def _words(row: Row) -> dict[str, str]:
    """What takes more than one field of a row."""
    found = {}
    if row["quality"]:
        found["bytes_held"] = human_bytes(row["quality"]["bytes_held"])
    if row["free"]:  # the log-probability less that of the uncompressed cache
        own = row["free"]["log_prob"]
        error = "" if own["stderr"] is None else f" ± {own['stderr']:.3f}"
        found["free_log_p"] = f"{own['difference']:+.3f}{error}"
    if own := row["needles"]:
        hits, exact = (sum(entry["found"] for entry in of) for of in (own, row["exact"]["needles"]))
        found["needles_found"] = f"{hits} ({exact}) of {sum(entry['asked'] for entry in own)}"
    return found


def _table(rows: Sequence[Row], columns: Columns, window: int | None = None) -> str:
    """A line per config."""
    columns = [("cache", "{name}"), *columns]
    cells = [[form.format(**row, **_words(row)) for _, form in columns] for row in rows]
    return format_table([title.format(window=window) for title, _ in columns], cells)
