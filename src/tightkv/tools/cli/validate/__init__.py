"""tightkv validate."""

from tightkv.tools.cli.validate.command import add_parser, run

__all__ = ["add_parser", "run"]
