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
    """KL and perplexity against bits; needles against context; greedy match against bits."""
    panels = []
    if data["reference"]["perplexity"] is not None:
        panels += [_draw_kl, _draw_perplexity]
    if data["reference"]["needles"]:
        panels.append(_draw_needles)
    elif any(row["greedy"] for row in data["rows"]):
        panels.append(_draw_greedy)
    with save_plot(path, width=5.2 * len(panels), height=4.6) as figure:
        figure.suptitle(f"{data['model']['name']}: compressed against uncompressed KV cache")
        for axes, panel in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            panel(axes, data, _colours(len(data["rows"])))


def _colours(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["viridis"](0.85 * i / max(1, count - 1)) for i in range(count)]


def _draw_kl(axes: Any, data: dict[str, Any], colours: Sequence[Any]) -> None:
    for row, colour in zip(data["rows"], colours, strict=True):
        kl, high = row["quality"]["kl"], row["quality"]["kl_p99"]
        x = row["bits"]["mean"]
        axes.plot([x, x], [kl, high], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot(x, high, "_", color=colour, markersize=9)
        axes.plot(x, kl, "o", color=colour, markersize=7)
        _label_point(axes, row["name"], x, kl)
    axes.set_yscale("log")
    axes.set_title("KL to the uncompressed model", fontsize=11)
    axes.set_ylabel("nats a token: mean (dot), 99th percentile (bar)")
    _bits_axis(axes, data)


def _draw_perplexity(axes: Any, data: dict[str, Any], colours: Sequence[Any]) -> None:
    for row, colour in zip(data["rows"], colours, strict=True):
        x, y = row["bits"]["mean"], 100 * row["quality"]["perplexity_increase"]
        axes.plot(x, y, "o", color=colour, markersize=7)
        _label_point(axes, row["name"], x, y)
    axes.axhline(0, color="grey", linewidth=0.8)
    reference = data["reference"]["perplexity"]
    axes.set_title(f"Perplexity (uncompressed: {reference:.2f})", fontsize=11)
    axes.set_ylabel("change in %")
    _bits_axis(axes, data)


def _draw_greedy(axes: Any, data: dict[str, Any], colours: Sequence[Any]) -> None:
    for row, colour in zip(data["rows"], colours, strict=True):
        x, greedy = row["bits"]["mean"], row["greedy"]
        axes.plot([x] * len(greedy["lengths"]), greedy["lengths"], ".", color=colour, alpha=0.5)
        axes.plot(x, greedy["median"], "o", color=colour, markersize=7)
        _label_point(axes, row["name"], x, greedy["median"])
    axes.axhline(data["settings"]["new_tokens"], color="grey", linewidth=0.8, linestyle="--")
    axes.set_title("Greedy tokens before the texts part", fontsize=11)
    axes.set_ylabel("tokens: each prompt, and the median")
    _bits_axis(axes, data)


def _draw_needles(axes: Any, data: dict[str, Any], colours: Sequence[Any]) -> None:
    lines = [("uncompressed", data["reference"]["needles"], "black")]
    names = [(row["name"], row["needles"]) for row in data["rows"]]
    lines += [(*name, colour) for name, colour in zip(names, colours, strict=True)]
    contexts = [entry["context"] for entry in data["reference"]["needles"]]
    width = 0.8 / len(lines)
    for i, (name, entries, colour) in enumerate(lines):
        xs = [place + (i - (len(lines) - 1) / 2) * width for place in range(len(contexts))]
        heights = [entry["found"] for entry in entries]
        axes.bar(xs, heights, width=0.9 * width, color=colour, label=name)
    axes.set_xticks(range(len(contexts)), [str(context) for context in contexts])
    axes.set_ylim(0, data["settings"]["needles"] + 0.3)
    axes.set_yticks(range(data["settings"]["needles"] + 1))
    axes.set_title(f"Needles found, of {data['settings']['needles']}", fontsize=11)
    axes.set_xlabel("context (tokens)")
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3)


def _label_point(axes: Any, name: str, x: float, y: float) -> None:
    axes.annotate(name, (x, y), xytext=(7, 4), textcoords="offset points", fontsize=9)


def _bits_axis(axes: Any, data: dict[str, Any]) -> None:
    bits = [row["bits"]["mean"] for row in data["rows"]]
    axes.set_xlim(min(bits) - 0.4, max(bits) + 0.9)
    axes.set_xlabel("bits an element, scales and means included")
    axes.grid(alpha=0.3)
