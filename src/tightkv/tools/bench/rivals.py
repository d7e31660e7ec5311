"""What a decode step is compared with in the same run. One that fails says why and ends nothing."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from tightkv.tools.bench import baselines
from tightkv.tools.bench.inputs import Shape
from tightkv.tools.bench.timing import spread

# Milliseconds of steps over a shape on a device.
Rival: TypeAlias = Callable[[Shape, torch.device], list[float]]
# Ratios of a row, and the rivals of which the fastest counts.
GROUPS = {
    "against_best_bf16": ("sdpa", "bf16"),
    "against_fp8": ("fp8",),
    "against_4bit": ("nvfp4", "int4", "4bit"),
}


# What torch and Triton do; benchmarks/rival_kernels.py has kernels of other packages.
RIVALS: dict[str, Rival] = {
    **{
        f"sdpa {name}": partial(baselines.sdpa_decode, backend=backend)
        for name, backend in baselines.SDPA.items()
    },
    "triton bf16": baselines.triton_decode,
}


def has(name: str, words: Sequence[str]) -> bool:
    return any(word in name for word in words)


def measure_rivals(
    shape: Shape, device: torch.device, rivals: Mapping[str, Rival]
) -> dict[str, dict[str, Any]]:
    """Fields of a row, by name of the rival.

    Medians in milliseconds, their percentiles, and why some gave no time.
    """
    steps: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for name, rival in rivals.items():
        try:
            steps[name] = spread(rival(shape, device))
        except Exception as error:  # of any kind: it is another project's code
            failed[name] = reason(error)
        torch.cuda.empty_cache()
    return {
        "others_ms": {name: of["p50"] for name, of in steps.items()},
        "others_failed": failed,
        "consecutive_others_ms": steps,
    }


def ratios(others_ms: Mapping[str, float], ours: float) -> dict[str, float | None]:
    """The least time of each group over ours; None where none was measured."""
    least = {
        group: min((ms for name, ms in others_ms.items() if has(name, words)), default=None)
        for group, words in GROUPS.items()
    }
    return {group: None if ms is None else ms / ours for group, ms in least.items()}


def reason(error: Exception) -> str:
    """Its kind and first line, files without their folders."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {re.sub(r'(?<![^ ])/[^ ]*/', '', lines[0])}"[:300]
