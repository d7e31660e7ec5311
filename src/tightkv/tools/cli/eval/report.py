"""The text and the file rows of `tightkv eval`, from the objects that --json prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes

Column = tuple[str, Callable[[dict[str, Any]], str]]
"""A title, and what it says of a row."""
# Tasks with a table of their own stand only in the table of several models.
_ALONE = ("free", "passkey", "recall", "tools", "lambada", "gsm8k")
_TOGETHER = ("quality", *_ALONE, "needles", "greedy")


def as_text(data: dict[str, Any]) -> str:
    rows, s = data["rows"], data["settings"]
    parts = [_head(data)]
    if data["reference"]["perplexity"] is not None:
        parts += ["", _quality_title(data), _table(rows, _quality_columns(s["window"]))]
    if data["reference"]["needles"]:
        parts += ["", f"Needles found, of {s['needles']} at each context:", _needle_table(data)]
    if rows[0]["greedy"]:
        title = (
            f"Greedy tokens before the texts diverge, {s['prompts']} prompts of "
            f"{s['prompt_tokens']} tokens, {s['new_tokens']} at most:"
        )
        parts += ["", title, _table(rows, _GREEDY_COLUMNS)]
    if columns := _columns_of(rows, _ALONE):
        title = "Against the uncompressed cache (its own figures in parentheses):"
        parts += ["", title, _table(rows, columns)]
    parts += [f"note: {note}" for note in data["notes"]]
    return "\n".join(parts)


def models_as_text(models: Sequence[dict[str, Any]]) -> str:
    """One table of all models and configs."""
    rows = [
        {**row, "exact": data["reference"], "model": data["model"]["name"]}
        for data in models
        for row in data["rows"]
    ]
    table = _table(rows, _columns_of(rows, _TOGETHER), [("model", lambda row: row["model"])])
    seconds = sum(data["seconds"] for data in models)
    notes = {f"note: {data['model']['name']}: {note}" for data in models for note in data["notes"]}
    title = f"{len(models)} models, the worst first; {seconds:.0f} s"
    return "\n".join([title, "", table, *sorted(notes)])


def worst_first(models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By the largest loss of any config: KL, or the first task that was run."""
    return sorted(models, key=_loss, reverse=True)


def _loss(data: dict[str, Any]) -> float:
    """Of the model's worst config; more is worse."""
    exact = sum(entry["found"] for entry in data["reference"]["needles"] or [])

    def log_prob(own: dict[str, Any]) -> float:
        return -float(own["log_prob"]["difference"])

    losses: dict[str, Callable[[Any], float]] = {
        "quality": lambda own: own["kl"],
        "free": lambda own: own["kl"],
        "passkey": log_prob,
        "recall": log_prob,
        "tools": lambda own: (own["reference_valid"] - own["valid"]) / own["asked"],
        "lambada": log_prob,
        "gsm8k": lambda own: -own["accuracy"]["difference"],
        "needles": lambda own: exact - sum(entry["found"] for entry in own),
        "greedy": lambda own: -own["median"],
    }
    for task, loss in losses.items():
        if data["rows"][0][task] is not None:
            return max(float(loss(row[task])) for row in data["rows"])
    return 0.0


def _columns_of(rows: Sequence[dict[str, Any]], tasks: Sequence[str]) -> list[Column]:
    """Those of the tasks that were run."""
    return [column for task in tasks if rows[0][task] is not None for column in _COLUMNS[task]]


def _table(
    rows: Sequence[dict[str, Any]], columns: Sequence[Column], first: Sequence[Column] = ()
) -> str:
    """A line per config."""
    columns = [*first, ("cache", lambda row: row["name"]), *columns]
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return format_table([title for title, _ in columns], cells)


def file_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row with everything that says where it comes from."""
    shared = {name: value for name, value in data.items() if name != "rows"}
    return [{"kind": "eval", **shared, **row} for row in data["rows"]]


def _head(data: dict[str, Any]) -> str:
    model = data["model"]
    texts = ", ".join(text["name"] for text in data["texts"])
    return (
        f"{model['name']} ({model['dtype']} on {data['machine']['gpu'] or model['device']}); "
        f"texts: {texts}; {data['seconds']:.0f} s"
    )


def _quality_title(data: dict[str, Any]) -> str:
    s, positions = data["settings"], data["rows"][0]["quality"]["positions"]
    return (
        f"{s['windows']} windows of {s['window']} tokens, {positions} positions scored after a "
        f"prefill of {s['prefill']}, {s['chunk']} tokens per pass; "
        f"perplexity of the uncompressed cache {data['reference']['perplexity']:.3f}:"
    )


def _quality_columns(window: int) -> list[Column]:
    forms = {
        "KL": ("kl", "{:.5f}"),
        "KL p99": ("kl_p99", "{:.4f}"),
        "KL p99.9": ("kl_p999", "{:.4f}"),
        "top-1": ("top1", "{:.2%}"),
        "perplexity": ("perplexity", "{:.3f}"),
        "change": ("perplexity_increase", "{:+.2%}"),
    }
    return [
        ("bits K", lambda row: f"{row['bits']['key']:.3g}"),
        ("bits V", lambda row: f"{row['bits']['value']:.3g}"),
        *((title, partial(_figure, *form)) for title, form in forms.items()),
        (f"bytes at {window}", lambda row: human_bytes(row["quality"]["bytes_held"])),
        ("smaller", partial(_figure, "ratio", "{:.2f}x")),
    ]


def _figure(name: str, form: str, row: dict[str, Any]) -> str:
    return form.format(row["quality"][name])


def _needle_table(data: dict[str, Any]) -> str:
    reference = data["reference"]["needles"]
    header = ["cache", *(str(entry["context"]) for entry in reference), "all"]
    rows = [_needle_cells("uncompressed", reference)]
    rows += [_needle_cells(row["name"], row["needles"]) for row in data["rows"]]
    return format_table(header, rows)


def _needle_cells(name: str, entries: Sequence[dict[str, Any]]) -> list[object]:
    found = [entry["found"] for entry in entries]
    asked = sum(entry["asked"] for entry in entries)
    return [name, *found, f"{sum(found)} of {asked}"]


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
_GREEDY_COLUMNS: list[Column] = [
    ("median", lambda row: f"{row['greedy']['median']:g}"),
    ("least", lambda row: row["greedy"]["min"]),
]
