"""Kernels of FlashInfer and vLLM that a decode step is compared with, where they are installed.

decode_shapes.py measures them beside those that `tightkv bench decode` knows. Packages are imported
when a kernel of theirs is measured.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import rival_flashinfer as flashinfer
import rival_vllm as vllm
import torch
from rival_pages import NewCache, decode_ms

from tightkv.tools.bench.rivals import Rival

NVFP4_BITS = 4.5  # codes, and 8 bits per 16 of them


def paged(new_cache: NewCache, page: int, bits: float) -> Rival:
    return partial(decode_ms, new_cache=new_cache, page=page, bits=bits)


_flashinfer = partial(paged, page=flashinfer.PAGE)
_vllm = partial(paged, page=vllm.PAGE)
_plain, _fa3 = flashinfer.plain, vllm.flash_attention
_turboquant = partial(vllm.turboquant, preset="turboquant_4bit_nc")
_BF16, _FP8 = torch.bfloat16, torch.float8_e4m3fn

KERNELS: dict[str, Rival] = {
    "flashinfer bf16": _flashinfer(partial(_plain, dtype=_BF16), bits=16),
    "flashinfer fp8": _flashinfer(partial(_plain, dtype=_FP8), bits=8),
    "flashinfer nvfp4": _flashinfer(flashinfer.nvfp4, bits=NVFP4_BITS),
    "vllm fa3 bf16": _vllm(partial(_fa3, dtype=_BF16), bits=16),
    "vllm fa3 fp8": _vllm(partial(_fa3, dtype=_FP8), bits=8),
    "vllm int4_per_token_head": _vllm(vllm.int4_per_token_head, bits=4),
    "vllm turboquant_4bit_nc": _vllm(_turboquant, bits=4),
}


def installed() -> dict[str, Rival]:
    """Those whose package, the first word of their names, is there."""
    return {
        name: rival
        for name, rival in KERNELS.items()
        if importlib.util.find_spec(name.split()[0]) is not None
    }
