"""tightkv eval."""

from tightkv.tools.cli.eval.command import add_parser, run

__all__ = ["add_parser", "run"]
