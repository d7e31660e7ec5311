"""What every test shares: a clean environment, fixed seeds, and skips for absent hardware."""

from __future__ import annotations

import gc
import importlib.util
import os
import zlib
from typing import Any

import pytest
import torch
from hypothesis import settings

# Nothing is downloaded, nothing needs a display, and the caller's TIGHTKV_* must not leak in.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
for _name in [name for name in os.environ if name.startswith("TIGHTKV_")]:
    del os.environ[_name]

# Triton decides when it is imported whether kernels are compiled or interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# "repeatable" tries the same examples every time; "explore" draws new ones.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


# Kernels of GPUs are interpreted where there is none, and all have many shapes.
_SAMPLED = ("test_kernels_cpu.py", "test_kernels_cuda.py", "test_kernels_triton.py")
_SAMPLE = 32  # one case of so many


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-shapes",
        action="store_true",
        help=f"run all cases of sampled tests, not every {_SAMPLE}th; the default with a GPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all-shapes"):
        os.environ["ALL_SHAPES"] = "1"  # for what is decided when modules are imported


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    import workers

    return workers.make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out most shapes of kernel tests, skip what cannot run here, and say why."""
    from workers import rank

    items.sort(key=lambda item: rank(item.nodeid, item.get_closest_marker("slow") is not None))
    named = any("::" in name for name in config.args)
    if not (torch.cuda.is_available() or config.getoption("--all-shapes") or named):
        _sample(config, items)
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "torch.cuda.is_available() is False"
    if importlib.util.find_spec("vllm") is None:
        missing["vllm"] = 'vLLM is not installed: pip install ".[vllm]"'
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules stay: garbage is looked for in what tests make. The interpreter does less."""
    gc.collect()
    gc.freeze()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        import triton_interpreter

        triton_interpreter.spare()


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test with many shapes keep its first, and some by its name; none thorough."""
    kept: list[pytest.Item] = []
    left: list[pytest.Item] = []
    seen = set()
    for item in items:
        function = item.nodeid.split("[")[0]
        sampled = item.path.name in _SAMPLED or item.get_closest_marker("sampled")
        mine = not sampled or function not in seen
        seen.add(function)
        if item.get_closest_marker("thorough"):
            left.append(item)
            continue
        (kept if mine or not zlib.crc32(item.nodeid.encode()) % _SAMPLE else left).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


@pytest.fixture(autouse=True)
def _json_follows_its_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command prints with --json in a test is as its schema says."""
    from tightkv.tools.cli.shared import output

    plain = output.to_json

    def checked(args: Any, data: Any) -> str:
        text = plain(args, data)
        if hasattr(args, "command"):
            import json_schemas

            json_schemas.check(args.command, text)
        return text

    monkeypatch.setattr(output, "to_json", checked)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
