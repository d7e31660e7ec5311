"""The text and the figure of `tightkv plan`, from the object that --json prints."""

from typing import Any

from tightkv.model_shape.planner import CachePlan
from tightkv.tools.cli.shared.output import format_table, human_bytes, or_dash, save_plot

_PLOT_POINTS = 160
_LAYER_FIGURES = {  # field -> what is said of a layer that has it
    "num_kv_heads": "{num_kv_heads} KV heads of {head_dim}",
    "latent_dim": "{latent_dim} numbers per token",
    "index_bytes": "an index of {index_bytes} bytes per token",
    "window": "at most {window} tokens",
}


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
    about += [form.format(**group) for field, form in _LAYER_FIGURES.items() if group[field]]
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
    """Left: bytes against context. Right: tokens that fit, or bytes without a budget."""
    rows, memory, batch = data["rows"], data["memory"], data["batch"]
    longest = max(data["context"], data["model"]["max_positions"] or 0)
    xs = [round(longest * i / _PLOT_POINTS) for i in range(_PLOT_POINTS + 1)]
    title = f"KV cache of {data['model']['name']}"
    title += f", one of {data['tp']} ranks" if data["tp"] > 1 else ""
    with save_plot(path, width=11.0, height=5.0) as figure:
        figure.suptitle(title, fontsize=12)
        from matplotlib import colormaps

        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        colours = [colormaps["viridis"](0.9 * i / len(plans)) for i in range(len(plans))]
        for plan, colour in zip(plans, colours, strict=True):
            sizes = [plan.total_bytes(x, batch) / 2**30 for x in xs]
            style = "--" if plan.config is None else "-"
            left.plot(xs, sizes, style, color=colour, label=plan.name)
        left.set(xlim=(0, longest), ylim=(0, None), ylabel="GiB")
        left.set_xlabel(
            f"tokens of context, {batch} requests" if batch > 1 else "tokens of context"
        )
        if memory is not None and memory["cache_bytes"] / 2**30 < left.get_ylim()[1]:
            limit = memory["cache_bytes"] / 2**30
            left.axhline(limit, color="tab:red", linewidth=1, label="memory for the cache")
        left.legend(fontsize=8)
        if memory is not None and all(row["max_tokens"] is not None for row in rows):
            values = [row["max_tokens"] for row in rows]
            texts, label = [f"{n:,}" for n in values], "tokens that fit, one request"
        else:
            values = [row["total_bytes"] for row in rows]
            texts, label = list(map(human_bytes, values)), f"bytes of {batch} x {data['context']}"
        bars = right.barh([row["name"] for row in rows], values, color=colours)
        right.bar_label(bars, texts, padding=3, fontsize=8)
        right.invert_yaxis()
        right.margins(x=0.22)
        right.set_xticks([])
        right.set_xlabel(label)
