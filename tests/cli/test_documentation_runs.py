"""Code and commands of README and docs: run where a CPU does it in seconds, else parsed.

Blocks say what they are: bash, python or json. A block without a name is output or a drawing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tightkv import KVQuantConfig, __version__
from tightkv.integrations.vllm.options import engine_options
from tightkv.moved import MOVED
from tightkv.tools.cli import COMMANDS, build_parser, main
from tightkv.tools.cli.serve.command import SERVER
from tightkv.tools.cli.shared.server_file import read_server_file
from tightkv.tools.eval.text import Text, default_texts

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
PROJECT = (ROOT / "pyproject.toml").read_text()
MODEL_NAMES = ("MODEL", "path/to/model", "HuggingFaceTB/SmolLM2-135M-Instruct")
# Commands of ours that are quick enough to run; the others are parsed.
RUN = ("info", "plan", "serve")
# What examples are run with instead: a tiny model, short texts.
SMALLER = {
    "load_model()": 'load_model("path/to/model")',
    "default_texts()": "short_texts()",
    "tokens=2048, count=8": "tokens=96, count=2",
    "Schedule(batch=8)": "Schedule(batch=2, prefill=64)",
    "tokens=512, count=8": "tokens=300, count=2",
}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, found.start()) + 1
            yield Block(str(page.relative_to(ROOT)), line, found[1], found[2])


def of(language: str) -> list[Any]:
    found = [block for block in blocks() if block.language == language]
    return [pytest.param(block, id=f"{block.page}:{block.line}") for block in found]


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a shell's text, one at a time, without variables before them."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                if words:
                    yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z_]+=\S*", word):
                words.append(word)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that commands and examples name."""
    pytest.importorskip("transformers")
    from tiny_folder import write_tiny_folder

    folder = tmp_path_factory.mktemp("docs")
    model = write_tiny_folder(folder / "model", max_position_embeddings=1024)
    for name in MODEL_NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(model)
    (folder / "path/to/config.json").write_text((model / "config.json").read_text())
    (folder / "mine.json").write_text('{"preset": "k3v3"}')
    return folder


# --- commands ------------------------------------------------------------------------------------
@pytest.mark.parametrize("block", of("bash"))
def test_commands(
    block: Block, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tiny)
    for words in commands(block.text):
        check_command(words)
    assert "error" not in capsys.readouterr().err


def check_command(words: list[str]) -> None:
    program, *rest = words
    if program == "tightkv":
        check_ours(rest)
    elif program == "make":
        assert [word for word in rest if "=" not in word and word not in TARGETS] == []
    elif program == "pip":
        for extras in re.findall(r"^\.\[(.*)\]$", "\n".join(rest), re.MULTILINE):
            for extra in extras.split(","):
                assert re.search(rf"^{extra} = \[", PROJECT, re.MULTILINE), extra
        assert "tightkv" not in rest, "there is no release; install from a clone"
    elif program == "python" and rest[0] == "-m":
        assert rest[1] == SERVER or importlib.util.find_spec(rest[1]) is not None, rest[1]
    elif program == "python":
        assert (ROOT / rest[0]).is_file() or rest[0].startswith("my_"), rest[0]
        if rest[0].startswith("benchmarks/"):
            source = (ROOT / rest[0]).read_text()
            assert [word for word in rest if word.startswith("--") and word not in source] == []
    elif program == "vllm":
        assert rest[:2] == ["bench", "serve"], words
        add_cli_args = pytest.importorskip("vllm.benchmarks.serve").add_cli_args
        parser = argparse.ArgumentParser(allow_abbrev=False)
        add_cli_args(parser)
        parser.parse_args(rest[2:])
    elif program == "lmcache":  # tests/vllm/test_lmcache.py starts it
        assert rest[0] == "server", words
    else:
        assert program == "cat", words


def check_ours(words: list[str]) -> None:
    command = words[0]
    if command in RUN:
        assert main([*words, *(["--dry-run"] if command == "serve" else [])]) == 0, words
    else:
        parsed = build_parser(chosen=command).parse_args(words)  # exits with words it refuses
        assert parsed.command == command


def test_the_reader_of_commands_sees_each_one() -> None:
    text = "A=1 tightkv info | cat 'a b' && make x  # no\ntightkv \\\n plan &\n"
    assert list(commands(text)) == [
        ["tightkv", "info"],
        ["cat", "a b"],
        ["make", "x"],
        ["tightkv", "plan"],
    ]
    for words in (["tightkv", "eval", "--wrong"], ["make", "nothing"], ["pip", "install", ".[x]"]):
        with pytest.raises((AssertionError, SystemExit)):
            check_command(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist(page: Path) -> None:
    text = re.sub(r"^(```.*?^```|#.*?)$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in re.findall(r"`((?:tightkv|make) [^`]+)`", text):
        program, word = line.split()[:2]
        if word.startswith(("-", "k")):  # tightkv --version, and a line that starts with a config
            continue
        assert word in (COMMANDS if program == "tightkv" else TARGETS), line


@pytest.mark.parametrize("block", of(""))
def test_blocks_of_commands_have_a_name(block: Block) -> None:
    for line in block.text.splitlines():
        words = line.split()
        assert words[:1] not in (["pip"], ["make"], ["python"]), line
        assert not (words[:1] == ["tightkv"] and words[1] in COMMANDS), line


# --- JSON and Python -----------------------------------------------------------------------------
@pytest.mark.parametrize("block", of("json"))
def test_configs(block: Block) -> None:
    assert KVQuantConfig.parse(json.loads(block.text)).compresses
    assert read_server_file(block.text).model is not None


def short_texts() -> list[Text]:
    return [dataclasses.replace(text, content=text.content[:5000]) for text in default_texts()]


@pytest.mark.parametrize("page", sorted({param.values[0].page for param in of("python")}))
def test_examples(page: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page belong together: a later one uses what an earlier one made."""
    monkeypatch.chdir(tiny)
    engines: list[dict[str, Any]] = []
    names: dict[str, Any] = {
        "vllm": SimpleNamespace(LLM=lambda model, **options: engines.append(options)),
        "model": None,
        "short_texts": short_texts,
    }
    for block in blocks():
        if block.page == page and block.language == "python":
            text = block.text
            for written, smaller in SMALLER.items():
                text = text.replace(written, smaller)
            exec(compile(text, f"{page}:{block.line}", "exec"), names)
    for options in engines:
        assert engine_options(options["additional_config"], env={}) is not None
    if page == "README.md":
        assert names["cache"].get_seq_length() > 100


def test_examples_are_made_smaller_only_where_they_say_so() -> None:
    text = "".join(block.text for block in blocks() if block.language == "python")
    assert [written for written in SMALLER if written not in text] == []


# --- links ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> list[str]:
    """What GitHub and the site call the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_page_is_in_both_lists() -> None:
    """That of index.md, and the sidebar of the site."""
    listed = (ROOT / "docs" / "index.md").read_text()
    sidebar = re.search(
        r"^CONTENTS = \{(.*?)^\}", (ROOT / "docs" / "conf.py").read_text(), re.M | re.S
    )
    assert sidebar is not None
    pages = [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "index.md"]
    assert [name for name in pages if f"({name})" not in listed] == []
    assert {f"{name}.md" for name in re.findall(r"[\w-]+(?=[ \"])", sidebar[1])} >= set(pages)


def moved_modules() -> str:
    """The table of docs/python.md: modules that moved together in a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for old, new in MOVED.items():
        before, _, name = old.rpartition(".")
        after, _, new_name = new.rpartition(".")
        changed = "" if new_name == name else f".{new_name}"
        groups.setdefault((before, after + changed), []).append(name)
    lines = []
    for (before, after), names in groups.items():
        told = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {f'`{before}`: ' if before else ''}{told} | `{after}` |")
    return "\n".join(lines)


def test_every_moved_module_is_in_the_table() -> None:
    assert moved_modules() in (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


def test_the_citation_is_of_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", text, re.MULTILINE)[1] == __version__  # type: ignore[index]


def test_the_hooks_are_the_checks_of_make_lint() -> None:
    hooks = re.findall(
        r"entry: \.venv/bin/([\w-]+)", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    lint = re.search(r"^lint:.*?^$", (ROOT / "Makefile").read_text(), re.MULTILINE | re.DOTALL)
    assert lint is not None
    assert hooks == re.findall(r"\$\(BIN\)/([\w-]+)", lint[0])
