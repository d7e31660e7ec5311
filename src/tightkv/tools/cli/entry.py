"""main(): commands, whose modules are imported when asked for, and errors as exit codes."""

import argparse
import io
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

from tightkv import __version__
from tightkv.tools.cli.shared import terminal
from tightkv.tools.cli.shared.output import MissingPackageError

# name -> one line for `tightkv --help`.
COMMANDS = {
    "bench": "speed against uncompressed caches, as ratios within one run",
    "calibrate": "measure a model once: better codes of its keys, and bits of its layers",
    "completion": "a script that completes commands and options in bash or zsh",
    "doctor": "the smallest cache that keeps a model within a KL budget on your text",
    "eval": "what each config does to a model's perplexity, text and retrieval",
    "export": "a model and its compressed cache as one file that needs no Python",
    "generate": "text from a model with a compressed cache, or from both caches to compare",
    "info": "versions, devices, and which kernels can run here",
    "plan": "how much memory a model's KV cache takes, and what fits on a GPU",
    "run": "text from a model that `tightkv export` wrote",
    "serve": "vLLM's OpenAI-compatible server with a compressed cache",
    "validate": "re-derive the paper's claims and measure where the method is weak",
}
USER_ERROR, BROKEN_PIPE, INTERRUPTED = 2, 141, 130


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    terminal.open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # answers and paths may have characters that the terminal's encoding has not: \xf6 then
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_as_lines():
            code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, MissingPackageError) as error:
        if "--traceback" in argv:
            traceback.print_exc()
        message = " ".join(str(error).split())
        terminal.print_line(f"tightkv: error: {message}")
        return USER_ERROR
    finally:
        terminal.flush_streams()


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Our own warnings as one line on standard error; those of other packages as they come."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_line(message: Any, category: Any, filename: str, *more: Any, **by: Any) -> None:
            if Path(filename).is_relative_to(Path(__file__).parents[2]):
                text = " ".join(str(message).split())
                terminal.print_line(f"tightkv: warning: {text}")
            else:
                show(message, category, filename, *more, **by)

        warnings.showwarning = show_line
        yield


def _run(argv: list[str]) -> int:
    before_help = takewhile(lambda word: word not in ("-h", "--help"), argv)
    parser = build_parser(chosen=next((word for word in before_help if word in COMMANDS), None))
    try:
        args = parser.parse_args(argv)
        if args.command is None:
            parser.print_help(sys.stderr)
            return USER_ERROR
        code: int = module_of(args.command).run(args)
        return code
    except SystemExit as stop:  # --help, --version, or arguments that argparse refuses
        return stop.code if isinstance(stop.code, int) else USER_ERROR


def module_of(command: str) -> ModuleType:
    """Has add_parser and run: the module of the same name, or `command` in the folder."""
    place = import_module(f"tightkv.tools.cli.{command}")
    return import_module(f"{place.__name__}.command") if hasattr(place, "__path__") else place


class _Help(argparse.HelpFormatter):
    """argparse forgets that names of commands are indented; the longest would stand alone."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(map(len, COMMANDS)) + 4


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """The parser; only the command `chosen` has its options, which needs its module."""
    about = "A compressed KV cache for LLM inference."
    parser = argparse.ArgumentParser("tightkv", description=about, formatter_class=_Help)
    parser.add_argument("--version", action="version", version=f"tightkv {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show where in the code an error comes from"
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, line in COMMANDS.items():
        if name == chosen:
            module_of(name).add_parser(commands)
        else:
            commands.add_parser(name, help=line)
    return parser
