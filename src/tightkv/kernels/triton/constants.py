"""What kernels are compiled with, as one argument: a `Constants` of a layout."""

import functools
import math
from typing import Any

import torch
import triton.language as tl

from tightkv.kernels.constants import ROTATIONS, e4m3_table, layout_constants
from tightkv.kernels.triton.device import has_ptx, interpreted
from tightkv.math.rotation import Rotation
from tightkv.pages.latent import LatentCodec, LatentLayout
from tightkv.pages.layout import PageLayout

_ROPE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Constants:
    """Named constants of a kernel, which sees their names as attributes of one argument `L`.

    Launches look binaries up by it, so its hash is that of a text that was made once.
    """

    def __init__(self, **values: Any) -> None:
        self._text = repr(values)
        for name, value in values.items():  # the interpreter computes with numbers
            setattr(self, name, value if interpreted() else tl.constexpr(value))

    def __repr__(self) -> str:
        return self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return self is other or repr(self) == repr(other)


@functools.lru_cache(maxsize=1024)
def constants_of(layout: PageLayout, device: torch.device) -> Constants:
    """What `layout_constants` gives.

    PTX: whether the device converts e4m3 by an instruction. RING_CODES: whether rings have codes.
    """
    codes = layout.cfg.window_bits == 8
    return Constants(**layout_constants(layout), PTX=has_ptx(device), RING_CODES=codes)


@functools.lru_cache(maxsize=256)
def frame_of(rotation: Rotation) -> Constants:
    """D, DP and ROTATION, for kernels that see nothing else of a layout."""
    dim = rotation.dim
    return Constants(D=dim, DP=1 << (dim - 1).bit_length(), ROTATION=ROTATIONS[rotation.kind])


@functools.lru_cache(maxsize=64)
def latent_constants(layout: LatentLayout, device: torch.device) -> Constants:
    """Sizes and offsets of a page of latents; TABLE (levels by code, as e4m3 bytes) and UNIT."""
    codec = LatentCodec(layout)
    book, rank = codec.codebook, layout.rank
    return Constants(
        D=rank, DP=1 << (rank - 1).bit_length(), ROTATION=ROTATIONS[codec.rotation.kind],
        ROPE=layout.rope_dim, ROPE_TYPE=_ROPE_TYPES[layout.dtype], ROPE_AT=layout.rope_offset,
        PAGE=layout.page_size, BITS=layout.bits, CODE_BYTES=layout.code_bytes,
        SCALE_AT=layout.scale_offset, BOOK=(book.thresholds, book.magnitudes),
        TABLE=e4m3_table(book), UNIT=book.unit * codec.gain / math.sqrt(rank), PTX=has_ptx(device),
    )  # fmt: skip
