"""What a decode step is compared with in the same run. One that fails says why and ends nothing."""

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tightkv.tools.bench import baselines, flashinfer_kernels, vllm_kernels
from tightkv.tools.bench.inputs import Shape
from tightkv.tools.bench.paged import NewCache, decode_ms
from tightkv.tools.bench.timing import spread

ATTENTION, STEP = "attention", "write and attention"
# Ratios of a row, and the rivals of which the fastest counts.
GROUPS = {
    "against_best_bf16": ("sdpa", "bf16"),
    "against_fp8": ("fp8",),
    "against_4bit": ("nvfp4", "int4", "4bit"),
}
NVFP4_BITS = 4.5  # codes, and 8 bits per 16 of them


@dataclass(frozen=True)
class Rival:
    measure: Callable[[Shape, torch.device], list[float]]  # milliseconds of steps
    timed: str = ATTENTION
    package: str | None = None  # needed; where it is not installed there is no such rival


def _paged(package: str, new_cache: NewCache, page: int, bits: float, timed: str = STEP) -> Rival:
    measure = partial(decode_ms, new_cache=new_cache, page=page, bits=bits)
    return Rival(measure, timed, package)


_flashinfer = partial(_paged, "flashinfer", page=flashinfer_kernels.PAGE)
_vllm = partial(_paged, "vllm", page=vllm_kernels.PAGE)
_plain, _fa3 = flashinfer_kernels.plain, vllm_kernels.flash_attention
_turboquant = partial(vllm_kernels.turboquant, preset="turboquant_4bit_nc")
_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn

RIVALS: dict[str, Rival] = {
    **{
        f"sdpa {name}": Rival(partial(baselines.sdpa_decode, backend=backend))
        for name, backend in baselines.SDPA.items()
    },
    "triton bf16": Rival(baselines.triton_decode),
    "flashinfer bf16": _flashinfer(partial(_plain, dtype=_BF16), bits=16, timed=ATTENTION),
    "flashinfer fp8": _flashinfer(partial(_plain, dtype=_FP8), bits=8, timed=ATTENTION),
    "flashinfer nvfp4": _flashinfer(flashinfer_kernels.nvfp4, bits=NVFP4_BITS),
    "vllm fa3 bf16": _vllm(partial(_fa3, dtype=_BF16), bits=16),
    "vllm fa3 fp8": _vllm(partial(_fa3, dtype=_FP8), bits=8),
    "vllm int4_per_token_head": _vllm(vllm_kernels.int4_per_token_head, bits=4),
    "vllm turboquant_4bit_nc": _vllm(_turboquant, bits=4),
}


def has(name: str, words: Sequence[str]) -> bool:
    return any(word in name for word in words)


def measure_rivals(
    shape: Shape, device: torch.device, only: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Fields of a row, by name of the rival: of all, or those whose names have one of the words.

    Medians in milliseconds, their percentiles, what was timed, and why some gave no time.
    """
    for word in only:
        if not any(word in name for name in RIVALS):
            raise ValueError(f"--against {word}; it must be part of one of: {', '.join(RIVALS)}")
    steps: dict[str, dict[str, float]] = {}
    timed, failed = dict[str, str](), dict[str, str]()
    for name, rival in RIVALS.items():
        if only and not has(name, only):
            continue
        if rival.package is not None and importlib.util.find_spec(rival.package) is None:
            continue
        try:
            steps[name] = spread(rival.measure(shape, device))
            timed[name] = rival.timed
        except Exception as error:  # of any kind: it is another project's code
            failed[name] = reason(error)
        torch.cuda.empty_cache()
    return {
        "others_ms": {name: of["p50"] for name, of in steps.items()},
        "others_timed": timed,
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
