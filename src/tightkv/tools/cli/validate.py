"""tightkv validate: measure every claim of the method, then audit where it is weak."""

import argparse
import math
from itertools import groupby
from typing import Any

from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit, format_table
from tightkv.tools.cli.shared.progress import Working


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "validate",
        "Measure the claims of the method on the CPU, and audit where it is weak. Exit code 1 if a "
        "claim fails.",
        """
        --quick  fewer samples: seconds, not minutes
        --seed=0 SEED:int  of every random input (default 0)
        --dim=128 DIM:int  head dimension (default 128)
        """,
    )


def run(args: argparse.Namespace) -> int:
    from tightkv.tools import validate

    options = validate.Options(seed=args.seed, dim=args.dim, quick=args.quick)
    with Working("validating") as work:
        report = validate.run(options, work.step)
    data = report.to_dict()
    emit(args, data, as_text(data))
    return 0 if report.passed else 1


def as_text(data: dict[str, Any]) -> str:
    size = "quick" if data["quick"] else "full"
    parts = [f"tightkv validate: dimension {data['dim']}, seed {data['seed']}, {size} run"]
    header = "claim", "setting", "bound", "measured", "verdict"
    for section, claims in groupby(data["claims"], key=lambda claim: claim["section"]):
        rows = [
            (c["claim"], c["setting"], _bound(c), _measured(c), "pass" if c["passed"] else "FAIL")
            for c in claims
        ]
        parts.append(f"Claim {section}\n{format_table(header, rows)}")
    parts.append(f"Audit: where it is weak (informs, never fails)\n{_audit_text(data['audit'])}")
    failed, counts = data["failed_claims"], (len(data["claims"]), len(data["audit"]))
    passed = "all pass" if not failed else f"{failed} FAIL"
    parts.append(f"{counts[0]} claims, {passed}; {counts[1]} audit rows; {data['seconds']:.0f} s")
    return "\n\n".join(parts)


def _bound(claim: dict[str, Any]) -> str:
    low, high = claim["lower"], claim["upper"]
    if low is None:
        return f"<= {_number(high)}"
    if high is None:
        return f">= {_number(low)}"
    if low == -high and high:
        return f"0 +- {_number(high, 2)}"
    low, high = _number(low), _number(high)
    return f"{low} to {high}" if low != high else f"= {low}"


def _measured(claim: dict[str, Any]) -> str:
    if not claim["interval"]:
        return _number(claim["measured"])
    low, high = claim["interval"]
    half = (high - low) / 2
    decimals = max(0, 1 - math.floor(math.log10(half))) if half > 0 else 4
    return f"{claim['measured']:.{decimals}f} +- {_number(half, 2)}"


def _number(value: float | None, digits: int = 4) -> str:
    return "not a number" if value is None else f"{value:.{digits}g}"


def _audit_text(audit: list[dict[str, Any]]) -> str:
    lines = []
    width = max([len(row["unit"]) for row in audit], default=0)
    for what, group in groupby(audit, key=lambda row: row["what"]):
        lines.append(what)
        for row in group:
            number = _number(row["measured"], 3)
            lines.append(f"  {number:>8} {row['unit']:<{width}}  {row['setting']}")
            lines.append(f"  {'':>8} {'':<{width}}  {row['reading']}")
    return "\n".join(lines)
