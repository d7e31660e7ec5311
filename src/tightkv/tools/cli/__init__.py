"""The command `tightkv`: a module or a folder per command, and `shared` for what they share."""

from tightkv.tools.cli.entry import COMMANDS, build_parser, main

__all__ = ["COMMANDS", "build_parser", "main"]
