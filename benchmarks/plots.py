"""Draw the plots of README from the rows in benchmarks/results: python benchmarks/plots.py

The same rows give the same bytes, so a test can tell whether the files in docs/plots are current.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from tightkv import KVQuantConfig
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench.loads import Load

ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
WIDTH, HEIGHT = 600, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 584, 68, 356  # the area inside the axes
INK, MUTED, GRID = "#1f2328", "#59636e", "#d9dee3"
OURS, OTHERS = "#0b5fff", "#b45309"
# Bars, in this order; what has no rows is left out.
BARS = {
    "fp8": ("#f0a35e", "fp8"),
    "turboquant_4bit_nc": ("#8c959f", "vLLM TurboQuant 4-bit"),
    "k8v4": ("#b6d0ff", "k8v4"),
    "k4v4": ("#0b5fff", "k4v4"),
    "k3v3": ("#5b93ff", "k3v3"),
    "k2v2": ("#0a2f7a", "k2v2"),
}
LEAST_SLOT = 4  # bars
# Decode steps of one layer that are drawn: sequences and tokens.
LAYERS = ((8, 32731), (256, 1019), (1, 32731))
# Whole models: equal lengths with all caches, and lengths that differ.
ENGINES = tuple(map(Load.parse, ["1x2k", "32x8k", "8x32k", "256x512-1536", "128x1k-3k"]))
HEAD_DIM = 64  # of the model that caches are compared with
Row = dict[str, Any]
Speeds = dict[str, float]  # by cache


def rows(name: str) -> list[Row]:
    text = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


class Drawing:
    """An SVG file of lines, rectangles, dots and words."""

    def __init__(self, title: str, subtitle: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" font-family="system-ui, sans-serif" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        ]
        self.text(12, 24, title, size=17, weight="600")
        self.text(12, 45, subtitle, size=13, fill=MUTED)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        anchor: str = "start",
        size: int = 13,
        fill: str = INK,
        weight: str = "400",
        turn: bool = False,
    ) -> None:
        turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
        start = (
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'font-weight="{weight}"{turned}'
        )
        halo = 'stroke="#ffffff" stroke-width="3"'  # legible where a line passes
        self.parts += [f"{start} {ink}>{escape(words)}</text>" for ink in (halo, f'fill="{fill}"')]

    def line(
        self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1
    ) -> None:
        self.parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{color}" '
            f'stroke-width="{width:g}" fill="none"/>'
        )

    def dot(self, x: float, y: float, color: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{color}"/>')

    def bar(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{color}"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def color_of(cache: str) -> str:
    return OURS if cache.startswith("tightkv") else OTHERS


# --- quality against bytes -----------------------------------------------------------------------
def quality() -> str:
    """KL against the bytes that a token takes, of every cache that was compared."""
    found = rows("comparison")
    (plain,) = (row for row in found if row["cache"] == "dynamic")
    points = []
    for row in found:
        # Variants of our presets are in docs/comparison.md; a cache that fails has no size.
        if row is plain or "exact_pages" in row["cache"] or isinstance(row["bytes"]["1024"], str):
            continue
        sizes = row["bytes"]
        slope = (sizes["4096"] - sizes["1024"]) / 3072
        if row["cache"].startswith("tightkv "):  # of which whole pages are added
            cfg = KVQuantConfig.preset(row["cache"].removeprefix("tightkv "))
            heads = plain["bytes"]["1024"] / 1024 / (4 * HEAD_DIM)  # of all layers
            slope = heads * PageLayout(cfg, 1, HEAD_DIM, torch.float16).bytes_per_token
        points.append((row["cache"], slope, sizes["1024"] / 1024, row["kl"]))
    model, positions = plain["model"]["name"], plain["positions"]
    drawing = Drawing(
        "Quality against memory: lower left is better",
        f"{model}, {positions:,} tokens; a 16-bit cache takes "
        f"{plain['bytes']['1024'] / 1024:,.0f} bytes/token",
    )
    most = 1.08 * max(point[2] for point in points)
    low = math.log10(min(point[3] for point in points)) - 0.3
    high = math.log10(max(point[3] for point in points)) + 0.2

    def at_x(count: float) -> float:
        return LEFT + (RIGHT - LEFT) * count / most

    def at_y(kl: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (math.log10(kl) - low) / (high - low)

    for power in range(math.ceil(low), math.floor(high) + 1):
        y = at_y(10.0**power)
        drawing.line(LEFT, y, RIGHT, y, GRID)
        drawing.text(LEFT - 8, y + 4, f"{10.0**power:g}", anchor="end", fill=MUTED)
    for count in range(0, int(most), 2000):
        drawing.text(at_x(count), BOTTOM + 19, f"{count:,}", anchor="middle", fill=MUTED)
    drawing.line(LEFT, BOTTOM, RIGHT, BOTTOM, INK)
    drawing.text(14, (TOP + BOTTOM) / 2, "KL (nats/token)", anchor="middle", turn=True)
    words = "bytes/token (dot: each further token; right end: mean of the first 1,024)"
    drawing.text((LEFT + RIGHT) / 2, BOTTOM + 44, words, anchor="middle")
    for name, slope, mean, kl in points:
        color, x, y = color_of(name), at_x(slope), at_y(kl)
        drawing.line(x, y, at_x(mean), y, color, 2)
        drawing.line(at_x(mean), y - 4, at_x(mean), y + 4, color, 2)
    for name, slope, mean, kl in points:
        color, x, y = color_of(name), at_x(slope), at_y(kl)
        drawing.dot(x, y, color)
        cut = at_x(mean) + 7 + 8 * len(name) > WIDTH
        if color == OURS or at_x(mean) - x < 12 or cut:
            drawing.text(x - 10, y + 5, name, anchor="end", fill=color, weight="600")
        else:
            drawing.text(at_x(mean) + 7, y + 2, name, fill=color, weight="600")
    return drawing.svg()


# --- speed ---------------------------------------------------------------------------------------
def label_of(load: Load) -> str:
    if not load.ragged:
        return f"{load.batch} x {round(load.context / 1024)}k"
    return f"{load.batch} x {load.shortest / 1024:g}-{load.longest / 1024:g}k"


def by_context(speeds: dict[Load, Speeds]) -> dict[Load, Speeds]:
    """Short contexts first; of the same context, large batches first."""
    return dict(sorted(speeds.items(), key=lambda item: (item[0].context, -item[0].batch)))


def layer_speeds() -> dict[Load, Speeds]:
    """How many times as fast as the best bf16 of the same run, by name."""
    found: dict[Load, Speeds] = {}
    for row in rows("gpu_decode_20_shapes"):
        shape = row["shape"]
        heads = shape["query_heads"], shape["kv_heads"], shape["head_dim"]
        if heads != (32, 8, 128) or (shape["batch"], shape["tokens"]) not in LAYERS:
            continue
        speeds = found.setdefault(Load.equal(shape["batch"], shape["tokens"]), {})
        speeds[row["preset"]] = row["against_best_bf16"]
        if row.get("against_fp8"):
            speeds["fp8"] = row["against_best_bf16"] / row["against_fp8"]
    return by_context(found)


def engine_speeds(found: list[Row]) -> dict[Load, Speeds]:
    """The same of a whole model in vLLM: bf16's time per output token over the others'."""
    times = {
        (Load.of_row(row), row["kv"]): row["value"]
        for row in found
        if row["device"] == "cuda" and row["measure"] == "tpot" and row["value"] is not None
    }
    speeds: dict[Load, Speeds] = {}
    for (load, kv), value in times.items():
        if kv != "auto":
            speeds.setdefault(load, {})[kv] = times[load, "auto"] / value
    return speeds


def drawn_engines() -> dict[Load, Speeds]:
    """Those of `ENGINES`; what two files have is taken from the run with more caches."""
    found = engine_speeds(rows("vllm_engine_loads")) | engine_speeds(rows("vllm_engine"))
    return by_context({load: found[load] for load in ENGINES})


def speed() -> str:
    """Bars per shape: one layer's decode step, then time per output token in vLLM."""
    layers, engines = layer_speeds(), drawn_engines()
    (gpu,) = {row["gpu"] for row in rows("gpu_decode_20_shapes")}
    drawing = Drawing(
        "Decode speed against bf16: higher is better",
        f"{gpu}, Llama-3.1-8B shape; below: sequences x context",
    )
    groups = [
        (size, {name: speeds[name] for name in BARS if name in speeds})
        for size, speeds in (*layers.items(), *engines.items())
    ]
    drawn = [name for name in BARS if any(name in speeds for _, speeds in groups)]
    top = math.ceil(max(value for _, speeds in groups for value in speeds.values()))
    gap = 0.6  # between groups, in bars; twice as much before the engines
    slots = [max(LEAST_SLOT, len(speeds)) for _, speeds in groups]  # a group's label needs room
    width = (RIGHT - LEFT) / (sum(slots) + gap * (len(groups) + 1))

    def at_y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP - 22) * value / top

    for value in range(top + 1):
        drawing.line(LEFT, at_y(value), RIGHT, at_y(value), INK if value == 1 else GRID)
        words, ink = ("bf16", INK) if value == 1 else (f"{value}", MUTED)
        drawing.text(LEFT - 8, at_y(value) + 4, words, anchor="end", fill=ink)
    drawing.text(14, (TOP + BOTTOM) / 2, "times as fast as bf16", anchor="middle", turn=True)
    left, split = LEFT + gap * width / 2, float(RIGHT)
    for number, (load, speeds) in enumerate(groups):
        if number == len(layers):
            left, split = left + gap * width, left
        middle = left + slots[number] * width / 2
        x = middle - len(speeds) * width / 2
        for place, (name, value) in enumerate(speeds.items()):
            drawing.bar(
                x + place * width, at_y(value), width - 2, BOTTOM - at_y(value), BARS[name][0]
            )
        if "k4v4" in speeds:
            value, place = speeds["k4v4"], list(speeds).index("k4v4")
            top_x, words = x + (place + 0.5) * width - 1, f"{value:.1f}"
            drawing.text(top_x, at_y(value) - 5, words, anchor="middle", size=12)
        for row, words in enumerate(label_of(load).split(" x ")):
            mark = " x" if row == 0 else ""
            drawing.text(middle, BOTTOM + 16 * (row + 1), words + mark, anchor="middle")
        left += (slots[number] + gap) * width
    drawing.line(LEFT, BOTTOM, RIGHT, BOTTOM, INK)
    middle, words = (LEFT + split) / 2, "decode step of one layer"
    drawing.text(middle, BOTTOM + 54, words, anchor="middle", fill=MUTED)
    if engines:
        middle = (split + RIGHT) / 2
        drawing.text(middle, BOTTOM + 54, "whole model in vLLM", anchor="middle", fill=MUTED)
    at = 12.0
    for name in drawn:
        color, words = BARS[name]
        drawing.bar(at, TOP - 10, 12, 12, color)
        drawing.text(at + 17, TOP + 1, words)
        at += 34 + 8 * len(words)
    return drawing.svg()


DRAWINGS = {"quality.svg": quality, "speed.svg": speed}


def main() -> None:
    PLOTS.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (PLOTS / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
