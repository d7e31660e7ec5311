"""The text, the file rows and the figure of `tightkv eval`, from the object that --json prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightkv.cli.output import format_table, human_bytes, save_plot


def as_text(data: dict[str, Any]) -> str:
    parts = [_head(data)]
    if data["reference"]["perplexity"] is not None:
        parts += ["", _quality_title(data), _quality_table(data)]
    if data["reference"]["needles"]:
        asked = data["settings"]["needles"]
        parts += ["", f"Needles found, of {asked} at each context:", _needle_table(data)]
    if any(row["greedy"] for row in data["rows"]):
        parts += ["", _greedy_title(data), _greedy_table(data)]
    parts += [f"note: {note}" for note in data["notes"]]
    return "\n".join(parts)


def file_rows(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Each row with everything that says where it comes from."""
    shared = {name: value for name, value in data.items() if name != "rows"}
    return [{"kind": "eval", **shared, **row} for row in data["rows"]]


def _head(data: dict[str, Any]) -> str:
    model = data["model"]
    texts = ", ".join(text["name"] for text in data["texts"])
    return (
        f"{model['name']} ({model['dtype']} on {data['machine']['gpu'] or model['device']}); "
        f"texts: {texts}; {data['seconds']:.0f} s"
    )


def _quality_title(data: dict[str, Any]) -> str:
    s, positions = data["settings"], data["rows"][0]["quality"]["positions"]
    return (
        f"{s['windows']} windows of {s['window']} tokens, {positions} positions scored after a "
        f"prefill of {s['prefill']}, {s['chunk']} tokens a pass; "
        f"perplexity of the uncompressed cache {data['reference']['perplexity']:.3f}:"
    )


def _quality_table(data: dict[str, Any]) -> str:
    window = data["settings"]["window"]
    header = ["cache", "bits K", "bits V", "KL", "KL p99", "top-1", "perplexity", "change"]
    header += [f"bytes at {window}", "smaller"]
    rows = []
    for row in data["rows"]:
        quality = row["quality"]
        rows.append(
            [
                row["name"],
                f"{row['bits']['key']:.3g}",
                f"{row['bits']['value']:.3g}",
                f"{quality['kl']:.5f}",
                f"{quality['kl_p99']:.4f}",
                f"{quality['top1']:.2%}",
                f"{quality['perplexity']:.3f}",
                f"{quality['perplexity_increase']:+.2%}",
                human_bytes(quality["bytes_held"]),
                f"{quality['ratio']:.2f}x",
            ]
        )
    return format_table(header, rows)


def _needle_table(data: dict[str, Any]) -> str:
    reference = data["reference"]["needles"]
    header = ["cache", *(str(entry["context"]) for entry in reference), "all"]
    rows = [_needle_cells("uncompressed", reference)]
    rows += [_needle_cells(row["name"], row["needles"]) for row in data["rows"]]
    return format_table(header, rows)


def _needle_cells(name: str, entries: Sequence[dict[str, Any]]) -> list[object]:
    found = [entry["found"] for entry in entries]
    asked = sum(entry["asked"] for entry in entries)
    return [name, *found, f"{sum(found)} of {asked}"]


def _greedy_title(data: dict[str, Any]) -> str:
    s = data["settings"]
    return (
        f"Greedy tokens before the texts part, {s['prompts']} prompts of {s['prompt_tokens']} "
        f"tokens, {s['new_tokens']} at most:"
    )


def _greedy_table(data: dict[str, Any]) -> str:
    rows = [
        [row["name"], f"{row['greedy']['median']:g}", row["greedy"]["min"]] for row in data["rows"]
    ]
    return format_table(["cache", "median", "least"], rows)


# --- the figure ---
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
        colour, x = colours[row["name"]], row["bits"]["mean"]
        kl, high = row["quality"]["kl"], row["quality"]["kl_p99"]
        axes.plot([x, x], [kl, high], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot(x, high, "_", color=colour, markersize=9)
        axes.plot(x, kl, "o", color=colour, markersize=7)
        _label_point(axes, row["name"], x, kl)
    axes.set_yscale("log")
    axes.set_title("KL to the uncompressed model", fontsize=11)
    axes.set_ylabel("nats a token: mean (dot) to 99th percentile")
    _bits_axis(axes, data)


def _draw_perplexity(axes: Any, data: dict[str, Any], colours: dict[str, Any]) -> None:
    for row in data["rows"]:
        x, y = row["bits"]["mean"], 100 * row["quality"]["perplexity_increase"]
        axes.plot(x, y, "o", color=colours[row["name"]], markersize=7)
        _label_point(axes, row["name"], x, y)
    axes.axhline(0, color="black", linewidth=0.8)
    reference = data["reference"]["perplexity"]
    axes.set_title(f"Perplexity (uncompressed: {reference:.2f})", fontsize=11)
    axes.set_ylabel("change in %")
    _bits_axis(axes, data)


def _draw_greedy(axes: Any, data: dict[str, Any], colours: dict[str, Any]) -> None:
    for row in data["rows"]:
        colour, x, greedy = colours[row["name"]], row["bits"]["mean"], row["greedy"]
        axes.plot([x] * len(greedy["lengths"]), greedy["lengths"], "x", color=colour, alpha=0.6)
        axes.plot(x, greedy["median"], "o", color=colour, markersize=7)
        _label_point(axes, row["name"], x, greedy["median"])
    most = data["settings"]["new_tokens"]
    axes.axhline(most, color="black", linewidth=0.8)
    axes.set_ylim(0, 1.12 * most)
    axes.set_title(f"Greedy tokens before the texts part, {most} at most", fontsize=11)
    axes.set_ylabel("tokens: each prompt (x), median (dot)")
    _bits_axis(axes, data)


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


def _label_point(axes: Any, name: str, x: float, y: float) -> None:
    axes.annotate(name.split()[0], (x, y), xytext=(8, 3), textcoords="offset points", fontsize=9)


def _bits_axis(axes: Any, data: dict[str, Any]) -> None:
    bits = [row["bits"]["mean"] for row in data["rows"]]
    axes.set_xlim(min(bits) - 0.4, max(bits) + 0.7)
    axes.set_xlabel("bits an element, with scales and means")
    axes.grid(alpha=0.3)
