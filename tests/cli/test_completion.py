"""What a shell completes."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess

import pytest

from tightkv.config import PRESETS
from tightkv.tools.cli import COMMANDS, main
from tightkv.tools.cli.completion import SHELLS, collect_words, script

WORDS, CHOICES = collect_words()
SCRIPT = script("bash", WORDS, CHOICES)


def completed(line: str) -> list[str]:
    """What bash proposes for the last word of the line."""
    words = line.split(" ")
    asked = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _tightkv"
    told = f"{SCRIPT}\n{asked}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    run = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True, cwd="/")
    assert run.stderr == ""
    return run.stdout.split()


pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


def test_commands() -> None:
    assert completed("tightkv ge") == ["generate"]
    assert set(COMMANDS) < set(completed("tightkv "))
    assert "--version" in completed("tightkv --")
    assert completed("tightkv bench en") == ["engine"]
    assert not {"serve", "store", "extend"} & set(completed("tightkv bench "))  # have gone
    assert completed("tightkv completion z") == ["zsh"]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("tightkv generate --max", "--max-new-tokens"),
        ("tightkv generate model --comp", "--compare"),
        ("tightkv serve --exact-r", "--exact-rows"),
        ("tightkv serve --no-prot", "--no-protect-keys"),
        ("tightkv bench decode --json-", "--json-schema"),
    ],
)
def test_options(line: str, word: str) -> None:
    assert completed(line) == [word]


def test_presets_and_choices() -> None:
    assert completed("tightkv generate --preset ") == list(PRESETS)
    assert completed("tightkv eval --presets k2") == ["k2v2"]
    assert completed("tightkv generate --dtype fl") == ["float32", "float16"]


def test_else_files() -> None:
    assert completed("tightkv plan et") == ["etc"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_command_prints_it(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out == script(shell, WORDS, CHOICES) + "\n"
    assert main(["completion", shell, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["words"] == WORDS


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_zsh_reads_it() -> None:
    told = f"autoload -U compinit; compinit -D; {script('zsh', WORDS, CHOICES)}"
    run = subprocess.run(["zsh", "-fc", told], capture_output=True, text=True, check=True)
    assert run.stderr == ""
