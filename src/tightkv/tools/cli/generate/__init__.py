"""tightkv generate."""

from tightkv.tools.cli.generate.command import add_parser, run

__all__ = ["add_parser", "run"]
