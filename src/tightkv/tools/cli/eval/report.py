"""The text and the file rows of `tightkv eval`, from the objects that --json prints."""

from collections.abc import Callable, Sequence
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
    "passkey": (
        ("passkey log p", "{passkey_log_p}"),
        ("found", "{passkey[top]:.0%} ({passkey[reference_top]:.0%})"),
    ),
    "recall": (
        ("recall log p", "{recall_log_p}"),
        ("found", "{recall[top]:.0%} ({recall[reference_top]:.0%})"),
    ),
    "tools": (("valid calls", "{tools[valid]} ({tools[reference_valid]}) of {tools[asked]}"),),
    "needles": (("needles", "{needles_found}"),),
    "greedy": (("greedy", "{greedy[median]:g} of {greedy[cap]}"),),
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
        parts += ["", title, _table(rows, _QUALITY, s["window"])]
    if columns := [c for task in _TASKS if rows[0][task] is not None for c in _TASKS[task]]:
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


def _words(row: Row) -> dict[str, str]:
    """What takes more than one field of a row."""
    found = {f"{task}_log_p": _log_p(row[task]) for task in ("free", "passkey", "recall")}
    if row["quality"]:
        found["bytes_held"] = human_bytes(row["quality"]["bytes_held"])
    if own := row["needles"]:
        sums = _sum(own), _sum(row["exact"]["needles"]), _sum(own, "asked")
        found["needles_found"] = "{} ({}) of {}".format(*sums)
    return found


def _log_p(result: dict[str, Any] | None) -> str:
    """The log-probability less that of the uncompressed cache, with its error."""
    if result is None:
        return ""
    own = result["log_prob"]
    error = "" if own["stderr"] is None else f" ± {own['stderr']:.3f}"
    return f"{own['difference']:+.3f}{error}"


def _sum(entries: Sequence[dict[str, Any]], field: str = "found") -> int:
    return sum(entry[field] for entry in entries)


def _table(rows: Sequence[Row], columns: Columns, window: int | None = None) -> str:
    """A line per config."""
    columns = [("cache", "{name}"), *columns]
    cells = [[form.format(**row, **_words(row)) for _, form in columns] for row in rows]
    return format_table([title.format(window=window) for title, _ in columns], cells)
