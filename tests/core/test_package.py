"""The installed package: its version, its dependencies, its command, and a light import."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import tightkv

ROOT = Path(__file__).parents[2]
HEAVY = ("gguf", "lm_eval", "matplotlib", "numpy", "scipy", "transformers", "triton", "vllm")

# torch may bring some of these itself; only what tightkv adds counts.
NEW_MODULES = """
import sys
import torch
before = set(sys.modules)
import tightkv
print(*(set(sys.modules) - before))
"""


def test_version_is_the_installed_one() -> None:
    assert tightkv.__version__ == metadata.version("tightkv")


def test_the_changelog_begins_with_this_version() -> None:
    """`## X.Y.Z (YYYY-MM-DD)`, or (unreleased); each version once, the newest first."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    found = [
        re.fullmatch(r"(\d+)\.(\d+)\.(\d+) \((\d{4}-\d\d-\d\d|unreleased)\)", h) for h in heads
    ]
    assert all(found), heads
    versions = [tuple(map(int, head.groups()[:3])) for head in found if head]
    assert ".".join(map(str, versions[0])) == tightkv.__version__
    assert versions == sorted(set(versions), reverse=True)
    assert all("unreleased" not in head for head in heads[1:])


def test_torch_is_the_only_base_dependency() -> None:
    requirements = metadata.requires("tightkv") or []
    assert [line for line in requirements if "extra ==" not in line] == ["torch>=2.8"]


def test_import_adds_no_heavy_module() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NEW_MODULES], capture_output=True, text=True, check=True
    )
    added = {name.partition(".")[0] for name in run.stdout.split()}
    assert "tightkv" in added
    assert added.isdisjoint(HEAVY), sorted(added & set(HEAVY))


def test_console_script_points_at_the_cli() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="tightkv")
    assert script.value == "tightkv.tools.cli:main"


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI must have everything")
def test_ci_skips_nothing_but_gpus() -> None:
    """What is missing is skipped elsewhere; here a broken install or build must be noticed."""
    import cuda_on_host
    from tightkv.export import operator_library
    from tightkv.kernels.cpu import backend as cpu

    assert operator_library().is_file()
    assert cuda_on_host.COMPILER is not None
    assert cpu.unavailable("cpu") is None
    wanted = ["lm_eval", "datasets", "matplotlib", "transformers", "triton"]
    wanted += ["vllm"] if sys.version_info >= (3, 11) else []
    assert [name for name in wanted if importlib.util.find_spec(name) is None] == []
