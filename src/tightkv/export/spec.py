"""The spec of a layer: everything about its layout that static_attention needs, as one tensor.

27 words of 8 bytes, then tables padded to whole words; native/static_spec.c reads and checks it.
"""

import struct

import torch
from torch import Tensor

from tightkv.config import FORMAT_VERSION
from tightkv.kernels.constants import unsupported_codec
from tightkv.kernels.cpu import library
from tightkv.math.quantize import TurboQuantMSE
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

_MAGIC = b"TIGHTKVX"
_SIDE = struct.Struct("<5q2d")


def spec_of(layout: PageLayout, max_tokens: int) -> Tensor:
    """int64 [words], for a cache of at most `max_tokens` tokens per row."""
    if reason := unsupported_codec(layout):
        raise ValueError(f"{layout.cfg.name} cannot be exported: {reason}")
    if layout.cfg.check_finite:
        raise ValueError("check_finite=True cannot be exported; set it to False")
    codec, layer = Codec(layout), library.describe(layout)
    assert isinstance(codec.key, TurboQuantMSE) and isinstance(codec.value, TurboQuantMSE)
    words = (
        FORMAT_VERSION, layer.dim, layer.heads, layer.page_size, layer.record_bytes,
        layer.centered, layer.mean_bits, layer.mean,
        layout.cfg.exact_pages, layout.ring_tokens, layout.cfg.sinks, max_tokens,
    )  # fmt: skip
    data = bytearray(_MAGIC + struct.pack(f"<{len(words)}q", *words))
    for side in (layer.key, layer.value):
        data += _SIDE.pack(
            side.bits, side.codes, side.scales, side.scale_mode, side.rotation,
            side.unit, side.gain,
        )  # fmt: skip
    for quantizer in (codec.key, codec.value):
        tables = library.side_tables(quantizer)
        if quantizer.bits == 8:  # codes are whole multiples of the unit
            del tables["thresholds"]
        for table in tables.values():
            data += _bytes(table)
    return torch.frombuffer(data, dtype=torch.int64).clone()


def _bytes(table: Tensor) -> bytes:
    raw = bytes(table.flatten().view(torch.uint8).tolist())
    return raw + bytes(-len(raw) % 8)
