"""Benchmark rows: what was measured, on what, with which versions and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from typing import Any

import torch

import tightkv
from tightkv.integrations.extras import installed_version
from tightkv.tools.rows import source_commit


def provenance(device: torch.device) -> dict[str, Any]:
    """Time, versions, commit and the device's name."""
    facts: dict[str, Any] = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tightkv": tightkv.__version__,
        "commit": source_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": device.type,
    }
    for package, module in (("triton", "triton"), ("flashinfer-python", "flashinfer")):
        facts[package] = installed_version(module)
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        facts["driver"] = _driver()
    return facts


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.splitlines()[0].strip() if done.stdout else None
