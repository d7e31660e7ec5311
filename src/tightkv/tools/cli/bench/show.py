"""Rows of tightkv bench as lines and tables."""

from collections.abc import Callable, Sequence
from typing import Any

from tightkv.tools.bench.engine_plan import what_is_measured
from tightkv.tools.cli.shared.output import format_table

Row = dict[str, Any]
_AGAINST = ("against_best_bf16", "against_fp8", "against_4bit")
_FACTORS = (*_AGAINST, *(f"consecutive_{name}" for name in _AGAINST))


def label(row: Row) -> str:
    """What a row is about, without what it found."""
    if row["bench"] == "engine":
        return f"{row['kv']}, {'failed' if 'error' in row else what_is_measured(row)}"
    s = row["shape"]
    heads = f"{s['query_heads']}/{s['kv_heads']} heads of {s['head_dim']}"
    tokens = f"{s['shortest']} to {s['tokens']}" if s["shortest"] else s["tokens"]
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


# --- engines: a column per cache ---
def engine_text(rows: Sequence[Row]) -> str:
    """The figures with their ratios to vLLM's own, then single steps, latencies and failures."""
    good = [row for row in rows if "error" not in row]
    notes = [f"{label(row)}: {row['left_out']}" for row in good if "left_out" in row]
    notes += [f"{row['kv']} failed: {row['error']}" for row in rows if "error" in row]
    parts = [] if not good else [_heading(good[0]), _by_cache("measured", good, _figure)]
    for title, name, cell in (
        ("single synchronized steps, ms at p50 / p90 / p99", "step_ms", _steps),
        ("requests, ms of TTFT and TPOT at p50 / p99", "ttft_ms", _latencies),
    ):
        if measured := [row for row in good if row.get(name)]:
            parts.append(_by_cache(title, measured, cell))
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _by_cache(title: str, rows: Sequence[Row], cell: Callable[[Row], str]) -> str:
    """A line for each thing that is measured."""
    caches = list(dict.fromkeys(row["kv"] for row in rows))
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        lines.setdefault(what_is_measured(row), {})[row["kv"]] = cell(row)
    table = [[name, *(of.get(kv, "-") for kv in caches)] for name, of in lines.items()]
    return format_table((title, *caches), table)


def _heading(row: Row) -> str:
    dtype = row["arguments"]["dtype"]
    where = row.get("gpu") or f"{row['cores']} {row['machine']} cores"
    text = f"{row['model']} in vLLM {row['vllm']}, {dtype} ({where}); x: times the figure of auto"
    return text + ("; auto keeps 32 bits per number" if dtype == "float32" else "")


def _figure(row: Row) -> str:
    if row["value"] is None:
        return "-"
    text = f"{row['value']:,.2f}" if row["unit"] == "ms" else f"{row['value']:,.0f}"
    return text + _to_auto(row, "to auto")


def _steps(row: Row) -> str:
    return _percentiles(row["step_ms"], "p50", "p90", "p99") + _to_auto(row, "step to auto")


def _latencies(row: Row) -> str:
    found = [row[name] for name in ("ttft_ms", "tpot_ms") if row[name]]
    return ", ".join(_percentiles(of, "p50", "p99") for of in found)


def _percentiles(of: dict[str, float], *names: str) -> str:
    return " / ".join(f"{of[name]:,.2f}" for name in names)


def _to_auto(row: Row, name: str) -> str:
    ratio = row.get("ratios", {}).get(name)
    return "" if ratio is None else f" ({ratio:.2f}x)"
