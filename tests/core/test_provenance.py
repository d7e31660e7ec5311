"""Where a row of results comes from."""

import subprocess
from pathlib import Path

import pytest

from tightkv.tools import rows

PACKAGE = Path(rows.__file__).resolve().parents[1]


@pytest.fixture
def git(monkeypatch):
    """What git answers; None is a failure."""
    answers = {"--show-toplevel": str(PACKAGE.parents[1]), "HEAD": "abc", ":/src": ""}

    def run(command, **_):
        answer = answers[command[-1]]
        return subprocess.CompletedProcess(command, int(answer is None), answer or "")

    monkeypatch.delenv("SOURCE_COMMIT", raising=False)
    monkeypatch.setattr(rows.subprocess, "run", run)
    return answers


@pytest.mark.parametrize(
    "status,said",
    [("", "abc"), (" M src/tightkv/paged/cache.py", "abc-modified"), (None, "abc-unchecked")],
)
def test_a_changed_tree_is_not_taken_for_its_commit(git, status, said):
    git[":/src"] = status
    assert rows.source_commit() == said


def test_a_package_inside_another_repository_has_no_commit(git):
    git["--show-toplevel"] = "/elsewhere"
    assert rows.source_commit() is None
    git["--show-toplevel"] = None
    assert rows.source_commit() is None


def test_what_is_said_wins(git, monkeypatch):
    """A copy of a tree may carry the git of another state."""
    monkeypatch.setenv("SOURCE_COMMIT", "def")
    assert rows.source_commit() == "def"
