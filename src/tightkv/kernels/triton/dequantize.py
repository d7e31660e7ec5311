"""Pages to plain keys and values, for attention that wants them so (a bounded piece at a time)."""

import triton
import triton.language as tl

from tightkv.kernels.triton.words import (
    byte_levels,
    load_key_words,
    load_value_words,
    nibble_levels,
    scale_order,
    token_order,
)


@triton.jit
def _dequantize_kernel(
    pages, block_table, key, value, table_b, first_page, out_b, out_h,
    HKV: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
    RECORD: tl.constexpr, KEY_BITS: tl.constexpr, KEY_CHUNK: tl.constexpr,
    KEY_TABLE: tl.constexpr, VALUE_BITS: tl.constexpr, VALUE_TABLE: tl.constexpr,
    KEY_UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr, VALUE_AT: tl.constexpr,
    KEY_SCALE_AT: tl.constexpr, VALUE_SCALE_AT: tl.constexpr, MEAN_AT: tl.constexpr,
    MEAN_BITS: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One block of 32 tokens of one head -> rows [32, D] of key and value, in the rotated frame."""
    BLOCKS: tl.constexpr = PAGE // 32
    index = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    row = tl.program_id(1) // HKV
    head = tl.program_id(1) % HKV
    page = tl.load(block_table + row * table_b + first_page + index).to(tl.int64)
    record = pages + (page * HKV + head) * RECORD
    numbers = record.to(tl.pointer_type(tl.float16))
    base = row.to(tl.int64) * out_b + head * out_h + (index * PAGE + block * 32) * D

    C: tl.constexpr = D // KEY_CHUNK
    CP: tl.constexpr = DP // KEY_CHUNK
    if KEY_CHUNK == 32:
        kw = load_key_words(
            record.to(tl.pointer_type(tl.int32)), block, 1, KEY_BITS, C, CP, KEY_CHUNK
        )
    else:
        kw = load_key_words(
            record.to(tl.pointer_type(tl.int16)), block, 1, KEY_BITS, C, CP, KEY_CHUNK
        )
    scale = tl.load(numbers + KEY_SCALE_AT // 2 + block * 32 + scale_order(1)).to(tl.float32)
    PER: tl.constexpr = 8 if KEY_BITS < 8 else 4
    w = tl.arange(0, (DP // PER))
    channel = (w % CP) * KEY_CHUNK + (w // CP) * PER
    levels = nibble_levels(kw, KEY_BITS, KEY_TABLE, PTX) if KEY_BITS < 8 else byte_levels(kw)
    size = (tl.abs(scale) * KEY_UNIT)[:, None]
    centered = (scale.to(tl.int32, bitcast=True) < 0)[:, None]
    where = key + base + token_order(1)[:, None] * D
    for n in tl.static_range(PER):
        at = channel + n
        x = levels[n].to(tl.float32) * size
        if MEAN_BITS == 16:
            mean = tl.load(numbers + MEAN_AT // 2 + at, mask=at < D, other=0.0).to(tl.float32)
            x += tl.where(centered, mean[None, :], 0.0)
        if MEAN_BITS == 8:
            step = tl.load(numbers + (MEAN_AT + D) // 2).to(tl.float32)
            means = (record + MEAN_AT).to(tl.pointer_type(tl.int8))
            mean = tl.load(means + at, mask=at < D, other=0).to(tl.float32) * step
            x += tl.where(centered, mean[None, :], 0.0)
        tl.store(where + at[None, :], x.to(key.dtype.element_ty), mask=(at < D)[None, :])

    VC: tl.constexpr = D // 16
    VCP: tl.constexpr = DP // 16
    vw = load_value_words(
        (record + VALUE_AT).to(tl.pointer_type(tl.int32)), block, 1, VALUE_BITS, VC, VCP
    )  # [words, 16 pairs]
    VPER: tl.constexpr = 8 if VALUE_BITS < 8 else 4
    w = tl.arange(0, 2 * DP // VPER)
    channel = (w % VCP) * 16 + (w // VCP) * (VPER // 2)
    pair = tl.arange(0, 16)
    even = 8 * (pair % 4) + 2 * (pair // 4)  # token of the pair, as in token_order
    levels = nibble_levels(vw, VALUE_BITS, VALUE_TABLE, PTX) if VALUE_BITS < 8 else byte_levels(vw)
    for n in tl.static_range(VPER):
        token = even + n % 2
        at = channel + n // 2
        place = VALUE_SCALE_AT // 2 + block * 32 + (token % 8) * 4 + token // 8
        scale = tl.load(numbers + place).to(tl.float32) * VALUE_UNIT
        x = levels[n].to(tl.float32) * scale[None, :]
        where = value + base + token[None, :] * D + at[:, None]
        tl.store(where, x.to(value.dtype.element_ty), mask=(at < D)[:, None])
