"""Pages to plain keys and values, for attention that wants them so (a bounded piece at a time)."""

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.triton.constants import constants_of
from tightkv.kernels.triton.device import device_guard
from tightkv.kernels.triton.unpack import (
    byte_levels,
    load_key_words,
    load_value_words,
    nibble_levels,
    scale_order,
    token_order,
)
from tightkv.kernels.view import CacheView
from tightkv.pages.codec import Codec


@triton.jit
def _side_by_side(a, b, c, d):
    """Four tensors [...] -> [..., 2, 2], in that order."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _number(x, FINITE: tl.constexpr):
    """float32; with FINITE, NaN and infinity are 0."""
    x = x.to(tl.float32)
    if FINITE:
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
    return x


@triton.jit
def dequantized_keys(record, block, L: tl.constexpr, FINITE: tl.constexpr = False):
    """Keys of 32 tokens of a record, rotated, float32 [32, DP]; row i is token_order(1)[i].

    With FINITE, scales and means that are not finite are 0.
    """
    numbers = record.to(tl.pointer_type(tl.float16))
    kw = load_key_words(record, block, 1, L)
    # [32, words] each; word = CP q + chunk, channel = KEY_CHUNK chunk + PER q + code
    CP: tl.constexpr = L.DP // L.KEY_CHUNK
    if L.KEY_BITS < 8:
        h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(kw, L.KEY_BITS, L.KEY_TABLE, L.PTX)
        x = tl.join(_side_by_side(h0, h2, h4, h6), _side_by_side(h1, h3, h5, h7))
        x = tl.reshape(x, [32, L.KEY_CHUNK // 8, CP, 8])
    else:
        h0, h1, h2, h3 = byte_levels(kw)
        x = tl.reshape(_side_by_side(h0, h1, h2, h3), [32, L.KEY_CHUNK // 4, CP, 4])
    x = tl.reshape(tl.permute(x, [0, 2, 1, 3]), [32, L.DP]).to(tl.float32)
    scale = tl.load(numbers + L.KEY_SCALE_AT // 2 + block * 32 + scale_order(1))
    scale = _number(scale, FINITE)
    x = x * (tl.abs(scale) * L.KEY_UNIT)[:, None]
    if L.MEAN_BITS > 0:
        d = tl.arange(0, L.DP)
        if L.MEAN_BITS == 16:
            mean = tl.load(numbers + L.MEAN_AT // 2 + d, mask=d < L.D, other=0.0)
            mean = _number(mean, FINITE)
        else:
            step = _number(tl.load(numbers + (L.MEAN_AT + L.D) // 2), FINITE)
            means = (record + L.MEAN_AT).to(tl.pointer_type(tl.int8))
            mean = tl.load(means + d, mask=d < L.D, other=0).to(tl.float32) * step
        centered = scale.to(tl.int32, bitcast=True) < 0
        x += tl.where(centered[:, None], mean[None, :], 0.0)
    return x


@triton.jit
def even_tokens():
    """Which tokens of 32 the rows of `dequantized_values` are; those of the odd ones come next."""
    pair = tl.arange(0, 16)
    return 8 * (pair % 4) + 2 * (pair // 4)  # the first of the pair, as in token_order


@triton.jit
def dequantized_values(record, block, L: tl.constexpr, FINITE: tl.constexpr = False):
    """Values of 32 tokens of a record, rotated, float32 [16, DP]: of even tokens, of odd ones.

    With FINITE, scales that are not finite are 0.
    """
    DP: tl.constexpr = L.DP
    VCP: tl.constexpr = DP // 16
    numbers = record.to(tl.pointer_type(tl.float16))
    vw = load_value_words(record, block, 1, L)
    # [words, 16 pairs] each; word = VCP q + chunk; codes 2 n and 2 n + 1: channel n of two tokens
    if L.VALUE_BITS < 8:
        h0, h1, h2, h3, h4, h5, h6, h7 = nibble_levels(vw, L.VALUE_BITS, L.VALUE_TABLE, L.PTX)
        even = tl.reshape(_side_by_side(h0, h2, h4, h6), [4, VCP, 16, 4])
        odd = tl.reshape(_side_by_side(h1, h3, h5, h7), [4, VCP, 16, 4])
    else:
        h0, h1, h2, h3 = byte_levels(vw)
        even = tl.reshape(tl.join(h0, h2), [8, VCP, 16, 2])
        odd = tl.reshape(tl.join(h1, h3), [8, VCP, 16, 2])
    token = even_tokens()
    scale_at = numbers + L.VALUE_SCALE_AT // 2 + block * 32 + (token % 8) * 4 + token // 8
    even = tl.reshape(tl.permute(even, [2, 1, 0, 3]), [16, DP]).to(tl.float32)
    odd = tl.reshape(tl.permute(odd, [2, 1, 0, 3]), [16, DP]).to(tl.float32)
    even = even * (_number(tl.load(scale_at), FINITE) * L.VALUE_UNIT)[:, None]
    odd = odd * (_number(tl.load(scale_at + 4), FINITE) * L.VALUE_UNIT)[:, None]
    return even, odd


# one binary for all lengths
@triton.jit(do_not_specialize=["block_table", "table_b", "table_n", "first_page", "blocks"])
def _dequantize_kernel(
    pages, block_table, key, value, table_b, table_n, page_b, first_page, blocks, out_b, out_h,
    L: tl.constexpr,
):  # fmt: skip
    """One block of 32 tokens of one head -> rows [32, D] of key and value, in the rotated frame.

    Pages that the table does not have are left as they are.
    """
    D: tl.constexpr = L.D
    BLOCKS: tl.constexpr = L.PAGE // 32
    # One dimension of programs, since the others end at 65,535.
    index = tl.program_id(0) % blocks // BLOCKS
    block = tl.program_id(0) % BLOCKS
    row = tl.program_id(0) // blocks // L.HKV
    head = tl.program_id(0) // blocks % L.HKV
    if first_page + index >= table_n:
        return
    page = tl.load(block_table + row * table_b + first_page + index).to(tl.int64)
    if page < 0:
        return
    record = pages + page * page_b + head * L.RECORD
    base = row.to(tl.int64) * out_b + head.to(tl.int64) * out_h + (index * L.PAGE + block * 32) * D
    d = tl.arange(0, L.DP)
    x = dequantized_keys(record, block, L)
    where = key + base + token_order(1)[:, None] * D + d[None, :]
    tl.store(where, x.to(key.dtype.element_ty), mask=(d < D)[None, :])
    even, odd = dequantized_values(record, block, L)
    where = value + base + even_tokens()[:, None] * D + d[None, :]
    tl.store(where, even.to(value.dtype.element_ty), mask=(d < D)[None, :])
    tl.store(where + D, odd.to(value.dtype.element_ty), mask=(d < D)[None, :])


@device_guard
def dequantize_pages(
    codec: Codec, view: CacheView, first_page: int, last_page: int, key: Tensor, value: Tensor
) -> None:
    """Write pages [first_page, last_page), rotated, to key and value [B, Hkv, tokens, D].

    These may hold more tokens, and have the same strides. Pages that are not in the block table are
    left as they are.
    """
    layout = codec.layout
    blocks = (last_page - first_page) * layout.page_size // 32
    _dequantize_kernel[(blocks * view.batch * layout.num_kv_heads,)](
        view.pages, view.block_table, key, value,
        view.block_table.stride(0), view.block_table.shape[1],
        view.pages.stride(0), first_page, blocks,
        key.stride(0), key.stride(1), L=constants_of(layout, view.pages.device), num_warps=4,
    )  # fmt: skip
