"""Rows of tightkv bench as lines, tables and a plot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tightkv.tools.bench.engine_plan import what_is_measured
from tightkv.tools.cli.shared.output import format_table, save_plot

Row = dict[str, Any]
_AGAINST = ("against_best_bf16", "against_fp8", "against_4bit")
_FACTORS = (*_AGAINST, *(f"consecutive_{name}" for name in _AGAINST), "share_of_copy_bandwidth")


def went_wrong(row: Row) -> bool:
    """Of an engine that failed."""
    return "error" in row


def label(row: Row) -> str:
    """What a row is about, without what it found."""
    if row["bench"] == "engine":
        return f"{row['kv']}, {'failed' if 'error' in row else what_is_measured(row)}"
    if "shape" not in row:
        sizes = [f"{name} {row[name]}" for name in ("tokens", "chunk", "prefix") if name in row]
        return f"{row['preset']}, {', '.join(sizes)}"
    s = row["shape"]
    heads = f"{s['query_heads']}/{s['kv_heads']} heads of {s['head_dim']}"
    shortest = s.get("shortest") or (1024 if s.get("ragged") else None)
    tokens = f"{shortest} to {s['tokens']}" if shortest else s["tokens"]
    return f"{row['preset']} {row['kernels']}, {s['batch']} x {tokens} tokens, {heads}"


def figures(row: Row) -> str:
    """What it found, for those who do not wait for the end."""
    value = row.get("value")
    found = [] if value is None else [f"{value:.4g}"]
    found += [f"{name.replace('_', ' ')} {ratio:.3g}" for name, ratio in _ratios(row).items()]
    return f": {', '.join(found)}" if found else ""


def _ratios(row: Row) -> dict[str, float]:
    """Numbers without a unit: how many times faster than others, and shares."""
    if "ratios" in row:
        found: dict[str, float] = row["ratios"]
        return found
    found = {name: row[name] for name in _FACTORS if row.get(name) is not None}
    if "consecutive_ms" in row:
        found["p99_to_p50"] = row["consecutive_ms"]["p99"] / row["consecutive_ms"]["p50"]
    if row["bench"] == "store":
        found["of a bf16 write's time"] = row["ms"] / row["bf16_write_ms"]
    return found


def as_text(rows: Sequence[Row]) -> str:
    return engine_text(rows) if rows[0]["bench"] == "engine" else _kernels_text(rows)


def _kernels_text(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in _ratios(row)))
    cells = []
    for row in rows:
        found = _ratios(row)
        cells.append([label(row), *(f"{found[n]:.2f}" if n in found else "-" for n in names)])
    where = ", ".join(str(rows[0][key]) for key in ("gpu", "cpu", "isa") if key in rows[0])
    table = format_table(("measured", *(name.replace("_", " ") for name in names)), cells)
    return f"Times faster than another, and shares ({where})\n\n{table}"


def draw(rows: Sequence[Row], path: str) -> None:
    rows = [row for row in rows if _ratios(row)]
    if not rows:
        raise ValueError("--plot: no ratios to draw, because only one cache was measured")
    name = next(n for n in ("fastest sdpa", *_ratios(rows[0])) if n in _ratios(rows[0]))
    rows = [row for row in rows if name in _ratios(row)]
    with save_plot(path, height=1.5 + 0.5 * len(rows)) as figure:
        axes = figure.add_subplot()
        axes.barh([label(row) for row in rows], [_ratios(row)[name] for row in rows])
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel(f"{rows[0]['bench']}: {name.replace('_', ' ')}")


# --- engines: a column per cache ---
def engine_text(rows: Sequence[Row]) -> str:
    """The figures with their ratios to vLLM's own, then single steps, latencies and failures."""
    good = [row for row in rows if "error" not in row]
    notes = [f"{label(row)}: {row['left_out']}" for row in good if "left_out" in row]
    notes += [f"{row['kv']} failed: {row['error']}" for row in rows if "error" in row]
    parts = []
    if good:
        steps = [row for row in good if "step_ms" in row]
        mixed = [row for row in good if row["measure"] == "mixed"]
        parts = [_heading(good[0]), _by_cache("measured", good, {"": _cell})]
        parts += [_by_cache("single synchronized steps", steps, STEPS)] if steps else []
        parts += [_latencies(mixed)] if mixed else []
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _by_cache(title: str, rows: Sequence[Row], cells: dict[str, Callable[[Row], str]]) -> str:
    """A line for each thing that is measured and kind of cell."""
    caches = list(dict.fromkeys(row["kv"] for row in rows))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        for name, cell in cells.items():
            lines.setdefault(f"{name}{what_is_measured(row)}", {})[row["kv"]] = cell(row)
    table = [[name, *(of.get(kv, "-") for kv in caches)] for name, of in lines.items()]
    return format_table((title, *caches), table)


def _heading(row: Row) -> str:
    dtype = row["arguments"]["dtype"]
    where = row.get("gpu") or f"{row['cores']} {row['machine']} cores"
    text = f"{row['model']} in vLLM {row['vllm']}, {dtype} ({where}); x: times the figure of auto"
    return text + ("; auto keeps 32 bits per number" if dtype == "float32" else "")


def _cell(row: Row) -> str:
    if row["value"] is None:
        return "-"
    text = f"{row['value']:,.2f}" if row["unit"] == "ms" else f"{row['value']:,.0f}"
    return text + _to_auto(row, "to auto")


def _to_auto(row: Row, name: str) -> str:
    ratio = row.get("ratios", {}).get(name)
    return "" if ratio is None else f" ({ratio:.2f}x)"


def _step(row: Row) -> str:
    shown = " / ".join(f"{row['step_ms'][p]:.2f}" for p in ("p50", "p90", "p99"))
    return shown + _to_auto(row, "step to auto")


def _host(row: Row) -> str:
    host = row["host_ms"]
    return f"{host['p50']:.2f}{_to_auto(row, 'host to auto')}" if host else "-"


STEPS: dict[str, Callable[[Row], str]] = {
    "p50 / p90 / p99: ": _step,
    "p99 to p50: ": lambda row: _times(row["ratios"]["p99 to p50 of steps"]),
    "the host's part: ": _host,
    "completing pages to not: ": lambda row: _times(
        row["ratios"].get("steps that complete pages to others")
    ),
}


def _latencies(mixed: Sequence[Row]) -> str:
    """What requests of a mixed load waited for, a line per cache."""
    header = ("mixed requests", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99")
    lines = []
    for row in mixed:
        found = [row["ttft_ms"], row["tpot_ms"] or {"p50": 0.0, "p99": 0.0}]
        lines.append([row["kv"], *(f"{of[p]:,.1f}" for of in found for p in ("p50", "p99"))])
    return format_table(header, lines)


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
