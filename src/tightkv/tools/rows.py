"""Rows of results, and what says where they come from: versions, the commit, the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tightkv
from tightkv.integrations.extras import installed_version

if TYPE_CHECKING:  # `tightkv info` says what is missing, also where torch is
    import torch

# ARM cores have numbers in /proc/cpuinfo instead of a name: (implementer, part).
_ARM_CORES = {
    ("0x41", "0xd0c"): "ARM Neoverse N1",
    ("0x41", "0xd40"): "ARM Neoverse V1",
    ("0x41", "0xd49"): "ARM Neoverse N2",
    ("0x41", "0xd4f"): "ARM Neoverse V2",
}


def append_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """One JSON object a line, after what the file has; a line that was cut off stays alone."""
    path, text = Path(path), "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else f"\n{text}"
    with path.open("ab", buffering=0) as file:  # one write: other writers' rows stay whole
        file.write(text.encode())


def source_commit() -> str | None:
    """The commit of the source tree this package runs from, marked if files differ from it.

    $SOURCE_COMMIT says it, where the tree is a copy whose git does not.
    """
    if given := os.environ.get("SOURCE_COMMIT"):
        return given
    package = Path(__file__).resolve().parents[1]
    git = ("git", "-C", str(package))
    top, commit = _said(*git, "rev-parse", "--show-toplevel"), _said(*git, "rev-parse", "HEAD")
    # A package installed somewhere inside another project's repository is not of that commit.
    if top is None or commit is None or Path(top) / "src" / "tightkv" != package:
        return None
    changes = _said(*git, "status", "--porcelain", ":/src")
    return f"{commit}-unchecked" if changes is None else f"{commit}-modified" if changes else commit


def _said(*command: str) -> str | None:
    """What a command prints; None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, Any]:
    """Time, versions and commit."""
    import torch

    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tightkv": tightkv.__version__,
        "commit": source_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def provenance(device: torch.device) -> dict[str, Any]:
    """The same, and what was measured on: the machine and its device."""
    facts = {
        **versions(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "device": device.type,
        "triton": installed_version("triton"),
        "flashinfer-python": installed_version("flashinfer"),
    }
    if device.type == "cuda":
        import torch

        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
        drivers = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        facts["driver"] = drivers.splitlines()[0].strip() if drivers else None
    return facts


def cpu_name() -> str:
    """The processor, as its maker calls it where that is known."""
    fields = cpu_fields()
    arm = _ARM_CORES.get((fields.get("cpu implementer", ""), fields.get("cpu part", "")))
    return fields.get("model name") or arm or platform.processor() or platform.machine()


def cpu_fields() -> dict[str, str]:
    """Fields of the first core in /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    return fields
