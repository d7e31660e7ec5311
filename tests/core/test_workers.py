"""Tests that share something costly share a worker."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers import FILES, FUNCTIONS, group_of, make_scheduler, rank

FILES_OF_TESTS = sorted(Path(__file__).parents[1].glob("*/test_*.py"))


def test_the_tests_are_there() -> None:
    assert set(FILES) <= {path.name for path in FILES_OF_TESTS}
    text = "".join(path.read_text(encoding="utf-8") for path in FILES_OF_TESTS)
    assert all(f"def {name}(" in text for name in FUNCTIONS)


def test_groups() -> None:
    one, two = (f"tests/test_vllm_engine.py::{name}" for name in ("test_a[x]", "test_b"))
    assert group_of(one) == group_of(two) == "vllm engine"
    assert group_of("tests/test_export.py::test_sanitizers_find_nothing") == "sanitizers"
    assert group_of("tests/test_export.py::test_a[1]") == "tests/test_export.py::test_a[1]"


def test_groups_begin_first_and_slow_tests_next() -> None:
    names = ["a.py::test", "b.py::test", "test_wheel.py::test_a", "test_vllm_sealing.py::test_a"]
    ranks = [rank(f"tests/cli/{name}", slow=name[0] == "b") for name in names]
    assert sorted(ranks, reverse=True) == ranks and len(set(ranks)) == 4


def costly_fixtures(path: Path) -> list[str]:
    """Fixtures of a module in which a program or an engine is run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("scope='module'" in ast.unparse(x) for x in node.decorator_list)
        and any(word in ast.unparse(node) for word in ("subprocess", "Engines(", "main("))
    ]


@pytest.mark.parametrize("path", FILES_OF_TESTS, ids=lambda path: path.name)
def test_modules_with_costly_fixtures_have_a_group(path: Path) -> None:
    assert not costly_fixtures(path) or path.name in FILES


@pytest.mark.parametrize(("dist", "ours"), [("loadgroup", True), ("load", False)])
def test_the_scheduler_is_for_make_test(dist: str, ours: bool, pytestconfig: pytest.Config) -> None:
    tx = SimpleNamespace(getoption=lambda name: dist, option=pytestconfig.option)
    tx.getvalue = lambda name: ["popen"]
    assert (make_scheduler(tx, None) is not None) is ours
