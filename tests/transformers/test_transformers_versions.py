"""Tests that tell most about transformers, under the oldest and the newest one supported.

`make venv` puts both beside the one that vLLM allows; each runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/core/test_model_shape_transformers.py::test_shapes_are_what_a_real_cache_holds",
    "tests/transformers/test_models.py::test_a_folder_is_loaded_ready_for_the_compressed_cache",
    "tests/transformers/test_saving.py::test_resuming_from_a_file_gives_the_same_tokens[qwen3_next]",
    "tests/transformers/test_transformers.py::test_assisted_decoding_crops_right",
    "tests/transformers/test_transformers.py::test_beam_search_follows_the_beams",
    "tests/transformers/test_transformers.py::test_families",
    "tests/transformers/test_transformers.py::test_other_implementations_dequantize_and_warn_once",
    "tests/transformers/test_transformers_atomic.py::test_a_cache_that_compresses_nothing_does_what_transformers_does",
)

PROGRAM = """
import sys, pytest, transformers
assert transformers.__version__ == sys.argv[1], transformers
sys.exit(pytest.main(sys.argv[2:]))
"""


def pinned(end: str) -> str:
    """The version of transformers in the constraints file of this end."""
    text = (ROOT / f"constraints-transformers-{end}.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^transformers==(.+)$", text, re.MULTILINE)
    return str(version)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["oldest", "newest"])
def test_at_both_ends_of_transformers(end: str) -> None:
    folder = Path(sys.prefix) / f"transformers-{end}"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: `make venv` installs it")
    paths = [str(folder), str(ROOT / "src"), str(ROOT / "tests" / "support")]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, pinned(end), "-q", *TESTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
