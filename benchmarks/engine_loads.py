"""Tables of loads in vLLM from rows of bench engine: python benchmarks/engine_loads.py [FILE]

A line per load and a column per cache: the time per output token as served, and single
synchronized steps. The newest row counts where a file has several of the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tightkv.tools.bench.loads import Load

RESULTS = Path(__file__).parent / "results"
Row = Mapping[str, Any]
Cell = Callable[[Row, Row], str]  # of a row and of bf16's


def loads(rows: Iterable[Row]) -> dict[Load, dict[str, Row]]:
    """Rows with single steps by load and cache: equal and ragged ones of a batch together."""
    found: dict[Load, dict[str, Row]] = {}
    for row in rows:
        if row.get("measure") == "tpot" and row.get("step_ms"):
            found.setdefault(Load.of_row(row), {})[row["kv"]] = row
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def _order(load: Load) -> tuple[int, int, bool]:
    return -load.context, load.batch, load.ragged


def name_of(load: Load) -> str:
    """As in 128 x 1,024 to 3,072."""
    lengths = dict.fromkeys((load.shortest, load.longest))
    return f"{load.batch} x {' to '.join(f'{n:,}' for n in lengths)}"


def served(row: Row, own: Row) -> str:
    """Milliseconds per output token, and its share of bf16's."""
    return f"{row['value']:.2f}{_share(row['value'], own['value'], row is own)}"


def steps(row: Row, own: Row) -> str:
    """Median, p90 and p99 of single steps in milliseconds, and the median's share of bf16's."""
    ms = row["step_ms"]
    shown = " / ".join(f"{ms[p]:.2f}" for p in ("p50", "p90", "p99"))
    return shown + _share(ms["p50"], own["step_ms"]["p50"], row is own)


def host(row: Row, own: Row) -> str:
    """The host's part of them."""
    if not row["host_ms"] or not own["host_ms"]:
        return "-"
    ms = row["host_ms"]["p50"]
    return f"{ms:.2f}{_share(ms, own['host_ms']['p50'], row is own)}"


def completing(row: Row, own: Row) -> str:
    """Steps that complete pages, against those that do not."""
    ratio = row["ratios"].get("steps that complete pages to others")
    return "-" if ratio is None else f"{ratio:.2f}x"


def _share(ms: float, own: float, is_own: bool) -> str:
    return "" if is_own else f" ({ms / own:.2f})"


TABLES: dict[str, Cell] = {
    "TPOT as served, ms": served,
    "single steps, p50 / p90 / p99, ms": steps,
    "host time per step, ms": host,
    "completing pages / not": completing,
}


def table(title: str, rows: Iterable[Row]) -> str:
    """Markdown; in parentheses shares of bf16's time. Empty without such rows."""
    found = loads(rows)
    caches = list(dict.fromkeys(kv for of in found.values() for kv in of))
    if "auto" not in caches:
        return ""
    lines = [[title, *caches], ["---"] * (1 + len(caches))]
    for load, of in found.items():
        cells = (TABLES[title](of[kv], of["auto"]) if kv in of else "-" for kv in caches)
        if "auto" in of:
            lines.append([name_of(load), *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "vllm_engine_loads.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tables = [table(title, rows) for title in TABLES]
    sys.stdout.write("\n\n".join(filter(None, tables)) + "\n")


if __name__ == "__main__":
    main()
