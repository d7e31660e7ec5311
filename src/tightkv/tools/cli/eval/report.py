"""The text, the file rows and the figure of `tightkv eval`, from the objects that --json prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes, save_plot

Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str]]
"""A title, and what it says of a row."""


def as_text(data: dict[str, Any]) -> str:
    """Quality in a table of its own, all other tasks in another."""
    rows, s = _rows([data]), data["settings"]
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
    if columns := _columns_of(rows, [task for task in _COLUMNS if task != "quality"]):
        title = "Against the uncompressed cache (its own figures in parentheses):"
        parts += ["", title, _table(rows, columns)]
    return "\n".join([*parts, *(f"note: {note}" for note in data["notes"])])


def models_as_text(models: Sequence[dict[str, Any]]) -> str:
    """One table of all models and configs."""
    rows = _rows(models)
    table = _table(rows, _columns_of(rows, list(_COLUMNS)), [("model", lambda row: row["model"])])
    seconds = sum(data["seconds"] for data in models)
    notes = {f"note: {data['model']['name']}: {note}" for data in models for note in data["notes"]}
    title = f"{len(models)} models, the worst first; {seconds:.0f} s"
    return "\n".join([title, "", table, *sorted(notes)])


def file_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row with everything that says where it comes from."""
    shared = {name: value for name, value in data.items() if name != "rows"}
    return [{"kind": "eval", **shared, **row} for row in data["rows"]]


def worst_first(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By the largest loss of any config: KL, or the first task that was run."""

    def loss(data: dict[str, Any]) -> float:
        rows = _rows([data])
        task = next((task for task in _LOSSES if rows[0][task] is not None), None)
        return 0.0 if task is None else max(float(_LOSSES[task](row)) for row in rows)

    return sorted(models, key=loss, reverse=True)


def _rows(models: Sequence[dict[str, Any]]) -> list[Row]:
    """The rows of all models, each with its model's name and uncompressed cache."""
    return [
        {**row, "exact": data["reference"], "model": data["model"]["name"]}
        for data in models
        for row in data["rows"]
    ]


def _columns_of(rows: Sequence[Row], tasks: Sequence[str]) -> list[Column]:
    """Those of the tasks that were run."""
    return [column for task in tasks if rows[0][task] is not None for column in _COLUMNS[task]]


def _table(rows: Sequence[Row], columns: Sequence[Column], first: Sequence[Column] = ()) -> str:
    """A line per config."""
    columns = [*first, ("cache", lambda row: row["name"]), *columns]
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
    "quality": [
        _bits("bits", "mean"),
        _figure("KL", "kl", "{:.5f}"),
        _figure("KL p99.9", "kl_p999", "{:.4f}"),
        _figure("perplexity", "perplexity_increase", "{:+.2%}"),
    ],
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


# --- the figure ---
def draw(path: str, data: dict[str, Any]) -> None:
    """KL, change of perplexity, needles and greedy tokens against bits, as far as measured."""
    exact, first = data["reference"], data["rows"][0]
    panels: list[tuple[str, str, Callable[[Row], float], float | None]] = []
    if first["quality"]:
        title = f"Perplexity (uncompressed: {exact['perplexity']:.2f})"
        panels = [
            ("KL to the uncompressed model", "nats per token", _LOSSES["quality"], None),
            (title, "change", lambda row: row["quality"]["perplexity_increase"], 0.0),
        ]
    if exact["needles"]:
        title = f"Needles found, of {_sum(exact['needles'], 'asked')}"
        found = _sum(exact["needles"])
        panels.append((title, "all contexts", lambda row: _sum(row["needles"]), found))
    if first["greedy"]:
        title, most = "Greedy tokens before the texts diverge", first["greedy"]["cap"]
        panels.append((title, "median", lambda row: row["greedy"]["median"], most))
    if not panels:
        raise ValueError("--plot draws the tasks quality, needles and greedy; none of them was run")
    lines = 2 if len(panels) == 4 else 1
    across = len(panels) // lines
    with save_plot(path, width=5.4 * across, height=4.2 * lines) as figure:
        figure.suptitle(f"{data['model']['name']}: compressed (dots) and uncompressed KV cache")
        every = figure.subplots(lines, across, squeeze=False).flat
        for axes, (title, label, y, level) in zip(every, panels, strict=True):
            if level is not None:
                axes.axhline(level, color="black", linewidth=0.8)
            for row in data["rows"]:
                at = row["bits"]["mean"], y(row)
                axes.plot(*at, "o", markersize=7)
                place = {"xytext": (8, 3), "textcoords": "offset points", "fontsize": 9}
                axes.annotate(row["name"].split()[0], at, **place)
            axes.set(title=title, xlabel="bits per element, with scales and means", ylabel=label)
            axes.margins(x=0.2)
            if y is _LOSSES["quality"]:
                axes.set_yscale("log")
