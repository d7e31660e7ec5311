"""Options written as help shows them."""

from __future__ import annotations

import argparse

import pytest

from tightkv.tools.cli.shared.options import add_options


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="p")
    add_options(made, text)
    return made


OPTIONS = """
    --windows=2 N  default: 2
    -o, --out FILE  where it goes
    --share=1 SHARE:float
    --text FILE ...  UTF-8, and
        so on (100%%)
    --contexts N+
    --kind {one,other}  which
    --raw
"""


def test_what_is_not_given_has_its_default() -> None:
    assert vars(parser(OPTIONS).parse_args([])) == {
        **{"windows": 2, "out": None, "share": 1.0, "text": [], "contexts": []},
        **{"kind": None, "raw": False},
    }


def test_words_have_their_types() -> None:
    words = ["--windows", "7", "-o", "8", "--share", "0.5", "--text", "a", "--text", "b"]
    words += ["--contexts", "3", "4", "--kind", "other", "--raw"]
    assert vars(parser(OPTIONS).parse_args(words)) == {
        **{"windows": 7, "out": "8", "share": 0.5, "text": ["a", "b"], "contexts": [3, 4]},
        **{"kind": "other", "raw": True},
    }
    for refused in (["--windows", "x"], ["--kind", "third"], ["--share", "half"]):
        with pytest.raises(SystemExit):
            parser(OPTIONS).parse_args(refused)


def test_options_that_must_be_given_and_values_that_may_be_left_out() -> None:
    made = parser("--output FOLDER!  new\n--long TOKENS:int?1500  1500 if alone")
    assert vars(made.parse_args(["--output", "a"])) == {"output": "a", "long": None}
    assert made.parse_args(["--output", "a", "--long"]).long == 1500
    assert made.parse_args(["--output", "a", "--long", "7"]).long == 7
    assert "--output FOLDER" in made.format_help() and "[--long [TOKENS]]" in made.format_help()
    with pytest.raises(SystemExit):
        made.parse_args(["--long"])


def test_lists_of_two_runs_are_two() -> None:
    made = parser("--text FILE ...")
    assert made.parse_args(["--text", "a"]).text == ["a"] and made.parse_args([]).text == []


def test_help_is_what_was_written() -> None:
    told = parser(OPTIONS).format_help()
    assert "--text FILE" in told and "UTF-8, and so on (100%)" in " ".join(told.split())
    assert "-o FILE, --out FILE" in told or "-o, --out FILE" in told


def test_a_line_that_is_no_option() -> None:
    with pytest.raises(ValueError, match=r"'windows N'; give --name=DEFAULT WORD"):
        parser("windows N")
