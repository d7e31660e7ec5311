"""The figure of `tightkv eval`, from the object that --json prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tightkv.tools.cli.shared.output import save_plot


def draw(path: str, data: dict[str, Any]) -> None:
    """KL and perplexity against bits, needles against context, greedy match against bits."""
    panels = []
    if data["reference"]["perplexity"] is not None:
        panels += [_draw_kl, _draw_perplexity]
    if data["reference"]["needles"]:
        panels.append(_draw_needles)
    if any(row["greedy"] for row in data["rows"]):
        panels.append(_draw_greedy)
    lines = 2 if len(panels) == 4 else 1
    across = len(panels) // lines
    colours = _colours(data)
    with save_plot(path, width=5.4 * across, height=4.2 * lines + 0.6) as figure:
        figure.suptitle(f"{data['model']['name']}: compressed against uncompressed KV cache")
        for axes, panel in zip(
            figure.subplots(lines, across, squeeze=False).flat, panels, strict=True
        ):
            panel(axes, data, colours)
        _draw_legend(figure, colours)


def _colours(data: dict[str, Any]) -> dict[str, Any]:
    from matplotlib import colormaps

    names = [row["name"] for row in data["rows"]]
    steps = max(1, len(names) - 1)
    return {name: colormaps["viridis"](0.85 * i / steps) for i, name in enumerate(names)}


def _draw_legend(figure: Any, colours: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D

    names = {"uncompressed": "black", **colours}
    marks = [Line2D([], [], marker="o", linestyle="", color=colour) for colour in names.values()]
    longest = max(map(len, names))
    columns = max(1, min(len(names), 110 // (longest + 4)))
    figure.legend(marks, list(names), loc="outside lower center", ncols=columns, frameon=False)


def _draw_kl(axes: Any, data: dict[str, Any], colours: dict[str, Any]) -> None:
    for row in data["rows"]:
        x, kl, high = row["bits"]["mean"], row["quality"]["kl"], row["quality"]["kl_p99"]
        axes.plot([x, x], [kl, high], color=colours[row["name"]], linewidth=1.2, alpha=0.6)
        axes.plot(x, high, "_", color=colours[row["name"]], markersize=9)
    _points(axes, data, colours, lambda row: row["quality"]["kl"])
    axes.set_yscale("log")
    axes.set_title("KL to the uncompressed model", fontsize=11)
    axes.set_ylabel("nats per token: mean (dot) to 99th percentile")


def _draw_perplexity(axes: Any, data: dict[str, Any], colours: dict[str, Any]) -> None:
    _points(axes, data, colours, lambda row: 100 * row["quality"]["perplexity_increase"])
    axes.axhline(0, color="black", linewidth=0.8)
    reference = data["reference"]["perplexity"]
    axes.set_title(f"Perplexity (uncompressed: {reference:.2f})", fontsize=11)
    axes.set_ylabel("change in %")


def _draw_greedy(axes: Any, data: dict[str, Any], colours: dict[str, Any]) -> None:
    for row in data["rows"]:
        lengths = row["greedy"]["lengths"]
        xs = [row["bits"]["mean"]] * len(lengths)
        axes.plot(xs, lengths, "x", color=colours[row["name"]], alpha=0.6)
    _points(axes, data, colours, lambda row: row["greedy"]["median"])
    most = data["settings"]["new_tokens"]
    axes.axhline(most, color="black", linewidth=0.8)
    axes.set_ylim(0, 1.12 * most)
    axes.set_title(f"Greedy tokens before the texts diverge, {most} at most", fontsize=11)
    axes.set_ylabel("tokens: each prompt (x), median (dot)")


def _draw_needles(axes: Any, data: dict[str, Any], colours: dict[str, Any]) -> None:
    bars = [("black", data["reference"]["needles"])]
    bars += [(colours[row["name"]], row["needles"]) for row in data["rows"]]
    contexts = [entry["context"] for entry in data["reference"]["needles"]]
    width, asked = 0.8 / len(bars), data["settings"]["needles"]
    for i, (colour, entries) in enumerate(bars):
        xs = [place + (i - (len(bars) - 1) / 2) * width for place in range(len(contexts))]
        axes.bar(xs, [entry["found"] for entry in entries], width=0.9 * width, color=colour)
    axes.set_xticks(range(len(contexts)), [str(context) for context in contexts])
    axes.set_xlim(-0.6, len(contexts) - 0.4)
    axes.set_ylim(0, asked + 0.3)
    axes.set_yticks(range(asked + 1))
    axes.set_title(f"Needles found, of {asked}", fontsize=11)
    axes.set_xlabel("context (tokens)")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _points(
    axes: Any, data: dict[str, Any], colours: dict[str, Any], y: Callable[[Any], float]
) -> None:
    """A labelled dot for each config, over its bits."""
    for row in data["rows"]:
        name, x = row["name"], row["bits"]["mean"]
        axes.plot(x, y(row), "o", color=colours[name], markersize=7)
        place = {"xytext": (8, 3), "textcoords": "offset points", "fontsize": 9}
        axes.annotate(name.split()[0], (x, y(row)), **place)
    bits = [row["bits"]["mean"] for row in data["rows"]]
    axes.set_xlim(min(bits) - 0.4, max(bits) + 0.7)
    axes.set_xlabel("bits per element, with scales and means")
    axes.grid(alpha=0.3)
