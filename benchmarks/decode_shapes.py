"""A decode step of 20 shapes against other kernels, and the tables of docs/results.md.

python benchmarks/decode_shapes.py --out rows.jsonl     measures on a GPU, then prints the table
python benchmarks/decode_shapes.py --shapes more --out rows.jsonl      most of wide groups
python benchmarks/decode_shapes.py --shapes lengths --out rows.jsonl   of `tightkv bench decode`
python benchmarks/decode_shapes.py --shapes heads --out rows.jsonl     heads of 64 to 256
python benchmarks/decode_shapes.py --table rows.jsonl   prints it from the rows of a file
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tightkv.tools.bench.gpu import DECODE_SHAPES, decode_rows
from tightkv.tools.bench.inputs import Shape
from tightkv.tools.bench.rivals import GROUPS, RIVALS, Rival, has
from tightkv.tools.rows import append_rows

Row = Mapping[str, Any]
# Odd lengths: the newest page is neither empty nor full, as most of the time.
SHAPES = (
    Shape(8, 32731),
    Shape(32, 8155),
    Shape(64, 4091),
    Shape(128, 2043),
    Shape(256, 1019),
    Shape(1, 2043),
    Shape(1, 8155),
    Shape(1, 32731),
    Shape(1, 131035),
    Shape(32, 32731, shortest=1025),
    Shape(8, 32731, 48, 8),
    Shape(8, 32731, 64, 8),
    Shape(8, 32731, 96, 8),
    Shape(32, 8155, 64, 4),
    Shape(32, 8155, 8, 1),  # a shard of eight of 64/8
    Shape(32, 8155, 24, 8, 64),
    Shape(8, 32731, 16, 4, 256),
    Shape(8, 32731, 4, 1, 256),
    Shape(1, 4091, 16, 2, 256),  # the shape of ExecuTorch's report on TurboQuant
    Shape(8, 32731, 32, 4, 512),  # global layers of Gemma 4
)
MORE_SHAPES = (
    Shape(32, 8155, 64, 4),
    Shape(32, 8155, 32, 2),
    Shape(8, 32731, 96, 8),
    Shape(8, 32731, 128, 8),
    Shape(32, 8155, 64, 8, 64),  # gpt-oss
    Shape(32, 8155, 14, 2, 64),
    Shape(32, 8155, 28, 4),
    Shape(8, 32731, 40, 8),
    Shape(8, 32731, 8, 4, 256),
    Shape(512, 600),
)
SETS = {
    "results": SHAPES,
    "more": MORE_SHAPES,
    "lengths": DECODE_SHAPES,
    "heads": tuple(Shape(32, 8155, head_dim=d) for d in (64, 80, 96, 112, 128, 192, 256)),
}
WITHOUT_TABLE = ("lengths", "heads")
PRESETS = ("k4v4", "k2v2")
EIGHT_BITS = "k8v4"  # measured for the first two shapes
COLUMNS = ("best bf16", "best fp8", "best other 4 bits")  # as in GROUPS


def measure(
    shapes: Sequence[Shape],
    head_dims: Sequence[int],
    presets: Sequence[str],
    against: Sequence[str],
    device: torch.device,
) -> Iterator[dict[str, Any]]:
    others = rivals(against)
    for shape in shapes:
        if not head_dims or shape.head_dim in head_dims:
            own = presets or (*PRESETS, *([EIGHT_BITS] if shape in SHAPES[:2] else []))
            for row in decode_rows([shape], own, ["auto"], device, others):
                yield {**row, "vllm": getattr(sys.modules.get("vllm"), "__version__", None)}


def rivals(against: Sequence[str]) -> dict[str, Rival]:
    """All of them, or those whose names have one of the words."""
    from rival_kernels import installed

    found = {**RIVALS, **installed()}
    for word in against:
        if not any(word in name for name in found):
            raise ValueError(f"--against {word}; it must be part of one of: {', '.join(found)}")
    return {name: rival for name, rival in found.items() if not against or has(name, against)}


# --- the table ---
def table(rows: Sequence[Row]) -> str:
    """Markdown: microseconds of each, and of ours how many times faster; the slowest first."""
    by_shape: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        by_shape.setdefault(tuple(row["shape"].values()), {})[row["preset"]] = row
    ordered = sorted(by_shape.values(), key=lambda by: by["k4v4"]["against_best_bf16"])
    head = ("query heads/KV heads of head_dim", "sequences x tokens", *COLUMNS, *PRESETS)
    columns = list(zip(head, *map(_line, ordered), strict=True))
    columns = [column for column in columns if set(column[1:]) != {"-"}]  # no rival of a kind
    lines = [*zip(*columns, strict=True)]
    lines.insert(1, ("---",) * len(columns))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _line(by: Mapping[str, Row]) -> list[str]:
    row = by["k4v4"]
    s = row["shape"]
    # older rows have "ragged" lengths, each as many times the one before
    shortest = s.get("shortest") or (1025 if s.get("ragged") else 0)
    tokens = f"{shortest:,} to {s['tokens']:,}" if shortest else f"{s['tokens']:,}"
    return [
        f"{s['query_heads']}/{s['kv_heads']} of {s['head_dim']}",
        f"{s['batch']} x {tokens}",
        *(_fastest(row["others_ms"], words) for words in GROUPS.values()),
        *(_own(by[preset]) for preset in PRESETS),
    ]


def _fastest(ms: Mapping[str, float], words: Sequence[str]) -> str:
    of = {name: time for name, time in ms.items() if has(name, words)}
    if not of:
        return "-"
    name = min(of, key=lambda name: of[name])
    return f"{1e3 * of[name]:.1f} ({name})"


def _own(row: Row) -> str:
    kernels = "" if row["kernels"] == "cuda" else f", {row['kernels']}"
    return f"{1e3 * row['ms']['step']:.1f} ({row['against_best_bf16']:.2f}x{kernels})"


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="measure; JSON-lines file, appended to")
    what.add_argument("--table", type=Path, help="print the table of the rows of this file")
    parser.add_argument("--shapes", choices=SETS, default="results", help="default: results")
    parser.add_argument("--head-dim", type=int, action="append", help="of shapes; repeatable")
    parser.add_argument("--preset", action="append", help="repeatable (default: k4v4, k2v2)")
    parser.add_argument(
        "--against", action="append", metavar="WORD",
        help="measure only rivals whose name has this word; repeatable",
    )  # fmt: skip
    args = parser.parse_args()
    if args.out:
        device = torch.device("cuda")
        some = args.head_dim or (), args.preset or (), args.against or ()
        for row in measure(SETS[args.shapes], *some, device):
            append_rows(args.out, [row])
            notes = "".join(f"; {name}: {why}" for name, why in row["others_failed"].items())
            sys.stderr.write(f"measured {row['preset']} {row['shape']}{notes}\n")
    if args.table or args.shapes not in WITHOUT_TABLE:
        sys.stdout.write(table(read_rows(args.table or args.out)) + "\n")


if __name__ == "__main__":
    main()
