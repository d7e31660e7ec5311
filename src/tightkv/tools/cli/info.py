"""tightkv info: what is installed, what hardware is there, and which kernels can run on it."""

import argparse
import os
import platform
from collections.abc import Callable
from typing import Any

from tightkv import __version__
from tightkv.integrations.extras import install_hint, installed_version
from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit, format_table, human_bytes
from tightkv.tools.rows import cpu_fields, cpu_name

# name -> how to install it
PACKAGES = {"torch": "pip install torch", "triton": "pip install triton"}
PACKAGES |= {"transformers": install_hint("hf"), "vllm": install_hint("vllm")}
PACKAGES["matplotlib"] = install_hint("eval")
# What matters to packed codes: wide integers, byte shuffles, half precision, dot products.
SIMD_FLAGS = (
    *("ssse3", "sse4_1", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vbmi", "avx512vbmi", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme"),
)


def add_parser(commands: Commands) -> None:
    add_command(commands, "info", "Versions, devices, and which kernels can run here and why not.")


def run(args: argparse.Namespace) -> int:
    data = collect()
    emit(args, data, as_text(data))
    return 0


def collect() -> dict[str, Any]:
    """The object that --json prints (docs/info.md)."""
    errors: list[str] = []
    found = {name: installed_version(name) for name in PACKAGES}
    return {
        "schema": 1,
        "tightkv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": [
            {"name": name, "version": found[name], "install": None if found[name] else how}
            for name, how in PACKAGES.items()
        ],
        "cpu": _cpu(),
        "devices": _answer("devices", _devices, errors),
        "kernels": _answer("kernels", _kernels, errors),
        "errors": errors,
    }


def _answer(
    what: str, ask: Callable[[], list[dict[str, Any]]], errors: list[str]
) -> list[dict[str, Any]]:
    """A driver or kernel that breaks while it is asked must not hide the rest of the report."""
    try:
        return ask()
    except Exception as error:
        errors.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}")
        return []


def _cpu() -> dict[str, Any]:
    fields = cpu_fields()
    listed = set((fields.get("flags") or fields.get("features") or "").split())
    logical = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return {
        "model": cpu_name(),
        "logical_cores": logical,
        "usable_cores": usable,
        "simd": [flag for flag in SIMD_FLAGS if flag in listed],
    }


def _devices() -> list[dict[str, Any]]:
    """Accelerators that torch can use."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        {
            "type": "rocm" if torch.version.hip else "cuda",
            "index": index,
            "name": about.name,
            "memory_bytes": about.total_memory,
            "capability": f"{about.major}.{about.minor}",
        }
        for index, about in enumerate(map(torch.cuda.get_device_properties, range(count)))
    ]


def _kernels() -> list[dict[str, Any]]:
    from tightkv.kernels.registry import available

    return [{"name": k.name, "usable": k.usable, "reason": k.reason} for k in available()]


def as_text(data: dict[str, Any]) -> str:
    cpu = data["cpu"]
    cores = f"{cpu['usable_cores']} of {cpu['logical_cores']} cores"
    devices = [
        f"GPU {d['index']}: {d['name']}, {human_bytes(d['memory_bytes'])}, "
        f"{d['type']} capability {d['capability']}"
        for d in data["devices"]
    ]
    packages = [
        (p["name"], p["version"] or f"not installed: {p['install']}") for p in data["packages"]
    ]
    kernels = [(k["name"], "yes" if k["usable"] else "no", k["reason"]) for k in data["kernels"]]
    parts = [
        f"tightkv {data['tightkv']}, Python {data['python']}, {data['platform']}",
        f"CPU: {cpu['model']}, {cores}, {' '.join(cpu['simd']) or 'no SIMD flags known'}",
        *(devices or ["GPU: none that torch can use"]),
        "",
        format_table(("package", "version"), packages),
        "",
        format_table(("kernels", "can run", "why"), kernels),
        *(f"problem: {error}" for error in data["errors"]),
    ]
    return "\n".join(parts)
