"""append and attend in C with SIMD: the same functions as `reference`, for caches on the CPU.

Keys and values are decoded block by block into a tile of floats that all query heads of a key
head share. With few rows codes are multiplied as they are, with 16-bit integers, if the processor
can; else arithmetic is float32 (docs/cpu.md).
"""

import ctypes
import math
import struct

import torch
from torch import Tensor

from tightkv.kernels.backend import Takes
from tightkv.kernels.constants import unsupported_codec
from tightkv.kernels.cpu import library
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView
from tightkv.math.quantize import finite
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

NAME = "cpu"
TAKES = Takes(batches=True)
# struct view, attend_args and append_args of native/native.h
_VIEW = "18q"
_ATTEND = struct.Struct(f"={_VIEW}6q5q1q5q2q2d")
ATTEND_CALL = "=6q"  # the rest of attend_args: what is new in each of alike steps
_CALL = struct.Struct(ATTEND_CALL)
_APPEND = struct.Struct(f"={_VIEW}6qq2q3q2q")
_NO_TOKENS = (0, 0, 0)


def unavailable(device_type: str | None, asked: bool = False) -> str | None:
    """Why these kernels cannot run on a kind of device (None: on any here), or None."""
    if device_type not in (None, "cpu"):
        return f"native CPU kernels do not run on {device_type}"
    try:
        library.load()
    except library.LibraryError as error:
        return str(error)
    return None


def unsupported(layout: PageLayout) -> str | None:
    """Why these kernels cannot run a config, or None."""
    return unsupported_codec(layout)


def append(
    codec: Codec, view: CacheView, key: Tensor, value: Tensor, options: AppendOptions
) -> None:
    """As `reference.append`; with check_finite new tokens are checked before any is written.

    `key` and `value` may be [B, T, Hkv, D].
    """
    if codec.cfg.check_finite:
        finite(key, check=True)
        finite(value, check=True)
    cu_seqlens, ring_valid_from = _int(options.cu_seqlens), _int(options.ring_valid_from)
    (key, at_key), (value, at_value) = tokens_at(key), tokens_at(value)
    arguments = _APPEND.pack(
        *_view(view),
        *at_key,
        *at_value,
        library.DTYPES[key.dtype],
        cu_seqlens.data_ptr(),
        ring_valid_from.data_ptr(),
        options.encode_partial_page,
        torch.get_num_threads(),
        0 if view.feedback is None else view.feedback.data_ptr(),
        0,  # whole matrices
        options.lag,
    )
    layer = library.describe(codec.layout)
    check(library.load().tightkv_append(ctypes.addressof(layer), arguments))


def attend(
    codec: Codec, query: Tensor, view: CacheView, cu_seqlens: Tensor, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """As `reference.attend`; `query` and new tokens may be [B, Lq, heads, D]."""
    cu_seqlens = _int(cu_seqlens)
    query, at_query = tokens_at(query)
    out = options.out
    if out is None or not out.is_contiguous():
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
    mask, new_key, new_value = options.mask, options.new_key, options.new_value
    at_new = _NO_TOKENS, _NO_TOKENS
    if new_key is not None and new_value is not None:
        (new_key, at_key), (new_value, at_value) = tokens_at(new_key), tokens_at(new_value)
        at_new = at_key, at_value
    if mask is not None and mask.dtype not in library.DTYPES:
        mask = mask.float()
    options = options._replace(mask=mask, new_key=new_key, new_value=new_value)
    call = *at_query, out.data_ptr(), lse.data_ptr(), torch.get_num_threads()
    arguments = pack_attend(query, view, cu_seqlens, options, at_new) + _CALL.pack(*call)
    layer = library.describe(codec.layout)
    check(library.load().tightkv_attend(ctypes.addressof(layer), arguments))
    if options.out is not None and options.out is not out:
        out = options.out.copy_(out)
    return out, lse


def pack_attend(
    query: Tensor,
    view: CacheView,
    cu_seqlens: Tensor,
    options: AttendOptions,
    at_new: tuple[tuple[int, int, int], tuple[int, int, int]] = (_NO_TOKENS, _NO_TOKENS),
) -> bytes:
    """The first part of struct attend_args."""
    *tokens, heads, dim = query.shape
    mask, scale = options.mask, options.scale
    return _ATTEND.pack(
        *_view(view),
        *at_new[0],
        *at_new[1],
        library.DTYPES[query.dtype],
        0 if options.new_key is None else library.DTYPES[options.new_key.dtype],
        math.prod(tokens),
        heads,
        cu_seqlens.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        *((0,) * 5 if mask is None else _mask(mask)),
        options.causal,
        options.window or 0,
        1 / math.sqrt(dim) if scale is None else scale,
        options.softcap or 0.0,
    )


def _view(view: CacheView) -> tuple[int, ...]:
    pages, table = view.pages, view.block_table
    tensors = (
        view.lengths, view.left_pad, view.ring_read_from, view.sink_counts, view.ring_rows,
        view.ring_key, view.ring_value, view.sink_key, view.sink_value,
    )  # fmt: skip
    return (
        view.left_pad.shape[0], pages.data_ptr(), pages.stride(0), table.data_ptr(),
        table.stride(0), *[x.data_ptr() for x in tensors],
        view.ring_key.shape[1], view.sink_key.shape[1], library.DTYPES[view.sink_key.dtype],
        0 if view.ring_scales is None else view.ring_scales.data_ptr(),
    )  # fmt: skip


def tokens_at(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [N, heads, D] or [B, T, heads, D] as struct tokens: address, token and head strides.

    C needs the elements of a head side by side and tokens at equal distances; else x is copied.
    """
    *outer, head, last = x.stride()
    if len(outer) == 1:
        even = True
    elif x.shape[1] == 1:
        even, outer = True, outer[:1]
    else:
        even = x.shape[0] == 1 or outer[0] == x.shape[1] * outer[1]
    if last != 1 or not even:
        return tokens_at(x.clone(memory_format=torch.contiguous_format))
    return x, (x.data_ptr(), outer[-1], head)


def _mask(mask: Tensor) -> tuple[int, ...]:
    """The dtype and the strides of a mask; 0 for dimensions of size 1, which are broadcast."""
    strides = (
        step if size > 1 else 0 for size, step in zip(mask.shape, mask.stride(), strict=True)
    )
    return library.DTYPES[mask.dtype], *strides


def _int(x: Tensor) -> Tensor:
    return x if x.dtype == torch.int32 and x.is_contiguous() else x.int().contiguous()


def check(result: int) -> None:
    if result:
        raise MemoryError("the native CPU kernels could not allocate their scratch memory")
