"""tightkv validate: measure every claim of the method, then audit where it is weak."""

import argparse
import math
from itertools import groupby
from typing import Any

from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import check_plot, emit, format_table, save_plot
from tightkv.tools.cli.shared.progress import Working

SCALING = "3 scaling"  # the section that is drawn


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
        plot="draw distortion against bits, and KL against key bias",
    )


def run(args: argparse.Namespace) -> int:
    from tightkv.tools import validate

    options = validate.Options(seed=args.seed, dim=args.dim, quick=args.quick)
    if args.plot:
        check_plot(args.plot)
    with Working("validating") as work:
        report = validate.run(options, work.step)
    data = report.to_dict()
    emit(args, data, as_text(data))
    if args.plot:
        draw(args.plot, data)
    return 0 if report.passed else 1


def as_text(data: dict[str, Any]) -> str:
    parts = [_headline(data)]
    header = "claim", "setting", "bound", "measured", "verdict"
    for section, claims in groupby(data["claims"], key=lambda claim: claim["section"]):
        rows = [
            (c["claim"], c["setting"], _bound(c), _measured(c), "pass" if c["passed"] else "FAIL")
            for c in claims
        ]
        parts.append(f"Claim {section}\n{format_table(header, rows)}")
    parts.append(f"Audit: where it is weak (informs, never fails)\n{_audit_text(data['audit'])}")
    parts.append(_verdict(data))
    return "\n\n".join(parts)


def _headline(data: dict[str, Any]) -> str:
    size = "quick" if data["quick"] else "full"
    return f"tightkv validate: dimension {data['dim']}, seed {data['seed']}, {size} run"


def _verdict(data: dict[str, Any]) -> str:
    total, failed = len(data["claims"]), data["failed_claims"]
    passed = "all pass" if not failed else f"{failed} FAIL"
    return f"{total} claims, {passed}; {len(data['audit'])} audit rows; {data['seconds']:.0f} s"


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


def draw(path: str, data: dict[str, Any]) -> None:
    """Distortion times 4^bits between its bounds, and KL against the bias of the keys."""
    rows = [c for c in data["claims"] if c["section"] == SCALING]
    bits = [row["detail"]["bits"] for row in rows]
    widths = [(row["interval"][1] - row["interval"][0]) / 2 for row in rows]
    sweep = [
        (row["detail"], row["measured"]) for row in data["audit"] if "centered" in row["detail"]
    ]
    with save_plot(path, width=10.0) as figure:
        figure.suptitle(f"{_headline(data)}: {_verdict(data).split(';')[0]}", fontsize=12)
        left, right = figure.subplots(1, 2)
        left.errorbar(bits, [r["measured"] for r in rows], widths, fmt="o", label="measured")
        left.plot(bits, [r["detail"]["lloyd_max"] for r in rows], linewidth=1, label="Lloyd-Max")
        for bound, name in (("upper", "bound, Theorem 1"), ("lower", "lower bound, Theorem 3")):
            left.plot(bits, [r[bound] for r in rows], "--", label=name)
        left.set(title="Distortion times 4^bits", xlabel="bits per coordinate", ylim=(0.8, 3.0))
        for centered, name in ((0.0, "none"), (1.0, "page")):
            points = [(of["bias"], kl) for of, kl in sweep if of["centered"] == centered]
            right.plot(*zip(*points, strict=True), "o-", label=f"key_centering={name}")
        right.set_xscale("symlog", base=2, linthresh=1)
        right.set(title="Audit: biased 3-bit keys", xlabel="length of the mean key over the rest")
        right.set(yscale="log", ylabel="softmax KL, nats")
        for axes in (left, right):
            axes.legend()
