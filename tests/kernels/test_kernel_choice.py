"""Where "auto" takes a slow implementation, it says so, once for each reason."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightkv import KVQuantConfig
from tightkv.kernels import registry
from tightkv.kernels.registry import SlowKernelsWarning, choose, select
from tightkv.pages.layout import PageLayout
from tightkv.tools.cli import main
from tiny_folder import write_tiny_folder

CPU = torch.device("cpu")
PROD = PageLayout(KVQuantConfig(key_method="prod"), 2, 64, torch.float32)
PLAIN = PageLayout(KVQuantConfig(), 2, 64, torch.float32)


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    before, registry._warned = registry._warned, set()
    yield
    registry._warned = before


@pytest.mark.parametrize("name", ["cuda", "triton", "cpu", "reference"])
def test_a_backend_knows_its_name(name: str) -> None:
    """What vLLM's layers, reports and benchmarks go by."""
    if name in ("cuda", "triton"):
        pytest.importorskip("triton")
    assert name == registry.load(name).NAME


def test_one_warning_for_each_reason() -> None:
    group = PageLayout(KVQuantConfig(value_method="group"), 2, 64, torch.float32)
    with pytest.warns(SlowKernelsWarning) as caught:
        for layout in (PROD, PROD, group, PROD):
            assert select("auto", CPU, layout).NAME == "reference"
    texts = [str(entry.message) for entry in caught]
    assert len(texts) == 2
    assert 'cpu: keys are not stored as plain "mse"' in texts[0]
    assert "TIGHTKV_KERNELS=reference" in texts[0] and "values" in texts[1]


@pytest.mark.parametrize(
    "options",
    [
        {"key_method": "prod"},
        {"value_method": "group"},
        {"key_method": "absmax"},
        {"key_bits": 3, "value_bits": 3, "outlier_share": 0.5},
        {"value_bits": 16},
        {"codebook": "gaussian"},
    ],
)
def test_configs_without_kernels_are_told(options: dict[str, Any]) -> None:
    choice = choose("auto", CPU, PageLayout(KVQuantConfig(**options), 2, 64, torch.float32))
    assert choice.name == "reference" and choice.slow is not None
    assert "plain torch, many times slower" in choice.slow


def test_nothing_is_said_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select("reference", CPU, PROD)
        monkeypatch.setenv("TIGHTKV_KERNELS", "reference")
        select("auto", CPU, PROD)


def test_nothing_is_said_of_the_best() -> None:
    choice = choose("auto", CPU, PLAIN)
    assert choice.name == "cpu" and choice.slow is None


def test_kernels_of_a_gpu_are_not_imported_for_a_cpu() -> None:
    """Triton alone takes longer to import than a short answer to compute."""
    code = """
import sys, torch
from tightkv import KVQuantConfig
from tightkv.kernels.registry import choose
from tightkv.pages.layout import PageLayout
choose("auto", torch.device("cpu"), PageLayout(KVQuantConfig(), 2, 64, torch.float32))
sys.exit("triton" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_native_library_it_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TIGHTKV_CPU_ISA", "no such")
    from tightkv.kernels.cpu import library

    library.load.cache_clear()
    try:
        choice = choose("auto", CPU, PLAIN)
    finally:
        monkeypatch.undo()
        library.load.cache_clear()
    assert choice.name == "reference" and choice.slow is not None
    assert "no such" in choice.slow


def test_a_device_without_any_kernels_is_told() -> None:
    choice = choose("auto", torch.device("meta"), PLAIN)
    assert choice.slow is not None and "no other kernels for this device" in choice.slow


@pytest.mark.gpu
def test_triton_in_place_of_cuda_is_told() -> None:
    wide = PageLayout(KVQuantConfig.preset("k8v4"), 8, 160, torch.bfloat16)
    choice = choose("auto", torch.device("cuda"), wide)
    assert choice.name == "triton" and choice.slow is not None
    assert "cuda: head_dim=160; they have 64, 80, 96, 112, 128, 192, 256" in choice.slow
    best = choose("auto", torch.device("cuda"), PageLayout(KVQuantConfig(), 8, 128))
    assert best.name == "cuda" and best.slow is None


def test_the_command_line_shows_it_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And on standard error, so that --json stays JSON."""
    model = str(write_tiny_folder(tmp_path / "tiny"))
    words = ["generate", model, "--prompt", "x", "--max-new-tokens", "2", "--json"]
    assert main([*words, "--key-method", "prod", "--dtype", "float32"]) == 0
    out, err = capfd.readouterr()
    lines = [line for line in err.splitlines() if "plain torch" in line]
    assert len(lines) == 1 and lines[0].startswith("tightkv: warning: the compressed cache runs")
    assert out.startswith("{")


@pytest.mark.vllm
def test_layers_that_cost_vllm_its_graphs_are_named() -> None:
    from tightkv.integrations.vllm.start.engine_plan import cuda_graph_obstacle

    def impl(kernel: str, capturable: bool, device: str = "cuda") -> Any:
        kernels, place = registry.load(kernel), SimpleNamespace(type=device)
        return SimpleNamespace(kernels=kernels, capturable=capturable, device=place)

    fast, plain = impl("cuda", True), impl("reference", False)
    assert cuda_graph_obstacle({"a": fast, "b": fast}) is None
    assert cuda_graph_obstacle({"a": impl("cpu", False, "cpu")}) is None
    told = cuda_graph_obstacle({"first": plain, "b": fast, "last": plain})
    assert told is not None and "2 of 3 layers (first, last)" in told
    assert "protected_bits=8" in told
    told = cuda_graph_obstacle({"a": impl("cuda", False)})
    assert told is not None and "check_finite" in told
