"""tightkv serve."""

from tightkv.tools.cli.serve.command import add_parser, run

__all__ = ["add_parser", "run"]
