"""What a device can do, and tensors as the kernels want them."""

import functools

import torch
import triton
from torch import Tensor


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache(maxsize=16)
def processor_count(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=16)
def has_ptx(device: torch.device) -> bool:
    """cvt from e4m3 needs sm_89."""
    if interpreted() or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@functools.lru_cache(maxsize=16)
def has_large_shared_memory(device: torch.device) -> bool:
    """227 KiB for a program: sm_90 and sm_100, not sm_120."""
    if interpreted():
        return True
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
