"""What the commands share: options for output, tables, byte sizes and JSON."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tightkv.integrations.extras import install_hint
from tightkv.tools.cli.shared import terminal

_UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}


class MissingPackageError(ImportError):
    """An optional package is needed; the message says how to install it."""

    def __init__(self, purpose: str, package: str, extra: str) -> None:
        super().__init__(f"{purpose} needs {package}: {install_hint(extra)}")


def print_status(line: str) -> None:
    """A line of progress on standard error."""
    terminal.print_line(f"tightkv: {line}")


class _PrintSchema(argparse.Action):
    """Print the schema of the parser's command, and do nothing else."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from tightkv.tools.cli.schemas import schema_of

        command = parser.prog.split()[1]
        print(json.dumps(schema_of(command), indent=2))
        parser.exit()


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--json and its schema."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--json-schema", action=_PrintSchema, nargs=0, help="print the JSON Schema of --json"
    )


def emit(args: argparse.Namespace, data: Mapping[str, Any], text: str) -> None:
    """Print `data` as JSON with --json, else `text`."""
    print(to_json(args, data) if args.json else text)


def to_json(args: argparse.Namespace, data: Mapping[str, Any]) -> str:
    """`data` as `schemas` describes it for the command of `args`."""
    return json.dumps(data, indent=2, allow_nan=False)


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned: to the right where every entry is a number, else to the left."""
    cells = [[str(cell) for cell in row] for row in rows]
    for row in cells:
        if len(row) != len(header):
            raise ValueError(f"a row has {len(row)} cells, the header {len(header)}: {row}")
    columns = list(zip(*cells, strict=True)) if cells else [()] * len(header)
    right = [bool(column) and all(map(_is_number, column)) for column in columns]
    widths = [
        max(map(len, [title, *column])) for title, column in zip(header, columns, strict=True)
    ]

    def line(row: Sequence[str]) -> str:
        parts = zip(row, widths, right, strict=True)
        return "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in parts).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, cells)])


def _is_number(cell: str) -> bool:
    """A number, also one with a unit or a sign (12.5 GiB, 3.9x, 97%), or a dash for none."""
    return cell in ("", "-", "no limit") or re.match(r"[-+]?[\d.]", cell) is not None


def or_dash(number: float | None, form: str) -> str:
    """A number of a table in a form as "{:.2f}x", or a dash for none."""
    return "-" if number is None else form.format(number)


def human_bytes(count: float) -> str:
    """1536 -> '1.50 KiB', in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def parse_bytes(text: str) -> int:
    """'80GiB' -> 85899345920, '24GB' -> 24000000000; a bare number is bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if match is None or len(match[1]) > 30 or (match[2] or "B").lower() not in units:
        raise ValueError(
            f"size {text!r}; give a number and one of {', '.join(_UNITS)}, as in 80GiB"
        )
    return int(float(match[1]) * units[(match[2] or "B").lower()])
