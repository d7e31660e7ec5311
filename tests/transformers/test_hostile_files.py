"""Files written by an attacker end in a clear error or a cache that works, never in bad memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sanitizers
from tightkv.kernels.cpu import backend as cpu
from tightkv.kernels.cpu import library

_MISSING = cpu.unavailable("cpu")
pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=f"native CPU kernels: {_MISSING}"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # 2,000 cases take a minute and a half where a core is free
]
PROGRAM = Path(__file__).parents[1] / "support" / "hostile_files.py"
SOME, ALL, MANY = 150, 2_000, 10_000  # cases: by default, with --all-shapes, and to explore
# Stacks of allocations and a long quarantine cost more time than the cases themselves.
ASAN = f"{sanitizers.ASAN}:detect_leaks=0:malloc_context_size=2:quarantine_size_mb=16"


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory, pytestconfig):
    """What a Python with AddressSanitizer in the native kernels said, of how many cases."""
    folder = tmp_path_factory.mktemp("asan")
    built, progress = sanitizers.build_library(folder), folder / "progress"
    compiler = sanitizers.find_compiler()
    # Without the C++ library beside it, AddressSanitizer ends at the first exception in C++.
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    preload = " ".join([*libraries, *os.environ.get("LD_PRELOAD", "").split()])
    environment = {
        **os.environ,
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": ASAN,
        "OMP_NUM_THREADS": "1",
        library.ISA_VARIABLE: sanitizers.isas()[0],
    }
    count = ALL if pytestconfig.getoption("--all-shapes") else SOME
    count = MANY if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else count
    command = [sys.executable, str(PROGRAM), "--library", str(built), "--count", str(count)]
    command += ["--progress", str(progress), "--break-a-table"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    case = progress.read_text().strip() if progress.is_file() else "none"
    ended = re.search(r"^(\d+) loaded, (\d+) refused$", done.stdout, re.MULTILINE)
    assert ended, f"at case {case} of {PROGRAM.name}:\n{done.stderr[-4000:]}"
    return done, count, ended


def test_the_sanitizer_sees_a_page_that_is_not_there(sanitized):
    done, _, _ = sanitized
    assert done.returncode and "AddressSanitizer: heap-buffer-overflow" in done.stderr, done.stderr


def test_mutated_files_end_in_errors_or_working_caches(sanitized):
    _, count, ended = sanitized
    loaded, refused = map(int, ended.groups())
    assert loaded + refused == count
    assert loaded > count // 20 and refused > count // 2  # both ends are tried
