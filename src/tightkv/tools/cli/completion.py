"""tightkv completion: words for the shell, read from the parsers of all commands."""

import argparse
from pathlib import Path

from tightkv.config import PRESETS
from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit

SHELLS = ("bash", "zsh")
_PRESET_OPTIONS = ("--preset", "--presets")
Words = dict[str, list[str]]


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        "Print a script that completes commands, options and their choices. "
        'Put  eval "$(tightkv completion bash)"  into ~/.bashrc, or zsh into ~/.zshrc.',
    )
    parser.add_argument("shell", choices=SHELLS)


def run(args: argparse.Namespace) -> int:
    words, choices = collect_words()
    data = {"schema": 1, "words": words, "choices": choices}
    emit(args, data, script(args.shell, words, choices))
    return 0


def collect_words() -> tuple[Words, Words]:
    """What may follow each command, and each option that takes one of a few words.

    A command is named by its words, "" before the first; an option by its command and itself.
    """
    from tightkv.tools.cli.entry import COMMANDS, build_parser, module_of

    words: Words = {}
    choices: Words = {}
    _collect("", build_parser(), words, choices)
    commands = argparse.ArgumentParser("tightkv").add_subparsers()
    for name in COMMANDS:
        module = module_of(name)
        module.add_parser(commands)
        parser = module.own_parser() if name == "serve" else commands.choices[name]
        _collect(name, parser, words, choices)
    return words, choices


def _collect(path: str, parser: argparse.ArgumentParser, words: Words, choices: Words) -> None:
    words[path] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            shown = [one.dest for one in action._get_subactions()]  # as --help does
            words[path] += shown
            for name in shown if path else ():
                _collect(f"{path} {name}", action.choices[name], words, choices)
            continue
        words[path] += action.option_strings or [str(choice) for choice in action.choices or ()]
        for option in action.option_strings:
            allowed = PRESETS if option in _PRESET_OPTIONS else action.choices
            if allowed:
                choices[f"{path} {option}".strip()] = [str(choice) for choice in allowed]


def script(shell: str, words: Words, choices: Words) -> str:
    """Text for `eval`; zsh reads that of bash."""

    def cases(found: Words) -> str:
        return "\n".join(f'    "{name}") words="{" ".join(few)}" ;;' for name, few in found.items())

    text = Path(__file__).with_suffix(".bash").read_text(encoding="utf-8").rstrip()
    text = text.replace("@PATHS@", "|".join(f'"{path}"' for path in words if path))
    text = text.replace("@OPTIONS@", cases(choices)).replace("@COMMANDS@", cases(words))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text
