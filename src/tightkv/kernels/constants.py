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
    """Sizes and byte offsets of a page's record, and of KEY and VALUE how they are coded.

    BOOK: thresholds and magnitudes; of 8 bits 1 / unit and unit. TABLE: levels by code as e4m3
    bytes, 0 for 8 bits. UNIT of a level, and MODE of the scale.
    """
    cfg, d, codec = layout.cfg, layout.head_dim, Codec(layout)
    found: dict[str, Any] = {
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
        "ROTATION": ROTATIONS[codec.key.rotation.kind],
    }
    for name, quantizer in (("KEY", codec.key), ("VALUE", codec.value)):
        assert isinstance(quantizer, TurboQuantMSE)
        book, eight = quantizer.codebook, quantizer.bits == 8
        codes = (1 / book.unit, book.unit) if eight else (book.thresholds, book.magnitudes)
        found[f"{name}_BOOK"] = codes
        found[f"{name}_MODE"] = SCALE_MODES[quantizer.scale_mode]
        found[f"{name}_TABLE"] = 0 if eight else e4m3_table(book)
        found[f"{name}_UNIT"] = book.unit / math.sqrt(d)
    return found


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
