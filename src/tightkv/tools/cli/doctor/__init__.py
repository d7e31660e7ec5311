"""tightkv doctor."""

from tightkv.tools.cli.doctor.command import add_parser, run

__all__ = ["add_parser", "run"]
