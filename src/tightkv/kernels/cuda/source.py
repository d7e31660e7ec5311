"""The CUDA C++ of a layout: its constants as macros, then a program of csrc."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tightkv.kernels.constants import layout_constants, table_levels
from tightkv.kernels.cuda.decode_plan import DecodeTile, splits_at_once
from tightkv.kernels.cuda.params import CSRC
from tightkv.math.feedback import MOST_SCALE, gain
from tightkv.math.quantize import Quantizer, TurboQuantMSE
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

_INCLUDE = re.compile(r'#include "([\w.]+)"$')
_PROGRAMS = {"decode": ("decode.cu", "merge.cu")}  # others are a file of their own name
_SHARED = (
    *("PAGE", "RECORD", "KEY_BITS", "VALUE_BITS", "VALUE_AT", "KEY_SCALE_AT"),
    *("VALUE_SCALE_AT", "MEAN_AT", "MEAN_BITS"),
)
STATIC_STEP, SPLIT_PLAN = "static_step.cu", "split_plan.cu"  # take no constants


def source(
    name: str, layout: PageLayout, query_heads: int, tile: DecodeTile | None, softcap: bool = False
) -> str:
    """CUDA C++ with the constants of a layout and, for attention, of a tile."""
    heads, d, shared = layout.num_kv_heads, layout.head_dim, layout_constants(layout)
    constants: dict[str, object] = {
        "D": d,
        "DP": shared["DP"],
        "HQ": query_heads,
        "HKV": heads,
        "G": query_heads // heads,
        "SOFTCAP": int(softcap),
        "ROTATED": shared["ROTATION"],
        "BF16": int(layout.dtype == torch.bfloat16),
        "RING_CODES": int(layout.cfg.window_bits == 8),
        "ROOT": _floats(d**-0.5),
        "WIDTH": _floats(d**0.5),
    }
    if name.startswith("seal"):
        factor = gain(layout.cfg.key_bits)
        constants |= {
            "FEEDBACK_WIDTH": _floats(factor * d**0.5),
            "FEEDBACK_INVERSE": _floats(1 / factor),
            "FEEDBACK_MOST": _floats(MOST_SCALE),
        }
    if tile is not None:
        constants |= {
            "WARPS": tile.warps,
            "MIN_BLOCKS": tile.blocks,
            "COLS": tile.columns,
            "TB": tile.blocks_of_32,
            "STAGES": tile.stages,
            "SUM_LEVELS": int(tile.sum_levels),
            "SHARED_QUERIES": int(tile.shared_queries),
            "EXACT_TOKENS": tile.exact_tokens,
            "MERGE_AHEAD": splits_at_once(layout),
            "SHARED_BYTES": tile.shared_bytes(layout),
        }
    constants |= {field: shared[field] for field in _SHARED}
    codec = Codec(layout)
    for side in ("KEY", "VALUE"):
        sums = tile is not None and tile.sum_levels
        constants[f"{side}_TABLE"] = _byte_levels(codec.side(side.lower()), sums)
        constants[f"{side}_UNIT"] = _floats(shared[f"{side}_UNIT"])
        constants[f"{side}_MODE"] = shared[f"{side}_MODE"]
        book = shared[f"{side}_BOOK"]  # of 8 bits: 1 / unit and unit
        thresholds, magnitudes = ((x,) if isinstance(x, float) else x for x in book)
        constants[f"{side}_THRESHOLDS"] = _floats(*thresholds)
        constants[f"{side}_MAGNITUDES"] = _floats(*magnitudes)
    defines = "".join(f"#define {field} {value}\n" for field, value in constants.items())
    return defines + included(*_PROGRAMS.get(name, (f"{name}.cu",)))


@functools.cache
def included(*names: str) -> str:
    """Files of csrc as one text, every header once and where it is first included.

    NVRTC knows no folders. Lines keep the names and numbers that they have in their files.
    """
    done: set[str] = set()

    def lines_of(path: Path) -> Iterator[str]:
        done.add(path.name)
        yield f'#line 1 "{path.name}"'
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            header = _INCLUDE.match(line)
            if header is None:
                yield "" if line == "#pragma once" else line
                continue
            if header[1] not in done:
                yield from lines_of(CSRC / "include" / header[1])
            yield f'#line {number + 1} "{path.name}"'

    return "".join(f"{line}\n" for name in names for line in lines_of(CSRC / name))


def _byte_levels(quantizer: Quantizer, sum_levels: bool) -> str:
    """`struct LevelTable` of page_codes.cuh: levels as bytes, by the low three bits of a code."""
    assert isinstance(quantizer, TurboQuantMSE)
    book = quantizer.codebook
    if book.bits == 8:  # codes are levels
        return "0u, 0u"
    levels = table_levels(book)
    assert all(x.is_integer() and abs(x) < 127 for x in levels)
    if book.bits == 4:  # magnitudes
        levels = 2 * levels if sum_levels else [x + 1 for x in levels] + [-x for x in levels]
    data = bytes(int(x) & 255 for x in levels)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    return ", ".join(f"{word}u" for word in words)


def _floats(*values: float) -> str:
    return ", ".join(f"{value!r}f" for value in values)
