"""The text and the figure of `tightkv plan`, from the object that --json prints."""

from __future__ import annotations

from typing import Any

from tightkv.model_shape.planner import CachePlan
from tightkv.tools.cli.shared.output import format_table, human_bytes, or_dash, save_plot

_PLOT_POINTS = 160


def as_text(data: dict[str, Any]) -> str:
    model = data["model"]
    limit = f", up to {model['max_positions']} tokens" if model["max_positions"] else ""
    ranks = f"; each of {data['tp']} ranks holds" if data["tp"] > 1 else ""
    lines = [
        f"{model['name']} ({model['model_type']}): {model['num_layers']} layers, "
        f"{model['num_heads']} query heads, {model['dtype']}{limit}{ranks}",
        *(f"  {_layer_line(group)}" for group in model["layers"]),
        *_memory_line(data["weights"], data["memory"]),
    ]
    notes = [f"note: {note}" for note in data["notes"]]
    return "\n".join([*lines, "", _table(data), *notes])


def _layer_line(group: dict[str, Any]) -> str:
    about = [f"{group['count']} x {group['kind']}"]
    if group["num_kv_heads"]:
        about.append(f"{group['num_kv_heads']} KV heads of {group['head_dim']}")
    if group["latent_dim"]:
        about.append(f"{group['latent_dim']} numbers per token")
    if group["index_bytes"]:
        about.append(f"an index of {group['index_bytes']} bytes per token")
    if group["window"]:
        about.append(f"at most {group['window']} tokens")
    if group["state_bytes"]:
        about.append(f"state of {human_bytes(group['state_bytes'])} per sequence")
    kept = f"not compressed: {group['skip_reason']}"
    if group["compressed"]:
        kept = "compressed in vLLM" if group["kind"] == "mla" else "compressed"
    return f"{', '.join(about)} ({kept})"


def _memory_line(weights: dict[str, Any] | None, memory: dict[str, Any] | None) -> list[str]:
    parts = []
    if weights is not None:
        dtype = f" {weights['dtype']}" if weights["dtype"] else ""
        parts.append(f"weights {human_bytes(weights['bytes'])}{dtype} ({weights['source']})")
    if memory is not None:
        share = f"{memory['gpu'] or 'budget'} x {memory['utilization']:g}"
        parts.append(f"memory {human_bytes(memory['budget_bytes'])} ({share})")
        parts.append(f"left for the cache {human_bytes(memory['cache_bytes'])}")
    return ["; ".join(parts)] if parts else []


def _table(data: dict[str, Any]) -> str:
    context, batch = data["context"], data["batch"]
    header = ["cache", "B/token/layer", "B/token", "smaller", f"{batch} x {context}", "smaller"]
    if data["memory"] is not None:
        header += ["tokens that fit", f"requests of {context}"]
    rows = []
    for row in data["rows"]:
        layer, token = row["bytes_per_token_per_layer"], row["bytes_per_token"]
        cells = [
            row["name"],
            *(or_dash(x, "{:.0f}" if x == int(x or 0) else "{:.1f}") for x in (layer, token)),
            or_dash(row["ratio"], "{:.2f}x"),
            human_bytes(row["total_bytes"]),
            or_dash(row["total_ratio"], "{:.2f}x"),
        ]
        if data["memory"] is not None:
            tokens = row["max_tokens"]
            cells += ["no limit" if tokens is None else tokens, row["max_requests"]]
        rows.append(cells)
    return format_table(header, rows)


def draw(path: str, data: dict[str, Any], plans: list[CachePlan]) -> None:
    """Left: bytes against context. Right: tokens that fit, or bytes per token without a budget."""
    title, memory = f"KV cache of {data['model']['name']}", data["memory"]
    if data["tp"] > 1:
        title += f", one of {data['tp']} ranks"
    if memory is not None:
        left = human_bytes(memory["cache_bytes"])
        title += f", {left} left of {memory['gpu'] or 'the budget'} after weights"
    with save_plot(path, width=11.0, height=5.0) as figure:
        from matplotlib import colormaps

        # grey for the two baselines, then dark to light
        shades = [0.88 * i / max(1, len(plans) - 3) for i in range(len(plans) - 2)]
        colours = ["black", "dimgrey", *map(colormaps["viridis"], shades)]
        figure.suptitle(title, fontsize=12)
        axes = figure.subplots(1, 2, width_ratios=(3, 2))
        _draw_growth(axes[0], data, plans, colours)
        _draw_bars(axes[1], data, colours)


def _draw_growth(
    axes: Any, data: dict[str, Any], plans: list[CachePlan], colours: list[Any]
) -> None:
    longest = max(data["context"], data["model"]["max_positions"] or 0)
    xs = [round(longest * i / _PLOT_POINTS) for i in range(_PLOT_POINTS + 1)]
    ends: dict[int, tuple[str, Any]] = {}  # plans that end at the same height share a label
    for plan, colour in zip(plans, colours, strict=True):
        sizes = [plan.total_bytes(x, data["batch"]) for x in xs]
        style = "--" if plan.config is None else "-"
        axes.plot(xs, [size / 2**30 for size in sizes], style, color=colour, linewidth=1.8)
        names = [ends[sizes[-1]][0]] if sizes[-1] in ends else []
        ends[sizes[-1]] = (", ".join([*names, plan.name]), colour)
    top = max(ends) / 2**30
    limit = data["memory"] and data["memory"]["cache_bytes"] / 2**30
    if limit and limit < 1.2 * top:
        axes.axhline(limit, color="tab:red", linewidth=1)
        place = {"xytext": (4, 3), "textcoords": "offset points"}
        axes.annotate("memory for the cache", (0, limit), color="tab:red", fontsize=8, **place)
        top = max(top, limit)
    for y, end in zip(_spread(sorted(ends), 0.045 * top * 2**30), sorted(ends), strict=True):
        name, colour = ends[end]
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (longest, y / 2**30), color=colour, fontsize=8, **place)
    axes.set(xlim=(0, longest), ylim=(0, 1.05 * top), ylabel="GiB")
    axes.set_xlabel("tokens of context" + (f", {data['batch']} requests" * (data["batch"] > 1)))
    axes.set_xticks([longest * i // 4 for i in range(5)])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1024:.0f}k" if x >= 8192 else f"{x:.0f}")


def _spread(heights: list[int], gap: float) -> list[float]:
    """`heights`, rising, moved as little as needed for neighbours to be about `gap` apart."""
    placed = [float(height) for height in heights]
    for _ in range(200):
        for low in range(len(placed) - 1):
            overlap = max(0.0, gap - (placed[low + 1] - placed[low]))
            placed[low] -= overlap / 2
            placed[low + 1] += overlap / 2
    return placed


def _draw_bars(axes: Any, data: dict[str, Any], colours: list[Any]) -> None:
    rows = data["rows"]
    if data["memory"] is not None and all(row["max_tokens"] is not None for row in rows):
        values = [row["max_tokens"] / 1024 for row in rows]
        texts = [f"{value:,.0f}k" for value in values]
        label = "thousands (1024) of tokens that fit, one request"
    else:
        values = [row["total_bytes"] / 2**30 for row in rows]
        texts = [human_bytes(row["total_bytes"]) for row in rows]
        label = f"GiB for {data['batch']} x {data['context']} tokens"
    bars = axes.barh([row["name"] for row in rows], values, color=colours)
    axes.bar_label(bars, texts, padding=3, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.grid(visible=False)
    axes.set_xlabel(label)
