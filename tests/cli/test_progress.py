"""Progress on standard error: lines in a file, one line that changes on a terminal."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from tightkv.tools.cli.shared import progress, terminal
from tightkv.tools.cli.shared.output import print_status
from tightkv.tools.cli.shared.progress import Working


@pytest.fixture(autouse=True)
def _a_terminal_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Standard error from now on; pytest replaces it between a fixture and its test."""
    made = Screen()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("COLUMNS", "60")
    return made


def last_line(text: str) -> str:
    """What the last line of a terminal shows."""
    return re.split(r"\r\x1b\[K|\n", text)[-1]


# --- work that cannot be counted -----------------------------------------------------------------
def test_steps_are_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    with Working("loading") as work:
        work.step("compiling")
    told = capsys.readouterr()
    assert told.err.splitlines() == ["tightkv: loading", "tightkv: compiling"] and told.out == ""


def test_a_long_step_is_named_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_REMIND_SECONDS", 0.02)
    with Working("loading"):
        time.sleep(0.2)
    assert capsys.readouterr().err.count("tightkv: loading\n") > 2


def test_quick_work_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Working("reading", delay=60):
        pass
    assert capsys.readouterr().err == ""
    with Working("reading", delay=0.02):
        time.sleep(0.2)
    assert capsys.readouterr().err == "tightkv: reading\n"


def test_a_terminal_shows_seconds_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.05)
    with Working("loading") as work:
        assert last_line(screen.getvalue()) == "tightkv: loading"
        work._start -= 3
        time.sleep(0.2)
        assert last_line(screen.getvalue()) == "tightkv: loading, 3 s"
        work.step("compiling " + 100 * "x")
        assert len(last_line(screen.getvalue())) == 59  # no wrapped lines
    assert last_line(screen.getvalue()) == "" and "\n" not in screen.getvalue()


def test_a_step_that_took_long_leaves_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    with Working("loading") as work:
        work._start -= 20
        work.step("compiling")
        work._start -= 9
    assert re.findall(r"(tightkv: \w+, \d+ s)\n", screen.getvalue()) == [
        "tightkv: loading, 20 s",
        "tightkv: compiling, 9 s",
    ]


def test_an_interrupted_step_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    with pytest.raises(KeyboardInterrupt), Working("loading") as work:
        work._start -= 20
        raise KeyboardInterrupt
    assert last_line(screen.getvalue()) == "" and "\n" not in screen.getvalue()


def test_lines_that_stay_do_not_mix_with_the_one_that_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = a_screen(monkeypatch)
    terminal.show("changing")
    print_status("staying")
    terminal.clear()
    assert re.split(r"\r\x1b\[K", screen.getvalue()) == ["", "changing", "tightkv: staying\n"]


# --- work of known steps -------------------------------------------------------------------------
def test_steps_are_counted_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", 0.05)
    with Working("windows", 4) as work:
        assert last_line(screen.getvalue()) == "tightkv: windows: 0 of 4"
        work.advance()
        work.advance(2)
        time.sleep(0.2)
        assert last_line(screen.getvalue()) == "tightkv: windows: 3 of 4"
    assert last_line(screen.getvalue()) == "" and "\n" not in screen.getvalue()


def test_counted_work_is_one_line_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Working("layers", 30) as work:
        for _ in range(30):
            work.advance()
    assert capsys.readouterr().err == "tightkv: layers: 30 of 30\n"
    monkeypatch.setattr(progress, "_REMIND_SECONDS", 0.02)
    with Working("layers", 30) as work:
        work.advance(7)
        time.sleep(0.2)
    assert capsys.readouterr().err.count("tightkv: layers: 7 of 30\n") > 2


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = a_screen(monkeypatch)
    monkeypatch.setenv("TERM", "dumb")
    with Working("loading"), Working("windows", 1) as work:
        work.advance()
    assert screen.getvalue() == "tightkv: loading\ntightkv: windows: 1 of 1\n"
