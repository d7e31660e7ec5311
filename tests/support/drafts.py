"""EAGLE heads for tiny models, whose drafts are often right."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_eagle_head(model: Path, folder: Path) -> Path:
    """The first layer of a llama, as a head that looks at embeddings alone.

    Such a head does not normalize what its layer reads: matrices are scaled by what a norm would.
    """
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    size = weights["model.embed_tokens.weight"].float().square().mean().sqrt()
    hidden = config["hidden_size"]
    head = {"fc.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1).bfloat16()}
    for name, tensor in weights.items():
        if name.startswith("model.layers.0.") and "input_layernorm" not in name:
            normed = any(part in name for part in ("q_proj", "k_proj", "v_proj"))
            head[name.removeprefix("model.")] = (tensor / size if normed else tensor).bfloat16()
    folder.mkdir()
    save_file(head, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder
