"""The sdist, and the wheels made of it with compilers and without: what is in them runs."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import tightkv

pytest.importorskip("setuptools.command.bdist_wheel")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "tightkv"
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
TOP_FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "Makefile")
NOT_COPIED = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")

EXAMPLE = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
import tightkv
from tightkv import TightCache
from tightkv.kernels.cpu import backend as cpu

torch.manual_seed(0)  # a random model may end its answer at once
heads = dict(num_attention_heads=4, num_key_value_heads=2)
config = LlamaConfig(hidden_size=128, num_hidden_layers=1, vocab_size=97, **heads)
model = AutoModelForCausalLM.from_config(config, attn_implementation="tightkv").eval()
cache = TightCache("k4v4", model=model)
inputs = torch.randint(3, 97, (1, 200))
out = model.generate(inputs, past_key_values=cache, max_new_tokens=4, do_sample=False)
assert out.shape == (1, 204) and cache.get_seq_length() == 203
print(tightkv.__file__, cpu.unavailable("cpu"), sep="\\n")
"""
KERNELS = 'from tightkv.kernels.cpu import backend as cpu; print(cpu.unavailable("cpu"))'


def run(words: list[str], cwd: Path, **env: str) -> str:
    """What a command prints that does not see the source tree."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        words, cwd=cwd, env=plain | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(what: str, source: Path, out: Path, **env: str) -> Path:
    out.mkdir()
    run([sys.executable, "-c", BUILD, what, str(out)], source, **env)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unpacked sdist. It is made of a copy, because a build leaves files beside its sources."""
    folder = tmp_path_factory.mktemp("source")
    copy = folder / "copy"
    for name in ("src", "docs", "benchmarks", "examples", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=NOT_COPIED)
    for name in TOP_FILES:
        shutil.copy(ROOT / name, copy)
    with tarfile.open(build("build_sdist", copy, folder / "sdist")) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked" / f"tightkv-{tightkv.__version__}"


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The compilers without their optimization, which takes most of a build's time."""
    folder, found = tmp_path_factory.mktemp("compilers"), {}
    for variable, name in (("CC", "cc"), ("CXX", "c++")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {name} "$@" -O0\n')
        script.chmod(0o755)
        found[variable] = str(script) if shutil.which(name) else name
    return found


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment that also sees the packages of this one, but not its tightkv.

    A path in a .pth file is searched last, and .pth files in it (editable installs) are not read.
    """
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return folder


def test_the_sdist_has_what_tests_and_documentation_need(source: Path) -> None:
    for name in (*TOP_FILES, "docs/log.md", "tests/conftest.py", "tests/support/cuda_on_host.h"):
        assert (source / name).is_file(), name
    assert list((source / "benchmarks" / "results").glob("*.jsonl"))
    assert not list(source.rglob("*.so"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_wheel_runs_outside_the_source_tree(
    source: Path, env: Path, compilers: dict[str, str], tmp_path: Path
) -> None:
    wheel = build("build_wheel", source, tmp_path / "wheel", **compilers)
    assert wheel.name.startswith(f"tightkv-{tightkv.__version__}-py3-none-linux_")
    names = set(zipfile.ZipFile(wheel).namelist())
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    kept = (x for x in files if x.suffix not in (".so", ".pyc") and x.name != ".clang-format")
    assert {str(path.relative_to(ROOT / "src")) for path in kept} <= names
    assert "tightkv/kernels/cpu/_native.so" in names
    assert "tightkv/export/_operator.so" in names or shutil.which("c++") is None
    assert not [name for name in names if name.startswith("tests")]

    python = env / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], tmp_path)
    file, missing = run([str(python), "-c", EXAMPLE], tmp_path).splitlines()[-2:]
    assert Path(file).is_relative_to(env) and missing == "None"
    command = [str(env / "bin" / "tightkv"), "--version"]
    assert run(command, tmp_path) == f"tightkv {tightkv.__version__}\n"


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_without_a_cxx_compiler_the_kernels_are_built(
    source: Path, compilers: dict[str, str], tmp_path: Path
) -> None:
    for operator in source.glob("build/lib*/tightkv/export/*.so"):  # the kernels are not built anew
        operator.unlink()
    without = {**compilers, "CXX": str(tmp_path / "missing")}
    wheel = build("build_wheel", source, tmp_path / "wheel", **without)
    names = zipfile.ZipFile(wheel).namelist()
    assert [name for name in names if name.endswith(".so")] == ["tightkv/kernels/cpu/_native.so"]


@pytest.mark.thorough
def test_without_a_compiler_the_wheel_is_pure_python(source: Path, tmp_path: Path) -> None:
    shutil.rmtree(source / "build", ignore_errors=True)
    wheel = build("build_wheel", source, tmp_path / "wheel", CC=str(tmp_path / "missing"))
    assert wheel.name == f"tightkv-{tightkv.__version__}-py3-none-any.whl"
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    told = run([sys.executable, "-c", KERNELS], tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    assert "not built: the install found no C compiler" in told
