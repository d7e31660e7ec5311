"""The tiles of the decode kernel that were tuned, each beside another one in the same run.

python benchmarks/decode_tiles.py --out rows.jsonl     on a GPU
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tightkv.config import KVQuantConfig
from tightkv.kernels.cuda import backend
from tightkv.kernels.cuda.decode_plan import DecodePlan, DecodeTile
from tightkv.kernels.view import AppendOptions, AttendOptions
from tightkv.pages.layout import page_layout
from tightkv.tools.bench.inputs import Layer, Shape, layers_for
from tightkv.tools.bench.timing import graph_ms
from tightkv.tools.rows import append_rows, provenance

DEVICE = torch.device("cuda", 0)
WIDE = (Shape(8, 32731, 96, 8), Shape(32, 8155, 64, 4))
MANY = (Shape(256, 1019), Shape(128, 2043), Shape(64, 4091))
# Shapes, presets, and what the other tile has instead.
PAIRS: tuple[tuple[tuple[Shape, ...], tuple[str, ...], dict[str, Any]], ...] = (
    (WIDE, ("k4v4", "k3v3"), {"blocks": 2, "warps": 4}),
    (WIDE[1:], ("k2v2",), {"blocks": 2, "warps": 4}),
    (
        WIDE,
        ("k4v4", "k3v3", "k2v2"),
        {
            "blocks_of_32": 1,
            "blocks": 2,
            "warps": 4,
            "sum_levels": False,
            "shared_queries": False,
        },
    ),
    (MANY, ("k4v4", "k3v3"), {"blocks": 2, "warps": 4}),
    (MANY, ("k2v2",), {"blocks": 2, "warps": 6}),
    ((Shape(8, 32731, 64, 8), Shape(8, 32731, 48, 8)), ("k2v2",), {"warps": 6}),
    ((Shape(32, 8155, 24, 8, 64), Shape(32, 8155, 64, 8, 64)), ("k4v4",), {"warps": 4}),
)


def measure() -> Iterator[dict[str, Any]]:
    facts = provenance(DEVICE)
    for shapes, presets, other in PAIRS:
        for shape in shapes:
            for preset in presets:
                cfg = KVQuantConfig.preset(preset)
                layout = page_layout(cfg, shape.kv_heads, shape.head_dim, torch.bfloat16)
                layers = layers_for(layout, shape, backend, DEVICE)
                taken = _time(layers, shape, {})
                yield {
                    "bench": "decode tiles",
                    "shape": asdict(shape),
                    "preset": preset,
                    "kernels": backend.NAME,
                    **taken,
                    "other": _time(layers, shape, other),
                    **facts,
                }
                del layers
                torch.cuda.empty_cache()


def _time(layers: list[Layer], shape: Shape, changes: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of append and attention, with some fields of the tile changed."""
    of = DecodeTile.of

    def changed(*args: Any) -> DecodeTile:
        return replace(of(*args), **changes)

    layout, view = layers[0].codec.layout, layers[0].view
    DecodePlan.of.cache_clear()
    with patch.object(DecodeTile, "of", staticmethod(changed)):
        group = shape.query_heads // shape.kv_heads
        plan = DecodePlan.of(layout, group, 1, *view.block_table.shape, DEVICE)
        cu_seqlens = torch.arange(shape.batch + 1, dtype=torch.int32, device=DEVICE)
        query, key, value = (
            torch.randn(shape.batch, heads, shape.head_dim, dtype=torch.bfloat16, device=DEVICE)
            for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
        )

        def step(layer: Layer) -> None:
            options = AppendOptions(cu_seqlens, layer.ring_valid_from, 1, False)
            backend.append(layer.codec, layer.view, key, value, options)
            over = replace(layer.view, overlaps_append=True)
            backend.attend(layer.codec, query, over, cu_seqlens, AttendOptions(max_queries=1))

        ms = graph_ms([partial(step, layer) for layer in layers])
    DecodePlan.of.cache_clear()
    return {"ms": {"step": ms}, "tile": asdict(plan.tile), "num_splits": plan.num_splits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="JSON lines are appended to it")
    options = parser.parse_args()
    for row in measure():
        append_rows(options.out, [row])
        s, ours, other = row["shape"], row["ms"]["step"], row["other"]["ms"]["step"]
        sys.stdout.write(
            f"{s['query_heads']}/{s['kv_heads']} of {s['head_dim']}, {s['batch']} x {s['tokens']}, "
            f"{row['preset']}: {1e3 * ours:.1f} us, other tile {1e3 * other:.1f}\n"
        )


if __name__ == "__main__":
    main()
