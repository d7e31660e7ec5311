"""What the kernels of every language are built with: constants of a layout and of its codebooks.

Triton takes them as constexpr arguments, CUDA as macros, the CPU kernels in structs.
"""

import functools
import math
from typing import Any

import torch

from tightkv.math.codebook import Codebook
from tightkv.math.quantize import TurboQuantMSE
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

ROTATIONS = {"none": 0, "hadamard": 1, "haar": 2}
SCALE_MODES = {"norm": 0, "corrected": 1, "least_squares": 2, "unbiased": 3}
BITS = (2, 3, 4, 8)


def unsupported_codec(layout: PageLayout) -> str | None:
    """Why no kernel but the reference decodes a config, or None."""
    cfg = layout.cfg
    for side in ("key", "value"):
        if cfg.bits(side) not in BITS:
            return f"{side}_bits={cfg.bits(side)}; they have 2, 3, 4 and 8"
        if cfg.method(side) != "mse" or cfg.has_outliers(side):
            return f'{side}s are not stored as plain "mse"'
    if cfg.codebook != "fp8":
        return f'codebook={cfg.codebook!r}; they decode "fp8"'
    return None


@functools.lru_cache(maxsize=1024)
def layout_constants(layout: PageLayout) -> dict[str, Any]:
    """Sizes and byte offsets of a page's record."""
    cfg, d = layout.cfg, layout.head_dim
    return {
        "HKV": layout.num_kv_heads,
        "D": d,
        "DP": 1 << (d - 1).bit_length(),  # the next power of two
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
        "ROTATION": ROTATIONS[Codec(layout).key.rotation.kind],
    }


@functools.lru_cache(maxsize=1024)
def encode_constants(layout: PageLayout) -> dict[str, Any]:
    """BOOK and MODE (of the scale) by side. A book has thresholds and magnitudes.

    That of 8 bits has 1 / unit and unit.
    """
    found: dict[str, Any] = {}
    for name, quantizer in _quantizers(layout).items():
        book = quantizer.codebook
        codes = (1 / book.unit, book.unit) if book.bits == 8 else (book.thresholds, book.magnitudes)
        found[f"{name}_BOOK"] = codes
        found[f"{name}_MODE"] = SCALE_MODES[quantizer.scale_mode]
    return found


@functools.lru_cache(maxsize=1024)
def decode_constants(layout: PageLayout) -> dict[str, Any]:
    """TABLE (levels by code as e4m3 bytes, 0 for 8 bits) and UNIT (of a level) by side."""
    found: dict[str, Any] = {}
    for name, quantizer in _quantizers(layout).items():
        book = quantizer.codebook
        found[f"{name}_TABLE"] = 0 if book.bits == 8 else e4m3_table(book)
        found[f"{name}_UNIT"] = book.unit / math.sqrt(layout.head_dim)
    return found


def _quantizers(layout: PageLayout) -> dict[str, TurboQuantMSE]:
    codec = Codec(layout)
    assert isinstance(codec.key, TurboQuantMSE) and isinstance(codec.value, TurboQuantMSE)
    return {"KEY": codec.key, "VALUE": codec.value}


def table_levels(book: Codebook) -> list[float]:
    """Eight numbers: the levels by code, or their magnitudes if codes have a sign bit (4 bits)."""
    assert book.native is not None
    levels = list(book.native)
    if book.bits < 4:  # the sign is part of the table index
        levels += [-x for x in levels]
    return (levels + levels)[:8]


def e4m3_table(book: Codebook) -> int:
    """The levels of `table_levels` as e4m3 bytes, in a 64-bit integer."""
    packed = torch.tensor(table_levels(book), dtype=torch.float32, device="cpu")
    data = bytes(packed.to(torch.float8_e4m3fn).view(torch.uint8).tolist())
    return int.from_bytes(data, "little", signed=True)
