"""append and attend in Triton: NVIDIA GPUs from sm_80 on, AMD, and the interpreter.

Same functions as `kernels.reference`, same pages, for configs whose codes are of the native
codebook (`supports`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from tightkv.codec import Codec
from tightkv.kernels.device_guard import device_guard
from tightkv.kernels.prefill import can_extend, extend
from tightkv.kernels.triton.append import _append_kernel
from tightkv.kernels.triton.attend import _attend_kernel, _merge_kernel
from tightkv.kernels.triton.dequantize import _dequantize_kernel
from tightkv.kernels.triton.rotate import DENSE, HADAMARD, NONE
from tightkv.kernels.view import CacheView
from tightkv.layout import RING_SLACK, PageLayout
from tightkv.math.codebook import Codebook
from tightkv.math.feedback import gain
from tightkv.math.quantize import TurboQuantMSE, finite

_MODES = ("norm", "corrected", "least_squares", "unbiased")
_BITS = (2, 3, 4, 8)


def unavailable(device_type: str | None, asked: bool = False) -> str | None:
    """Why these kernels cannot run on a kind of device (None: on any here), or None.

    The interpreter (TRITON_INTERPRET=1) runs them on the CPU, for tests; only if `asked`.
    """
    if device_type == "cpu" and interpreted() and asked:
        return None
    if device_type not in (None, "cuda"):
        return f"Triton kernels do not run on {device_type}"
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80"
    return None


def unsupported(layout: PageLayout) -> str | None:
    """Why these kernels cannot run a config, or None."""
    cfg = layout.cfg
    for side in ("key", "value"):
        if cfg.bits(side) not in _BITS:
            return f"{side}_bits={cfg.bits(side)}; they have 2, 3, 4 and 8"
        if cfg.method(side) != "mse" or cfg.has_outliers(side):
            return f'{side}s are not stored as plain "mse"'
    if cfg.codebook != "fp8":
        return f'codebook={cfg.codebook!r}; they decode "fp8"'
    if not 64 <= layout.head_dim <= 256:
        return f"head_dim={layout.head_dim}; they have 64 to 256"
    return None


def interpreted() -> bool:
    return bool(triton.knobs.runtime.interpret)


@functools.lru_cache(maxsize=1024)
def constants(layout: PageLayout) -> dict[str, Any]:
    """The compile-time constants both kernels share."""
    cfg, d = layout.cfg, layout.head_dim
    codec = Codec(layout)
    kind = {"none": NONE, "hadamard": HADAMARD, "haar": DENSE}[codec.key.rotation.kind]
    return {
        "HKV": layout.num_kv_heads,
        "D": d,
        "DP": triton.next_power_of_2(d),
        "PAGE": layout.page_size,
        "RECORD": layout.record_bytes,
        "KEY_BITS": cfg.key_bits,
        "KEY_CHUNK": 32 if d % 32 == 0 else 16,
        "VALUE_BITS": cfg.value_bits,
        "VALUE_AT": layout.planes["value", "codes"].offset,
        "KEY_SCALE_AT": layout.planes["key", "scale"].offset,
        "VALUE_SCALE_AT": layout.planes["value", "scale"].offset,
        "MEAN_AT": layout.mean_offset,
        "MEAN_BITS": cfg.mean_bits if cfg.centered else 0,
        "KIND": kind,
    }


@functools.lru_cache(maxsize=1024)
def books(layout: PageLayout) -> tuple[dict[str, Any], dict[str, Any]]:
    """Constants of the encoder and of the decoder: thresholds and levels."""
    codec = Codec(layout)
    encode: dict[str, Any] = {}
    decode: dict[str, Any] = {}
    for side, name in (("key", "KEY"), ("value", "VALUE")):
        quantizer = codec.side(side)
        assert isinstance(quantizer, TurboQuantMSE)
        book = quantizer.codebook
        assert book.native is not None
        if book.bits == 8:
            encode[f"{name}_BOOK"] = (1 / book.unit, book.unit)
            decode[f"{name}_TABLE"] = 0
        else:
            encode[f"{name}_BOOK"] = (book.thresholds, book.magnitudes)
            decode[f"{name}_TABLE"] = level_table(book)
        encode[f"{name}_MODE"] = _MODES.index(quantizer.scale_mode)
        decode[f"{name}_UNIT"] = book.unit / math.sqrt(layout.head_dim)
    return encode, decode


def table_levels(book: Codebook) -> list[float]:
    """Eight: the levels by nibble, or their magnitudes where the sign is apart."""
    assert book.native is not None
    levels = list(book.native)
    if book.bits < 4:  # the sign is part of the table index
        levels += [-x for x in levels]
    return (levels + levels)[:8]


def level_table(book: Codebook) -> int:
    """The same as e4m3 bytes."""
    packed = torch.tensor(table_levels(book), dtype=torch.float32, device="cpu")
    data = bytes(packed.to(torch.float8_e4m3fn).view(torch.uint8).tolist())
    return int.from_bytes(data, "little", signed=True)


@device_guard
def append(
    codec: Codec,
    view: CacheView,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    exact_starts: Tensor,
    *,
    max_new: int,
    open_codes: bool,
) -> None:
    """See `reference.append`."""
    layout = codec.layout
    if codec.cfg.check_finite:
        finite(key, True), finite(value, True)
    key, value = _last_contiguous(key), _last_contiguous(value)
    size, ring = layout.page_size, view.ring_key.shape[1]
    touched = (max_new - 2) // size + 2
    copies = triton.cdiv(min(max_new, ring), 32)
    # Only a short append may overwrite the ring while pages are sealed from it.
    launches = [(touched, copies)] if max_new <= RING_SLACK else [(touched, 0), (0, copies)]
    sinks = view.sink_key.shape[1]
    options: dict[str, Any] = {"GAIN": 0.0, "num_warps": 4}
    if view.feedback is not None:
        # Codes are those of the reference only if no product is fused with a sum.
        options = {"GAIN": gain(codec.cfg.key_bits), "num_warps": 8, "enable_fp_fusion": False}
    for pages, copied in launches:
        _append_kernel[(view.batch * (pages + copied), layout.num_kv_heads, 2)](
            key, value, view.pages, view.block_table, view.lengths, view.starts, view.ring_rows,
            exact_starts, first, view.ring_key, view.ring_value, view.sink_key, view.sink_value,
            codec.key.rotation.table(key.device), codec.value.rotation.table(key.device),
            view.feedback, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            view.block_table.stride(0), view.pages.stride(0), pages, copied, ring,
            **constants(layout), **books(layout)[0],
            SINKS=sinks, SINKS_P=triton.next_power_of_2(max(sinks, 1)),
            OPEN=open_codes, **options,
        )  # fmt: skip


@device_guard
def attend(
    codec: Codec,
    query: Tensor,
    view: CacheView,
    first: Tensor,
    *,
    max_queries: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.attend`."""
    layout, device = codec.layout, query.device
    rows, hq, d = query.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    plain = causal and window is None and softcap is None and mask is None
    many = plain and not interpreted() and can_extend(codec, query, view, max_queries)
    if many and rows and new_key is not None and new_value is not None:
        from tightkv.kernels.triton import prefill as ops  # it imports this module

        answer, lse = extend(
            codec, _last_contiguous(query), view, ops, scale=scale,
            new_key=_last_contiguous(new_key), new_value=_last_contiguous(new_value),
        )  # fmt: skip
        return answer if out is None else out.copy_(answer), lse
    out = torch.empty_like(query) if out is None else out
    lse = torch.empty(rows, hq, dtype=torch.float32, device=device)
    if not rows or not view.batch:
        return out.zero_(), lse.fill_(-math.inf)
    query = _last_contiguous(query)
    hkv = layout.num_kv_heads
    new = new_key is not None
    plan = _plan(layout, view, hq // hkv, max_queries, new, device)
    if new_key is None or new_value is None:
        new_key = new_value = query  # not read
    exact_dtype = view.ring_key.dtype  # one load reads rings and new tokens
    new_key, new_value = (_last_contiguous(x.to(exact_dtype)) for x in (new_key, new_value))
    splits, exact_splits = plan.pop("splits"), plan.pop("exact_splits")
    shares = splits + exact_splits
    partial = torch.empty(shares, rows, hq, d, dtype=torch.float32, device=device)
    partial_lse = torch.empty(shares, rows, hq, dtype=torch.float32, device=device)
    mask_kind, mask, mask_strides = _mask(mask, query)
    shared = constants(layout)
    tiles = triton.cdiv(max_queries * (hq // hkv), plan["COLS"])
    _attend_kernel[(shares * view.batch * hkv * tiles,)](
        query, view.pages, view.block_table, view.lengths, view.starts,
        view.ring_starts, view.sink_counts, view.ring_rows, first,
        view.ring_key, view.ring_value, view.sink_key, view.sink_value, new_key, new_value, mask,
        codec.key.rotation.table(device), codec.value.rotation.table(device),
        partial, partial_lse,
        query.stride(0), query.stride(1), view.block_table.stride(0), view.pages.stride(0),
        new_key.stride(0), new_key.stride(1), new_value.stride(0), new_value.stride(1),
        *mask_strides, mask.shape[-1], rows, scale,
        view.batch, splits, exact_splits, view.ring_key.shape[1],
        **shared, **books(layout)[1],
        HQ=hq, SINKS=view.sink_key.shape[1],
        NEW=new, CAUSAL=causal, WINDOW=window or 0, CAP=softcap or 0.0, MASK=mask_kind,
        PTX=_has_ptx(device), **plan,
    )  # fmt: skip
    heads = 16 if shared["KIND"] == DENSE else 1
    _merge_kernel[(triton.cdiv(rows * hq, heads),)](
        partial, partial_lse, codec.value.rotation.table(device), first, out, lse,
        view.batch, rows, out.stride(0), out.stride(1), shares,
        HQ=hq, D=d, DP=shared["DP"], HEADS=heads,
        STEP=16 if heads == 1 else 4,  # [STEP, heads, DP] is in registers
        KIND=shared["KIND"], num_warps=4,
    )  # fmt: skip
    return out, lse


@device_guard
def dequantize_pages(
    codec: Codec,
    view: CacheView,
    first_page: int,
    last_page: int,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotated keys and values [B, Hkv, tokens, D] of pages [first_page, last_page).

    `out` may hold more tokens; its strides are the same for both. Pages that are not in the
    block table are left as they are.
    """
    layout = codec.layout
    tokens = (last_page - first_page) * layout.page_size
    if out is None:
        shape = (view.batch, layout.num_kv_heads, tokens, layout.head_dim)
        made = [torch.empty(shape, dtype=layout.dtype, device=view.pages.device) for _ in "kv"]
        out = made[0], made[1]
    key, value = out
    _dequantize_kernel[(tokens // 32 * view.batch * layout.num_kv_heads,)](
        view.pages, view.block_table, key, value,
        view.block_table.stride(0), view.block_table.shape[1],
        view.pages.stride(0), first_page, tokens // 32,
        key.stride(0), key.stride(1), **constants(layout), **books(layout)[1],
        PTX=_has_ptx(view.pages.device), num_warps=4,
    )  # fmt: skip
    return key, value


def _plan(
    layout: PageLayout,
    view: CacheView,
    group: int,
    max_queries: int,
    new: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Tile sizes and how many programs share the tokens of a sequence."""
    columns = max_queries * group
    tile = 64 if layout.page_size % 64 == 0 else 32
    if layout.head_dim > 128 and 8 in (layout.cfg.key_bits, layout.cfg.value_bits):
        tile = 32  # those of 64 do not fit sm_89's shared memory
    # At least 16 columns: with 8, Triton 3.6 gives wrong products (seen on sm_90).
    cols = min(max(16, triton.next_power_of_2(columns)), 32 if columns <= 32 else 64)
    plan: dict[str, Any] = {
        "COLS": cols, "TILE": tile, "STAGES": 2, "EXACT_TILE": 64, "EXACT_STEP": 16,
        "EXACT_STAGES": 1,
    }  # fmt: skip
    programs = view.batch * layout.num_kv_heads * triton.cdiv(columns, cols)
    wide = 2 if layout.head_dim > 128 else 1  # more warps, else registers spill
    if max_queries > 16:
        return {**plan, "splits": 1, "exact_splits": 0, "num_warps": 4 * wide}
    wanted = triton.cdiv(_processors(device) * 8, programs)
    splits = max(1, min(wanted, max(1, view.block_table.shape[1]), 256))
    exact_tokens = view.ring_key.shape[1] + view.sink_key.shape[1] + (max_queries if new else 0)
    exact = triton.cdiv(exact_tokens, plan["EXACT_TILE"])
    warps = wide if cols <= 16 else 2 * wide
    return {
        **plan, "splits": splits, "exact_splits": exact, "num_warps": warps,
    }  # fmt: skip


@functools.lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=16)
def _has_ptx(device: torch.device) -> bool:
    """cvt from e4m3 needs sm_89."""
    if interpreted() or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _mask(mask: Tensor | None, like: Tensor) -> tuple[int, Tensor, tuple[int, int, int, int]]:
    """Kind (0 none, 1 bool, 2 float), tensor, strides with 0 for broadcast dimensions."""
    if mask is None:
        return 0, like, (0, 0, 0, 0)
    steps = [0 if n == 1 else s for n, s in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
    kind = 1 if mask.dtype == torch.bool else 2
    mask = mask.view(torch.uint8) if kind == 1 else mask
    return kind, mask, (steps[0], steps[1], steps[2], mask.stride(3))


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
