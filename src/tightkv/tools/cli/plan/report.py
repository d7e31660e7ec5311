"""The text of `tightkv plan`, from the object that --json prints."""

from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes, or_dash

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
