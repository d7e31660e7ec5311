"""Decode steps on the CPU of which only lengths and windows change: the rest is found out once.

Between two of them the rest of the model replaces what the processor's caches hold, the
interpreter included, so each line costs ten times what it costs in a loop.
"""

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import replace
from struct import Struct

import torch
from torch import Tensor

from tightkv.kernels.check import FLOATS
from tightkv.kernels.cpu import library
from tightkv.kernels.cpu.backend import ATTEND_CALL, check, pack_attend, tokens_at
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

_PUT = Struct("=9q")  # struct put_args of native/native.h


class _Prepared:
    """Addresses of tensors. A copy is None: it would have those of the original."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class PreparedPut(_Prepared):
    """Puts keys and values [n, 1, Hkv, D] of one kind in rings [rows, tokens, Hkv, ...].

    Numbers beyond the range of the layout's dtype become its largest.
    """

    def __init__(
        self,
        layout: PageLayout,
        ring_key: Tensor,
        ring_value: Tensor,
        ring_scales: Tensor | None,
        key: Tensor,
        value: Tensor,
    ) -> None:
        self._ring_key, self._ring_value = ring_key, ring_value
        self._ring_scales = ring_scales  # lives as long as its address is used
        self.ring_shape = ring_key.shape[:2]
        self._rows, self._shape, self._dtype = len(key), key.shape, key.dtype
        self._key_strides, self._value_strides = key.stride(), value.stride()
        size, self._count = key.element_size(), key.shape[2] * key.shape[3]
        self._steps = key.stride(0) * size, value.stride(0) * size
        rings = [x for x in (ring_key, ring_value, ring_scales) if x is not None]
        self._to = tuple((x.data_ptr(), x.shape[2:].numel() * x.element_size()) for x in rings)
        self._to_dtype, self._from_dtype = library.DTYPES[layout.dtype], library.DTYPES[key.dtype]
        self._layer = None if ring_scales is None else library.describe(layout)
        self._address = 0 if self._layer is None else ctypes.addressof(self._layer)
        self._put = library.load().tightkv_put
        # whether the numbers of a token lie side by side, on the CPU
        self.possible = (
            len(key) > 0
            and key.shape[2:] == ring_value.shape[2:]
            and key.dtype in FLOATS
            and all(x.is_contiguous() for x in (*rings, key[0], value[0]))
            and self.takes(range(len(key)), ring_key, ring_value, key, value)
        )

    def takes(
        self, rows: Sequence[int], ring_key: Tensor, ring_value: Tensor, key: Tensor, value: Tensor
    ) -> bool:
        return (
            len(rows) == self._rows
            and ring_key is self._ring_key
            and ring_value is self._ring_value
            and key.shape == self._shape
            and value.shape == self._shape
            and key.dtype == self._dtype
            and value.dtype == self._dtype
            and key.stride() == self._key_strides
            and value.stride() == self._value_strides
            and key.is_cpu
            and value.is_cpu
        )

    def __call__(self, key: Tensor, value: Tensor, slots: Iterable[int]) -> None:
        """Put token i in place slots[i] of the rings' tokens."""
        at_key, at_value = key.data_ptr(), value.data_ptr()
        for slot in slots:
            to = [start + slot * size for start, size in self._to]
            scales = to[2] if self._address else 0
            where = to[0], to[1], scales, self._to_dtype, at_key, at_value
            check(self._put(_PUT.pack(*where, self._from_dtype, self._count, self._address)))
            at_key, at_value = at_key + self._steps[0], at_value + self._steps[1]


class PreparedAttend(_Prepared):
    """attend() with one view, for queries of one shape, without a mask.

    Lengths of the view, and where rings are read from, are given each time.
    """

    def __init__(
        self,
        codec: Codec,
        query: Tensor,
        view: CacheView,
        cu_seqlens: Tensor,
        options: AttendOptions,
    ) -> None:
        self.view, self._options, self._cu_seqlens = view, options[1:5], cu_seqlens
        self._layer = library.describe(codec.layout)
        self._address = ctypes.addressof(self._layer)
        # NULL as the address of lengths: they follow the arguments
        none = view.lengths.new_empty(0)
        nowhere = replace(view, lengths=none, ring_read_from=none)
        self._packed = pack_attend(query, nowhere, cu_seqlens, options)
        self._rest = Struct(f"{ATTEND_CALL}{2 * view.batch}i")
        self._shape, self._dtype = query.shape, query.dtype
        self._out = torch.empty(query.shape, dtype=query.dtype, device="cpu")
        self._lse = torch.empty(query.shape[:-1], dtype=torch.float32, device="cpu")
        self._attend = library.load().tightkv_attend

    def takes(self, query: Tensor, options: tuple[object, ...]) -> bool:
        """`options`: scale, causal, window and softcap."""
        return (
            query.shape == self._shape
            and query.dtype == self._dtype
            and query.is_cpu
            and options == self._options
        )

    def __call__(
        self, query: Tensor, lengths: Iterable[int], ring_read_from: Iterable[int]
    ) -> tuple[Tensor, Tensor]:
        query, at = tokens_at(query)
        out, lse = torch.empty_like(self._out), torch.empty_like(self._lse)
        call = *at, out.data_ptr(), lse.data_ptr(), torch.get_num_threads()
        rest = self._rest.pack(*call, *lengths, *ring_read_from)
        check(self._attend(self._address, self._packed + rest))
        return out, lse
