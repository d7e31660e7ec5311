"""tightkv info: what is installed, what hardware is there, and which kernels can run on it."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

from tightkv import __version__
from tightkv.integrations.extras import install_hint, installed_version
from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit, format_table, human_bytes

# name -> how to install it
PACKAGES = {
    "torch": "pip install torch",
    "triton": "pip install triton",
    "transformers": install_hint("hf"),
    "vllm": install_hint("vllm"),
    "matplotlib": install_hint("eval"),
}
# What matters to packed codes: wide integers, byte shuffles, half precision, dot products.
SIMD_FLAGS = (
    *("ssse3", "sse4_1", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "avx512vbmi", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)
# ARM cores have numbers in /proc/cpuinfo instead of a name: (implementer, part).
ARM_CORES = {
    ("0x41", "0xd0c"): "ARM Neoverse N1",
    ("0x41", "0xd40"): "ARM Neoverse V1",
    ("0x41", "0xd49"): "ARM Neoverse N2",
    ("0x41", "0xd4f"): "ARM Neoverse V2",
}


def add_parser(commands: Commands) -> None:
    add_command(commands, "info", "Versions, devices, and which kernels can run here and why not.")


def run(args: argparse.Namespace) -> int:
    data = collect()
    emit(args, data, as_text(data))
    return 0


def collect() -> dict[str, Any]:
    """The object that --json prints (docs/info.md)."""
    errors: list[str] = []
    return {
        "schema": 1,
        "tightkv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": [_package(name, install) for name, install in PACKAGES.items()],
        "cpu": _cpu(),
        "devices": _devices(errors),
        "kernels": _kernels(errors),
        "errors": errors,
    }


def _package(name: str, install: str) -> dict[str, str | None]:
    version = installed_version(name)
    return {"name": name, "version": version, "install": install if version is None else None}


def _cpu() -> dict[str, Any]:
    fields = _cpuinfo()
    listed = set((fields.get("flags") or fields.get("features") or "").split())
    arm = ARM_CORES.get((fields.get("cpu implementer", ""), fields.get("cpu part", "")))
    logical = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return {
        "model": fields.get("model name") or arm or platform.processor() or platform.machine(),
        "logical_cores": logical,
        "usable_cores": usable,
        "simd": [flag for flag in SIMD_FLAGS if flag in listed],
    }


def _cpuinfo() -> dict[str, str]:
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


def _devices(errors: list[str]) -> list[dict[str, Any]]:
    """Accelerators that torch can use."""
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        found = []
        for index in range(count):
            about = torch.cuda.get_device_properties(index)
            found.append(
                {
                    "type": "rocm" if torch.version.hip else "cuda",
                    "index": index,
                    "name": about.name,
                    "memory_bytes": about.total_memory,
                    "capability": f"{about.major}.{about.minor}",
                }
            )
        return found
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        errors.append(f"devices: {_one_line(error)}")
        return []


def _kernels(errors: list[str]) -> list[dict[str, Any]]:
    # A kernel that breaks while it is asked must not hide the rest of the report.
    try:
        from tightkv.kernels.registry import available

        return [{"name": k.name, "usable": k.usable, "reason": k.reason} for k in available()]
    except Exception as error:
        errors.append(f"kernels: {_one_line(error)}")
        return []


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def as_text(data: dict[str, Any]) -> str:
    cpu = data["cpu"]
    cores = f"{cpu['usable_cores']} of {cpu['logical_cores']} cores"
    parts = [
        f"tightkv {data['tightkv']}, Python {data['python']}, {data['platform']}",
        f"CPU: {cpu['model']}, {cores}, {' '.join(cpu['simd']) or 'no SIMD flags known'}",
        _devices_text(data["devices"]),
        "",
        _packages_text(data["packages"]),
        "",
        _kernels_text(data["kernels"]),
        *(f"problem: {error}" for error in data["errors"]),
    ]
    return "\n".join(parts)


def _devices_text(devices: list[dict[str, Any]]) -> str:
    if not devices:
        return "GPU: none that torch can use"
    return "\n".join(
        f"GPU {d['index']}: {d['name']}, {human_bytes(d['memory_bytes'])}, "
        f"{d['type']} capability {d['capability']}"
        for d in devices
    )


def _packages_text(packages: list[dict[str, str | None]]) -> str:
    rows = [(p["name"], p["version"] or f"not installed: {p['install']}") for p in packages]
    return format_table(("package", "version"), rows)


def _kernels_text(kernels: list[dict[str, Any]]) -> str:
    rows = [(k["name"], "yes" if k["usable"] else "no", k["reason"]) for k in kernels]
    return format_table(("kernels", "can run", "why"), rows)
