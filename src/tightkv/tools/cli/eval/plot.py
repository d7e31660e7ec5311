"""The figure of `tightkv eval`, from the object that --json prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightkv.tools.cli.shared.output import save_plot


def draw(path: str, data: dict[str, Any]) -> None:
    """KL and perplexity against bits, needles against context, greedy match against bits."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D

    panels = []
    if data["reference"]["perplexity"] is not None:
        panels += [_draw_kl, _draw_perplexity]
    if data["reference"]["needles"]:
        panels.append(_draw_needles)
    if any(row["greedy"] for row in data["rows"]):
        panels.append(_draw_greedy)
    lines = 2 if len(panels) == 4 else 1
    across = len(panels) // lines
    steps = max(1, len(data["rows"]) - 1)
    shades = [colormaps["viridis"](0.85 * i / steps) for i in range(len(data["rows"]))]
    rows = [{**row, "colour": shade} for row, shade in zip(data["rows"], shades, strict=True)]
    data = {**data, "rows": rows}
    colours = {"uncompressed": "black", **{row["name"]: row["colour"] for row in rows}}
    marks = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in colours.values()]
    columns = max(1, min(len(colours), 110 // (max(map(len, colours)) + 4)))
    with save_plot(path, width=5.4 * across, height=4.2 * lines + 0.6) as figure:
        figure.suptitle(f"{data['model']['name']}: compressed against uncompressed KV cache")
        every = figure.subplots(lines, across, squeeze=False).flat
        for axes, panel in zip(every, panels, strict=True):
            panel(axes, data)
        figure.legend(marks, list(colours), loc="outside lower center", ncols=columns)


def _draw_kl(axes: Any, data: dict[str, Any]) -> None:
    for row in data["rows"]:
        x, kl, high = row["bits"]["mean"], row["quality"]["kl"], row["quality"]["kl_p99"]
        axes.plot([x, x], [kl, high], color=row["colour"], linewidth=1.2, alpha=0.6)
        axes.plot(x, high, "_", color=row["colour"], markersize=9)
    _points(axes, data, lambda row: row["quality"]["kl"])
    axes.set(yscale="log", title="KL to the uncompressed model")
    axes.set_ylabel("nats per token: mean (dot) to 99th percentile")


def _draw_perplexity(axes: Any, data: dict[str, Any]) -> None:
    _points(axes, data, lambda row: 100 * row["quality"]["perplexity_increase"])
    axes.axhline(0, color="black", linewidth=0.8)
    title = f"Perplexity (uncompressed: {data['reference']['perplexity']:.2f})"
    axes.set(title=title, ylabel="change in %")


def _draw_greedy(axes: Any, data: dict[str, Any]) -> None:
    for row in data["rows"]:
        lengths = row["greedy"]["lengths"]
        xs = [row["bits"]["mean"]] * len(lengths)
        axes.plot(xs, lengths, "x", color=row["colour"], alpha=0.6)
    _points(axes, data, lambda row: row["greedy"]["median"])
    most = data["settings"]["new_tokens"]
    axes.axhline(most, color="black", linewidth=0.8)
    axes.set(ylim=(0, 1.12 * most), ylabel="tokens: each prompt (x), median (dot)")
    axes.set_title(f"Greedy tokens before the texts diverge, {most} at most")


def _draw_needles(axes: Any, data: dict[str, Any]) -> None:
    exact = data["reference"]["needles"]
    bars = [("black", exact), *((row["colour"], row["needles"]) for row in data["rows"])]
    contexts, asked = [entry["context"] for entry in exact], data["settings"]["needles"]
    width = 0.8 / len(bars)
    for i, (colour, entries) in enumerate(bars):
        xs = [place + (i - (len(bars) - 1) / 2) * width for place in range(len(contexts))]
        axes.bar(xs, [entry["found"] for entry in entries], width=0.9 * width, color=colour)
    axes.set_xticks(range(len(contexts)), contexts)
    axes.set(xlim=(-0.6, len(contexts) - 0.4), ylim=(0, asked + 0.3), yticks=range(asked + 1))
    axes.set(title=f"Needles found, of {asked}", xlabel="context (tokens)")
    axes.grid(visible=False, axis="x")


def _points(axes: Any, data: dict[str, Any], y: Callable[[Any], float]) -> None:
    """A labelled dot for each config, over its bits."""
    place = {"xytext": (8, 3), "textcoords": "offset points", "fontsize": 9}
    for row in data["rows"]:
        at = row["bits"]["mean"], y(row)
        axes.plot(*at, "o", color=row["colour"], markersize=7)
        axes.annotate(row["name"].split()[0], at, **place)
    bits = [row["bits"]["mean"] for row in data["rows"]]
    axes.set_xlim(min(bits) - 0.4, max(bits) + 0.7)
    axes.set_xlabel("bits per element, with scales and means")
