"""Parsers of commands, whose options are written one per line as --help shows them."""

import argparse
import inspect
import re
from typing import Any, TypeAlias

from tightkv.tools.cli.shared.config_flags import add_config_flags
from tightkv.tools.cli.shared.output import add_output_options
from tightkv.tools.model_loading.source import BUNDLED_NAME

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_LINE = re.compile(
    r"((?:-\w, )?--[\w-]+)(?:=(\S+))?(?: (\{.*?\}|[^ .+?!]+))?(\+|\?\S+|!| \.\.\.)?(?:  +(.*))?"
)
_TYPES = {"N": int, "X": float}


def add_command(
    commands: Commands,
    name: str,
    description: str,
    options: str = "",
    model: bool = False,
    config: bool = False,
) -> argparse.ArgumentParser:
    """A command with `options`, those of its output, and if it takes them a model and a config."""
    parser = commands.add_parser(name, description=description)
    if model:
        about = f"model folder or hub id (default: the bundled {BUNDLED_NAME})"
        parser.add_argument("model", nargs="?", help=about)
    if options:
        add_options(parser, options)
    add_output_options(parser)
    if config:
        add_config_flags(parser)
    return parser


def add_options(parser: argparse._ActionsContainer, text: str) -> None:
    """Add an option per line, as in `--windows=2 N  default: 2`.

    After the name stands its default, if it has one; then what it takes: N, a whole number, X, a
    number, WORD:int and WORD:float, the same by another name, {one,other}, one of these words, or
    any other word, a text. It is a switch if that is missing. `WORD+` takes several at once, and
    `WORD ...` may be repeated; `WORD!` must be given, and `WORD?1` means 1 if nothing follows the
    name. Two spaces begin the help, which goes on in lines that are indented.
    """
    for line in re.sub(r"\n +", " ", inspect.cleandoc(text)).split("\n"):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(f"{line!r}; give --name=DEFAULT WORD  HELP")
        name, default, word, more, about = found.groups()
        parser.add_argument(*name.split(", "), help=about, **_options(default, word, more))


def check_least(args: argparse.Namespace, **least: int) -> None:
    """Raise if an option that is given is below its least value, or no number."""
    for name, low in least.items():
        value = getattr(args, name)
        if value is not None and not low <= value < float("inf"):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {value}; it must be at least {low}")


def _options(default: str | None, word: str | None, more: str | None) -> dict[str, Any]:
    if word is None:
        return {"action": "store_true"}
    metavar, _, kind = word.partition(":")
    options: dict[str, Any] = {"type": {"int": int, "float": float}.get(kind, _TYPES.get(word))}
    if word.startswith("{"):
        options["choices"] = tuple(word[1:-1].split(","))
    else:
        options["metavar"] = metavar
    if more == "!":
        options["required"] = True
    elif more is not None and more.startswith("?"):
        options |= {"nargs": "?", "const": (options["type"] or str)(more[1:])}
    elif more is not None:
        several = {"nargs": "+"} if more == "+" else {"action": "append"}
        options |= {**several, "default": []}
    elif default is not None:
        options["default"] = (options["type"] or str)(default)
    return options
