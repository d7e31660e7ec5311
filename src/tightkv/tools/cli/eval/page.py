"""The page of `tightkv eval --report`: models, caches and rivals beside the noise floor."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightkv.files.atomic import check_folder, check_writable, whole_file
from tightkv.tools.cli.shared.output import MissingPackageError, or_dash
from tightkv.tools.model_loading.source import model_name
from tightkv.tools.rows import versions

FLOOR = "k16v16"  # nothing is quantized, but sums are taken in another order
_FLOORS = (FLOOR, "again")  # "again": vLLM's own cache with other chunks
_FIGURES = ("positions", "kl", "kl_stderr", "kl_p999", "kl_above", "top1", "perplexity_increase")
_NOTES = """\
KL in nats per token to the uncompressed cache on the same tokens, ± its standard error over
windows; "above 0.1" is the share of positions with a larger KL. The **noise floor** is the same
model with a cache that quantizes nothing but takes sums in another order: a smaller difference says
nothing. Bytes per token are those of a further token in a long context, over all layers; the
window of newest tokens and the sinks add a constant per sequence. Compare rows of one table: other
tables have other windows or engines. Texts are teacher-forced; tasks at depth are free-running."""

_STYLE = {
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **{"grid.alpha": 0.25, "axes.titlesize": 11},
}

# Columns of the tasks at depth, and the forms that a row's fields fill.
_TASKS = {
    **{"model": "{model}", "task": "{task}", "cache": "{cache}", "answers": "{answers:,}"},
    **{"score": "{score:.1%}", "reference": "{reference:.1%}"},
    **{"difference": "{difference:+.1%}{error}", "95%": "{interval[0]:+.1%} to {interval[1]:+.1%}"},
    "p": "{p:.3f}",
}

# Of two rows that have these in common the later one counts.
_SAME_CACHE = ("model", "source", "cache")
_SAME_TASK = ("model", "family", "depth", "cache", "against")

Row = dict[str, Any]


def check(folder: str) -> None:
    """Raise now what `write` would raise after the work is done."""
    check_folder(Path(folder))
    Path(folder).mkdir(parents=True, exist_ok=True)
    check_writable(Path(folder) / "report.svg")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise MissingPackageError("--report", "matplotlib", "eval") from None


def read(path: str) -> list[Row]:
    """The rows of a file, all of kinds that the page shows."""
    rows = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            known = _is_task(row) or _source(row) is not None
            if known:  # what cannot be shown is found before the work begins
                _tasks([row]) if _is_task(row) else _quality(list(filter(None, [_entry(row)])))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"line {number} of {path!r} cannot be shown ({why})") from None
        if not known:
            raise ValueError(
                f"line {number} of {path!r} has kind {row.get('kind')!r}; --rows takes eval, "
                "vllm-quality and depth, and rows of compare_caches.py"
            )
        rows.append(row)
    return rows


def write(folder: str, rows: Sequence[Row]) -> None:
    """report.md, report.json and report.svg."""
    tasks = [row for row in rows if _is_task(row)]
    caches = [entry for row in rows if (entry := _entry(row))]
    names = _names({row["model"] for row in (*caches, *tasks)})
    tasks, caches = _latest(tasks, _SAME_TASK, names), _latest(caches, _SAME_CACHE, names)
    tables: dict[tuple[str, str], list[Row]] = {}
    for entry in caches:
        tables.setdefault((entry["model"], entry["source"]), []).append(entry)
    for own in tables.values():
        own.sort(key=lambda e: (not e["floor"], -(e["bytes_per_token"] or 0), e["kl"]))
    parts = ["# Quality of compressed KV caches", "", "![KL against bytes per token](report.svg)"]
    worst = sorted(tables, key=lambda key: -max(e["kl"] for e in tables[key]))
    for key in worst:
        parts += ["", f"## {key[0]}, {key[1]}", "", *_quality(tables[key])]
    if tasks:
        parts += ["", "## Tasks at depth", "", *_tasks(tasks)]
    data = {"schema": 1, **versions(), "caches": caches, "tasks": tasks}
    for name, text in (
        ("report.md", "\n".join([*parts, "", _NOTES, ""])),
        ("report.json", json.dumps(data, indent=1, allow_nan=False) + "\n"),
    ):
        with whole_file(Path(folder) / name) as file:
            file.write_text(text, encoding="utf-8")
    _draw(Path(folder) / "report.svg", tables)


def _names(models: set[str]) -> dict[str, str]:
    """Folders by their last part, as the scripts of rivals name them, unless two are alike."""
    names = {model: model_name(str(model)) for model in models}
    several = Counter(name for model, name in names.items() if name != model)
    return {model: model if several[name] > 1 else name for model, name in names.items()}


def _latest(rows: Sequence[Row], same: Sequence[str], names: dict[str, str]) -> list[Row]:
    named = [{**row, "model": names[row["model"]]} for row in rows]
    return list({tuple(map(row.get, same)): row for row in named}.values())


def _is_task(row: Row) -> bool:
    return row.get("kind") == "depth"


def _source(row: Row) -> str | None:
    """What measured the KL of a row; None for a row without one."""
    if "package" in row and "kl" in row:  # compare_caches.py
        return "caches of transformers"
    return {"eval": "transformers", "vllm-quality": "vLLM"}.get(row.get("kind", ""))


def _entry(row: Row) -> Row | None:
    """What the page shows of a row; None for tasks, and where no KL was measured."""
    ours = row.get("kind") == "eval"
    quality, cache = (row["quality"], row["name"]) if ours else (row, row["cache"])
    if _is_task(row) or quality is None or cache == "dynamic":
        return None
    model, dtype = row["model"], row.get("dtype")
    if isinstance(model, dict):
        model, dtype = model["name"], model["dtype"]
    cache = cache.removeprefix("tightkv ")
    source, size = f"{_source(row)}, {dtype}", row.get("settings", row)
    if "window" in size:
        source += ", {windows} x {window} tokens ({prefill}, then by {chunk})".format(**size)
    place = {"model": model, "source": source, "cache": cache}
    figures = {name: quality.get(name) for name in _FIGURES}
    if "perplexity" in row:  # compare_caches.py
        figures["perplexity_increase"] = row["perplexity"] / row["reference_perplexity"] - 1
    bytes_each = row.get("bytes_per_token")
    return {**place, "floor": cache in _FLOORS, "bytes_per_token": bytes_each, **figures}


def _quality(entries: Sequence[Row]) -> list[str]:
    heads = ("cache", "bytes/token", "KL", "KL p99.9", "above 0.1", "top-1", "perplexity")
    lines = []
    for e in entries:
        error = "" if e["kl_stderr"] is None else f" ± {e['kl_stderr']:.5f}"
        lines.append(
            (
                f"noise floor ({e['cache']})" if e["floor"] else e["cache"],
                or_dash(e["bytes_per_token"], "{:,.0f}"),
                f"{max(e['kl'], 0):.5f}{error}",
                or_dash(e["kl_p999"], "{:.4f}"),
                or_dash(e["kl_above"], "{:.2%}"),
                f"{e['top1']:.2%}",
                or_dash(e["perplexity_increase"], "{:+.2%}"),
            )
        )
    return _markdown(heads, lines)


def _tasks(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        error = "" if row["difference_stderr"] is None else f" ± {row['difference_stderr']:.1%}"
        depth = "" if row["depth"] is None else f" at {row['depth']:,}"
        words = {**row, "task": row["family"] + depth, "error": error}
        lines.append([form.format(**words) for form in _TASKS.values()])
    return _markdown([*_TASKS], lines)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *lines)]


def _draw(path: Path, tables: dict[tuple[str, str], list[Row]]) -> None:
    """A panel per model with KL against bytes per token."""
    tables = {k: [e for e in own if e["bytes_per_token"]] for k, own in tables.items()}
    tables = {key: entries for key, entries in tables.items() if entries}
    models = list(dict.fromkeys(model for model, _ in tables))
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(5.4 * len(models), 4.2), layout="constrained")
        panels = figure.subplots(1, len(models), squeeze=False).flat
        for axes, model in zip(panels, models, strict=True):
            _draw_quality(axes, model, tables)
        with whole_file(path) as temporary:
            figure.savefig(temporary, format="svg")


def _draw_quality(axes: Any, model: str, tables: dict[tuple[str, str], list[Row]]) -> None:
    sources = list(dict.fromkeys(source for _, source in tables))
    for (name, source), entries in tables.items():
        if name != model:
            continue
        color = f"C{sources.index(source)}"
        axes.plot([], [], "o", color=color, label=source)
        for e in entries:
            if e["kl"] < 1e-6:  # no more than rounding in float32
                continue
            if e["floor"]:
                axes.axhline(e["kl"], color=color, linestyle="--")
            else:
                at = e["bytes_per_token"], e["kl"]
                axes.errorbar(*at, yerr=e["kl_stderr"], fmt="o", color=color)
                place = {"xytext": (6, 3), "textcoords": "offset points", "fontsize": 8}
                axes.annotate(e["cache"], at, color=color, **place)
    axes.set(title=model, xlabel="bytes per token", ylabel="KL (dashed: noise floor)")
    axes.set_yscale("log")
    axes.margins(x=0.2)
    axes.legend(fontsize=8)
