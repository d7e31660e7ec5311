"""tightkv validate."""

from tightkv.cli.validate.command import add_parser, run

__all__ = ["add_parser", "run"]
