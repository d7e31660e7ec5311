"""register(): nobody's engine fails because of us, and no request is dropped in silence."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tightkv.integrations.vllm.start import plugin

# A vLLM whose module moved: what register() logs, and what engines' configs then say.
MOVED = """
import json, logging, os, sys
sys.modules["vllm.model_executor.layers.attention.mla_attention"] = None
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append([record.levelname, record.getMessage()])
logging.getLogger("vllm.tightkv").addHandler(handler)
from vllm.config import VllmConfig
from tightkv.integrations.vllm import register

def outcome(make):
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

told = {"register": outcome(register), "logged": list(records)}
told["no request"] = outcome(VllmConfig)
told["off"] = outcome(lambda: VllmConfig(additional_config={"tightkv": False}))
told["option"] = outcome(lambda: VllmConfig(additional_config={"tightkv": "k4v4"}))
os.environ["TIGHTKV_CPU_ISA"] = "neon"
told["setting"] = outcome(VllmConfig)
os.environ["TIGHTKV_PRESET"] = "k4v4"
told["environment"] = outcome(VllmConfig)
sys.modules["vllm.config"] = None
told["blind, asked"] = outcome(register)
del os.environ["TIGHTKV_PRESET"]
told["blind"] = outcome(register)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def moved() -> dict[str, Any]:
    env = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, "-c", MOVED], capture_output=True, text=True, env=env, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.slow
def test_a_vllm_that_moved_a_module_is_told_so_once_and_left_alone(moved: dict[str, Any]) -> None:
    assert moved["register"] is None
    ((level, line),) = moved["logged"]
    assert level == "WARNING" and "mla_attention" in line and ".[vllm]" in line
    assert [moved[name] for name in ("no request", "off", "setting", "blind")] == [None] * 4


@pytest.mark.thorough
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("asked", ["option", "environment", "blind, asked"])
def test_an_engine_that_asks_for_compression_is_refused(moved: dict[str, Any], asked: str) -> None:
    assert moved[asked].startswith("RuntimeError: tightkv cannot compress the KV cache of vLLM")


def test_without_options_nothing_of_ours_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM may also have moved what only our layers need."""
    monkeypatch.setitem(sys.modules, "tightkv.integrations.vllm.start.install", None)
    ask = partial(plugin.get_kv_cache_spec, lambda layer, config: "vLLM's own")
    assert ask(object(), SimpleNamespace(additional_config={})) == "vLLM's own"
    with pytest.raises(RuntimeError, match="cannot compress the KV cache of vLLM"):
        ask(object(), SimpleNamespace(additional_config={"tightkv": True}))


def test_a_vllm_that_moved_its_metrics_still_compresses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Layer:
        def get_kv_cache_spec(self, vllm_config: Any) -> None: ...

    own = Layer.get_kv_cache_spec
    monkeypatch.setattr(plugin, "_asked", lambda: (Layer,))
    monkeypatch.setattr(plugin, "_engine_hooks", lambda: ())
    monkeypatch.setattr(plugin, "_refuse_requests", pytest.fail)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setitem(sys.modules, "vllm.v1.metrics.loggers", None)
    plugin.register()
    assert Layer.get_kv_cache_spec is not own
    (line,) = caplog.messages
    assert "no tightkv: metrics" in line and "vllm.v1.metrics.loggers" in line
