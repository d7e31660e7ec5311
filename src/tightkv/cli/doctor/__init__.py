"""tightkv doctor."""

from tightkv.cli.doctor.command import add_parser, run

__all__ = ["add_parser", "run"]
