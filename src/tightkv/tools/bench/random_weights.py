"""A checkpoint of random weights: what engines decide from weights is decided as for a model.

vLLM's own random weights ("dummy") are in no file, so error feedback, key scales and more bits for
some layers would be left out.
"""

import json
import shutil
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

_BLOCK = (1 << 24) - 3  # random numbers, of which weights are repetitions: no two rows are equal
_NEXT = 5_000_011  # where among them the next weight begins
_SCALE = 0.02


def write_random_weights(folder: Path) -> None:
    """Weights for the config.json of a folder, a file per layer."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = dict(model.named_parameters())  # without tied ones
    size, free = sum(x.nbytes for x in shapes.values()), shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"random weights of {size / 1e9:.1f} GB do not fit {folder.parent}, where "
            f"{free / 1e9:.1f} GB are free; set TMPDIR to a folder on a larger disk"
        )
    source = torch.Generator("cpu").manual_seed(0)
    block = torch.randn(_BLOCK, generator=source, dtype=torch.float32, device="cpu")
    block = block.mul_(_SCALE).bfloat16()
    files: dict[str, str] = {}
    for number, (_, names) in enumerate(groupby(shapes, key=_layer_of)):
        weights = {}
        for name in names:
            weights[name] = _weight(shapes[name], block)
            block = block.roll(_NEXT)
        save_file(weights, folder / f"{number}.safetensors", metadata={"format": "pt"})
        files |= dict.fromkeys(weights, f"{number}.safetensors")
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def _layer_of(name: str) -> str:
    """What is before the first number in a weight's name, and that number."""
    parts = name.split(".")
    ends = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: ends[0] + 1]) if ends else name


def _weight(like: Tensor, block: Tensor) -> Tensor:
    """A matrix of random numbers; vectors, which scale what norms give, are ones."""
    if like.dim() < 2:
        return torch.ones(like.shape, dtype=torch.bfloat16, device="cpu")
    return block.repeat(-(-like.numel() // len(block)))[: like.numel()].view(like.shape)
