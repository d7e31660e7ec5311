"""A cache to one file."""

import json
import os
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.files.atomic import whole_file
from tightkv.files.tensor_file import checksum
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.integrations.transformers.saving.header import ROW_FIELDS, parse_header
from tightkv.integrations.transformers.saving.reading import (
    CENTER_TENSORS,
    SCALE_TENSOR,
    SavedCache,
)
from tightkv.integrations.transformers.saving.states import write_state
from tightkv.integrations.transformers.steps import SharedSteps
from tightkv.paged.sequences import SequenceTable


def save_cache(
    path: str | os.PathLike[str],
    quant: KVQuantConfig,
    table: SequenceTable,
    layers: list[Any],
    *,
    grows: bool,
    weights: str,
) -> None:
    """Write the whole cache; the file appears complete or not at all.

    `weights`: the mark of the model's, if it is known.
    """
    used = sorted({page for row in table.rows for page in row.pages})
    place = {page: i for i, page in enumerate(used)}
    tensors: dict[str, Tensor] = {}
    header = {
        "format_version": FORMAT_VERSION,
        "quant": quant.to_dict(),
        "fingerprint": quant.fingerprint(),
        "grows": grows,
        "rows": [
            {
                **{name: getattr(row, own) for name, own in ROW_FIELDS.items()},
                "pages": [place[page] for page in row.pages],
            }
            for row in table.rows
        ],
        "layers": [_layer(layer, f"layers.{i}.", used, tensors) for i, layer in enumerate(layers)],
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps(header, sort_keys=True)
    _check(quant, text, tensors)
    metadata = {"tightkv": text, "checksum": checksum(text + weights, tensors)}
    if weights:
        metadata["weights"] = weights
    with whole_file(path, mode=0o600) as temporary:  # a cache tells what was asked
        save_file(tensors, temporary, metadata)


def _check(quant: KVQuantConfig, text: str, tensors: dict[str, Tensor]) -> None:
    """Raise if what would be written could not be read."""
    try:
        saved = SavedCache("it", parse_header(text), tensors)
        saved.make_layers(SharedSteps(quant), "auto", torch.device("cpu"), [])
    except ValueError as error:
        raise ValueError(f"this cache cannot be saved: {error}") from None


def _layer(layer: Any, prefix: str, used: list[int], tensors: dict[str, Tensor]) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": type(layer).__name__}
    if isinstance(layer, TightLayer):
        entry["tight"] = {"length": 0, "quant": layer.cfg.to_dict(), "layout": None}
        if layer.kv is not None and len(layer.shared.table):
            kv = layer.kv
            heads, dim = kv.layout.num_kv_heads, kv.layout.head_dim
            entry["tight"]["length"] = layer.length
            entry["tight"]["layout"] = [heads, dim, str(layer.dtype)]
            index = torch.tensor(used, dtype=torch.long, device=kv.device)
            tensors[f"{prefix}pages"] = kv.pages[index].cpu()
            layer.offload()  # before the next layer's pages come to the device
            for name in kv.exact_names:
                tensors[prefix + name] = getattr(kv, name)
            if layer.centers is not None:
                centers = layer.centers.key, layer.centers.value
                for name, center in zip(CENTER_TENSORS, centers, strict=True):
                    tensors[prefix + name] = center.bfloat16()
            if layer.scale is not None:
                tensors[prefix + SCALE_TENSOR] = layer.scale.value.bfloat16()
    if type(layer) is not TightLayer:
        entry["state"] = write_state(layer, f"{prefix}state.", tensors)
    return entry
