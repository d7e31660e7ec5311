"""What every test shares: a clean environment, fixed seeds, and skips for absent hardware."""

from __future__ import annotations

import importlib.util
import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what cannot run here, and say why."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "torch.cuda.is_available() is False"
    if importlib.util.find_spec("vllm") is None:
        missing["vllm"] = 'vLLM is not installed: pip install "tightkv[vllm]"'
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Give each test the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
