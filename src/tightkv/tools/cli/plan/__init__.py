"""tightkv plan."""

from tightkv.tools.cli.plan.command import add_parser, run

__all__ = ["add_parser", "run"]
