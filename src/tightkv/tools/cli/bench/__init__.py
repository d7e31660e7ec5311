"""tightkv bench."""

from tightkv.tools.cli.bench.command import add_parser, run

__all__ = ["add_parser", "run"]
