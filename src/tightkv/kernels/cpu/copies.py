"""Copies of single tokens on the CPU without torch, whose smallest copy takes longer."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

from torch import Tensor


def copy_tokens(ring: Tensor, new: Tensor, slots: Sequence[int]) -> bool:
    """Copy new [n, 1, Hkv, D] to tokens `slots` of a ring [rows, tokens, Hkv, D].

    False, and nothing done, where the numbers of a token do not lie side by side in both.
    """
    _, _, heads, dim = new.shape
    row, _, head, number = new.stride()
    if number != 1 or (head != dim and heads != 1) or not ring.is_contiguous():
        return False
    size = new.element_size()
    length = heads * dim * size
    to, at, step = ring.data_ptr(), new.data_ptr(), row * size
    for slot in slots:
        memmove(to + slot * length, at, length)
        at += step
    return True
