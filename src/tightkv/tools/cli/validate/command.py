"""tightkv validate: measure every claim of the method, then audit where it is weak."""

from __future__ import annotations

import argparse

from tightkv.tools.cli.shared.options import add_options
from tightkv.tools.cli.shared.output import add_output_options, check_plot, emit
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.cli.validate.report import as_text, draw


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "validate",
        description="Measure the claims of the method on the CPU, and audit where it is weak. "
        "Exit code 1 if a claim fails.",
    )
    add_options(
        parser,
        """
        --quick  fewer samples: seconds, not minutes
        --seed=0 SEED:int  of every random input (default 0)
        --dim=128 DIM:int  head dimension (default 128)
        """,
    )
    add_output_options(parser, plot="draw distortion against bits, and KL against key bias")


def run(args: argparse.Namespace) -> int:
    from tightkv.tools import validate

    options = validate.Options(seed=args.seed, dim=args.dim, quick=args.quick)
    if args.plot:
        check_plot(args.plot)
    with Working("validating", line_seconds=10) as work:
        report = validate.run(options, work.step)
    data = report.to_dict()
    emit(args, data, as_text(data))
    if args.plot:
        draw(args.plot, data)
    return 0 if report.passed else 1
