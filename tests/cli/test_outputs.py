"""Results that cannot be written or printed: said before the work, and nothing measured is lost."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightkv.tools.cli import main
from tiny_folder import write_tiny_folder

NOWHERE = "/proc/tightkv"  # a folder where nobody can make files
FULL = "/dev/full"  # opens, and takes nothing
pytestmark = pytest.mark.skipif(
    not Path(FULL).is_char_device() or not Path("/proc/self").is_dir(), reason="not on Linux"
)
TEXT = "the quick brown fox jumps over the lazy dog. " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("outputs")
    (where / "text.txt").write_text(TEXT)
    return write_tiny_folder(where / "model", max_position_embeddings=1024)


def with_text(folder: Path, *words: str) -> list[str]:
    return [words[0], str(folder), "--text", str(folder.parent / "text.txt"), *words[1:]]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("calibrate", ["-o", f"{NOWHERE}.safetensors"]),
        ("doctor", ["--out", f"{NOWHERE}.json"]),
        ("eval.runner", ["--out", f"{NOWHERE}.jsonl"]),
        ("eval.runner", ["--results", f"{NOWHERE}.jsonl"]),
        ("eval.runner", ["--report", NOWHERE]),
        ("export", ["--output", NOWHERE]),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    module: str,
    words: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(importlib.import_module(f"tightkv.tools.cli.{module}"), "load_for", load)
    assert main([module.partition(".")[0], str(folder), *words]) == 2
    error = capsys.readouterr().err
    assert NOWHERE in error and "cannot be written" in error


def test_bench_refuses_it_before_it_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["bench", "decode", "--device", "cpu", "--tokens", "100000000"]
    assert main([*words, "--out", f"{NOWHERE}.jsonl"]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "words"),  # refused after the imports, before the model is loaded
    [
        ("doctor", ["--window", "20"]),
        pytest.param("eval", ["--window", "20", "--prefill", "3"], marks=pytest.mark.thorough),
        pytest.param("calibrate", ["--tokens", "1"], marks=pytest.mark.thorough),
    ],
)
def test_standard_error_has_no_lines_of_other_packages(
    folder: Path, command: str, words: list[str]
) -> None:
    """torchao, which transformers imports, logs what it cannot load."""
    run = [sys.executable, "-m", "tightkv", command, str(folder), *words]
    said = subprocess.run(run, capture_output=True, text=True, timeout=250).stderr.splitlines()
    assert len(said) == 1 and said[0].startswith("tightkv: error: "), said


def test_bench_prints_rows_that_a_full_disk_does_not_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["bench", "decode", "--device", "cpu", "--tokens", "128", "--repeats", "1", "--json"]
    assert main([*words, "--heads", "2", "--kv-heads", "1", "--out", FULL]) == 2
    said = capsys.readouterr()
    assert len(json.loads(said.out)["rows"]) == 1 and "No space left" in said.err


def test_doctor_prints_what_a_full_disk_does_not_take(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "config.json"
    out.symlink_to(FULL)
    sizes = ["--window", "480", "--windows", "1", "--budget", "5", "--preset", "k8v8"]
    assert main(with_text(folder, "doctor", *sizes, "--json", "--out", str(out))) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["chosen"] == "k8v8" and "No space left" in said.err


def test_calibrate_writes_elsewhere_what_a_full_disk_does_not_take(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    out = tmp_path / "m.safetensors"
    out.symlink_to(FULL)
    assert main(with_text(folder, "calibrate", "--tokens", "1024", "--json", "-o", str(out))) == 2
    said = capsys.readouterr()
    written = Path(json.loads(said.out)["file"])
    assert written.is_file() and written.parent != tmp_path and out.is_symlink()
    assert "No space left" in said.err and f"the calibration is in {written}" in said.err


def test_eval_goes_on_where_results_cannot_be_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--tasks", "quality", "--window", "300", "--windows", "1", "--prefill", "40"]
    words = with_text(folder, "eval", *sizes, "--presets", "k2v2", "--json", "--results", FULL)
    assert main([*words, "--out", FULL]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["rows"][0]["quality"]["kl"] > 0
    assert said.err.count("results are not stored in /dev/full") == 1
    assert "tightkv: error: [Errno 28] No space left" in said.err


# --- standard streams ---
WORDS = {
    "prints": ["run", "--json-schema"],
    "fails": ["run", "nothing", "--prompt", "a"],
}


def run(words: str, closed: str = "", **streams: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tightkv", *WORDS[words]]
    shell = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run(shell, text=True, timeout=240, check=False, **piped)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("words", "code", "closed"),
    [
        ("prints", 0, "<&- >&- 2>&-"),
        ("fails", 2, "2>&-"),
        pytest.param("prints", 0, ">&-", marks=pytest.mark.sampled),
        pytest.param("prints", 0, "2>&-", marks=pytest.mark.sampled),
        pytest.param("fails", 2, ">&-", marks=pytest.mark.sampled),
        pytest.param("fails", 2, "<&- >&- 2>&-", marks=pytest.mark.sampled),
    ],
)
def test_closed_streams(words: str, code: int, closed: str) -> None:
    done = run(words, closed)
    assert done.returncode == code
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert bool(done.stdout) == (words == "prints" and ">&-" not in closed.split())


@pytest.mark.parametrize(
    ("words", "stream", "code"),
    [("prints", "stdout", 141), ("prints", "stderr", 0), ("fails", "stderr", 2)],
)
def test_a_reader_that_has_gone(words: str, stream: str, code: int) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = run(words, **{stream: writes})
    finally:
        os.close(writes)
    assert done.returncode == code
    assert "Traceback" not in (done.stderr or "") and "Exception" not in (done.stderr or "")


def test_a_full_disk_takes_no_output() -> None:
    with open(FULL, "w") as full:
        done = run("prints", stdout=full)
    assert done.returncode == 2
    assert done.stderr == "tightkv: error: [Errno 28] No space left on device\n"
