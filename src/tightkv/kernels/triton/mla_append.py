"""New tokens of latent attention into pages: rotate, quantize, pack and store in one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tightkv.kernels.constants import DENSE_ROTATION
from tightkv.kernels.device_guard import device_guard
from tightkv.kernels.triton.device import last_contiguous
from tightkv.kernels.triton.encode import TINY, finite, nearest, pack_words, pack_words3
from tightkv.kernels.triton.mla_tile import (
    layout_constants,
    rope_type,
    rotation_kind,
    scale_codes,
    scale_values,
)
from tightkv.kernels.triton.rotate import rotate
from tightkv.math.quantize import finite as finite_or_raise
from tightkv.pages.latent import LatentCodec


@triton.jit(do_not_specialize=["count", "slots"])
def _append_kernel(
    latent, rope, slots, pages, table, count, latent_n, rope_n, page_b,
    D: tl.constexpr, DP: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BITS: tl.constexpr, BOOK: tl.constexpr, CODE_BYTES: tl.constexpr, ROPE_AT: tl.constexpr,
    SCALE_AT: tl.constexpr, ROPE_TYPE: tl.constexpr, ROTATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + t, mask=t < count, other=-1)
    live = slot >= 0
    page = pages + (slot // PAGE).to(tl.int64) * page_b
    place = (slot % PAGE).to(tl.int32)
    d = tl.arange(0, DP)[None, :]
    there = live[:, None] & (d < D)
    x = tl.load(latent + t[:, None].to(tl.int64) * latent_n + d, mask=there, other=0.0)
    y = rotate(finite(x), table, ROWS, D, DP, ROTATION)

    y64 = y.to(tl.float64)
    norm = tl.sqrt_rn(tl.sum(y64 * y64, axis=1).to(tl.float32))
    scale = scale_codes(norm)
    size = tl.maximum(scale_values(scale), TINY)
    z = tl.div_rn(y, tl.broadcast_to(size[:, None], y.shape)) * (D**0.5)
    code, _ = nearest(z, BITS, BOOK)

    tl.store(page + SCALE_AT + place, scale.to(tl.uint8), mask=live)
    row = (page + place * CODE_BYTES).to(tl.pointer_type(tl.int32))[:, None]
    if BITS == 3:
        group = tl.arange(0, DP // 32)[None, :]
        for j in tl.static_range(3):
            w = pack_words3(code, j, ROWS, DP, 32)
            tl.store(row + 3 * group + j, w, mask=live[:, None] & (group < D // 32))
    else:
        n = tl.arange(0, DP * BITS // 32)[None, :]
        w = pack_words(code, ROWS, DP, BITS)
        tl.store(row + n, w, mask=live[:, None] & (n < D * BITS // 32))
    r = tl.arange(0, ROPE)[None, :]
    k = tl.load(rope + t[:, None].to(tl.int64) * rope_n + r, mask=live[:, None], other=0.0)
    where = (page + ROPE_AT).to(tl.pointer_type(ROPE_TYPE))[:, None] + place[:, None] * ROPE + r
    tl.store(where, k.to(ROPE_TYPE), mask=live[:, None])


@device_guard
def append(codec: LatentCodec, pages: Tensor, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    """See `mla_reference.append`."""
    layout, count, kind = codec.layout, len(slots), rotation_kind(codec)
    if layout.cfg.check_finite:
        finite_or_raise(latent[slots >= 0], True)  # padding can be anything
    if not count:
        return
    latent, rope = last_contiguous(latent), last_contiguous(rope)
    rows = 16 if kind == DENSE_ROTATION else 1 if count < 1024 else 4
    book = (codec.codebook.thresholds, codec.codebook.magnitudes)
    _append_kernel[(triton.cdiv(count, rows),)](
        latent, rope, slots, pages, codec.rotation.table(latent.device),
        count, latent.stride(0), rope.stride(0), pages.stride(0),
        **layout_constants(layout), BOOK=book, ROPE_TYPE=rope_type(layout.dtype),
        ROTATION=kind, ROWS=rows, num_warps=4,
    )  # fmt: skip
