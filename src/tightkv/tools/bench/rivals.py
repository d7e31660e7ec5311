"""What a decode step is compared with in the same run. One that fails says why and ends nothing."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

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
    measure: Callable[[Shape, torch.device], list[float]]
    """Milliseconds of steps."""
    timed: str = ATTENTION
    package: str | None = None
    """That it needs. Where this is not installed there is no such rival."""


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


@dataclass
class Measured:
    """By name of the rival."""

    ms: dict[str, float] = field(default_factory=dict)
    """Medians."""
    steps_ms: dict[str, dict[str, float]] = field(default_factory=dict)
    timed: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def vllm(self) -> str | None:
        """Its version, if kernels of vLLM were asked for."""
        return getattr(sys.modules.get("vllm"), "__version__", None)

    @property
    def least(self) -> dict[str, float | None]:
        """The least time of each group; None where none was measured."""
        return {
            group: min((ms for name, ms in self.ms.items() if has(name, words)), default=None)
            for group, words in GROUPS.items()
        }


def has(name: str, words: Sequence[str]) -> bool:
    return any(word in name for word in words)


def measure_rivals(shape: Shape, device: torch.device, only: Sequence[str] = ()) -> Measured:
    """All of them, or those whose names have one of the words."""
    for word in only:
        if not any(word in name for name in RIVALS):
            raise ValueError(f"--against {word}; it must be part of one of: {', '.join(RIVALS)}")
    found = Measured()
    for name, rival in RIVALS.items():
        if only and not has(name, only):
            continue
        if rival.package is not None and importlib.util.find_spec(rival.package) is None:
            continue
        try:
            found.steps_ms[name] = spread(rival.measure(shape, device))
            found.ms[name] = found.steps_ms[name]["p50"]
            found.timed[name] = rival.timed
        except Exception as error:  # of any kind: it is another project's code
            found.failed[name] = reason(error)
        torch.cuda.empty_cache()
    return found


def reason(error: Exception) -> str:
    """Its kind and first line, files without their folders."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {re.sub(r'(?<![^ ])/[^ ]*/', '', lines[0])}"[:300]
