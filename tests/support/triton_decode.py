"""The decoding of code words by the Triton kernels, on its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.constants import e4m3_table
from tightkv.kernels.triton.unpack import nibble_levels
from tightkv.math.codebook import get_codebook


@triton.jit
def _decode_kernel(words, out, n, BITS: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr):
    at = tl.program_id(0) * 128 + tl.arange(0, 128)
    w = tl.load(words + at, mask=at < n, other=0)
    levels = nibble_levels(w, BITS, TABLE, PTX)
    for i in tl.static_range(8):
        tl.store(out + at * 8 + i, levels[i], mask=at < n)


def decode_words(words: Tensor, bits: int, ptx: bool) -> Tensor:
    """Nibble words int32 [n] -> levels float16 [n, 8]."""
    book = get_codebook("fp8", bits)
    out = torch.empty(len(words), 8, dtype=torch.float16, device=words.device)
    grid = (triton.cdiv(len(words), 128),)
    _decode_kernel[grid](words, out, len(words), BITS=bits, TABLE=e4m3_table(book), PTX=ptx)
    return out
