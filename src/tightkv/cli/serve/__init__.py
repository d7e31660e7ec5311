"""tightkv serve."""

from tightkv.cli.serve.command import add_parser, run

__all__ = ["add_parser", "run"]
