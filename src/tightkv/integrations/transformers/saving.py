"""A TightCache as one safetensors file: tensors, and a JSON header in the file's metadata.

The header has the format version, the config and its fingerprint, every layer's kind and
shape, the table, and a checksum over header and tensors. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils

from tightkv.cache import PagedKV
from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.integrations.transformers.layer import TightHybridLayer, TightLayer
from tightkv.layout import PageLayout
from tightkv.sequences import SequenceState

if TYPE_CHECKING:
    from tightkv.integrations.transformers.cache import TightCache

_DTYPES = {str(d): d for d in (torch.float32, torch.float16, torch.bfloat16)}
_KV_TENSORS = ("pages", "ring_key", "ring_value", "sink_key", "sink_value")


def save_cache(cache: TightCache, path: str | os.PathLike[str]) -> None:
    """Write the whole cache; the file appears complete or not at all."""
    table = cache.shared.table
    used = sorted({page for row in table.rows for page in row.pages})
    place = {page: i for i, page in enumerate(used)}
    tensors: dict[str, Tensor] = {}
    layers = [
        _save_layer(layer, f"layers.{i}.", used, tensors) for i, layer in enumerate(cache.layers)
    ]
    header = {
        "format_version": FORMAT_VERSION,
        "quant": cache.quant.to_dict(),
        "fingerprint": cache.quant.fingerprint(),
        "grows": cache.layer_class_to_replicate is not None,
        "rows": [
            {**asdict(row), "pages": [place[page] for page in row.pages]} for row in table.rows
        ],
        "layers": layers,
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps(header, sort_keys=True)
    metadata = {"tightkv": text, "checksum": _checksum(text, tensors)}
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_cache(
    path: str | os.PathLike[str], cache: TightCache, device: torch.device | str
) -> TightCache:
    """Fill an empty cache from a file."""
    header, tensors = _read(path)
    rows = [SequenceState(**row) for row in header["rows"]]
    cache.shared.table.restore(rows)
    loaded = []
    for i, entry in enumerate(header["layers"]):
        own = {
            name.removeprefix(f"layers.{i}."): t.to(device)
            for name, t in tensors.items()
            if name.startswith(f"layers.{i}.")
        }
        loaded.append(_load_layer(entry, own, cache, torch.device(device)))
    _check_layers(path, loaded, cache.layers, header["grows"])
    cache.layers = loaded
    return cache


def read_config(path: str | os.PathLike[str]) -> KVQuantConfig:
    """The config a file was written with, after all checks."""
    header, _ = _read(path)
    return KVQuantConfig.from_dict(header["quant"])


def check_model(path: str | os.PathLike[str], model: PreTrainedModel | PreTrainedConfig) -> None:
    """Refuse a file whose compressed layers have another shape than the model's."""
    config = (model.config if isinstance(model, PreTrainedModel) else model).get_text_config(
        decoder=True
    )
    header, _ = _read(path)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = {tuple(x["tight"]["layout"][:2]) for x in header["layers"] if _has_pages(x)}
    if shapes and (heads, dim) not in shapes:
        raise ValueError(
            f"{path} holds layers of (KV heads, head_dim) {sorted(shapes)}; this model has "
            f"{(heads, dim)}. Load it with the model it is from"
        )


def _has_pages(entry: dict[str, Any]) -> bool:
    return bool(entry.get("tight") and entry["tight"]["layout"])


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"{os.fspath(path)!r} is not a file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from None
    text = metadata.get("tightkv")
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but not one that TightCache.save wrote")
    if metadata.get("checksum") != _checksum(text, tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    header = json.loads(text)
    version = header["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}; this tightkv reads version {FORMAT_VERSION}. "
            "Load it with the tightkv that wrote it, or compute the cache again"
        )
    if KVQuantConfig.from_dict(header["quant"]).fingerprint() != header["fingerprint"]:
        raise ValueError(f"{path}: the config's fingerprint does not match its fields")
    return header, tensors


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        data = tensors[name].contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


# --- layers ---


def _save_layer(
    layer: Any, prefix: str, used: list[int], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": type(layer).__name__}
    if isinstance(layer, TightLayer):
        entry["tight"] = {"length": layer.length, "quant": layer.cfg.to_dict(), "layout": None}
        if layer.kv is not None:
            kv = layer.kv
            entry["tight"]["layout"] = [
                kv.layout.num_kv_heads,
                kv.layout.head_dim,
                str(kv.layout.dtype),
            ]
            index = torch.tensor(used, dtype=torch.long, device=kv.device)
            tensors[f"{prefix}pages"] = kv.pages[index]
            for name in _KV_TENSORS[1:]:
                tensors[prefix + name] = getattr(kv, name)
    if type(layer) is not TightLayer:
        entry["state"] = dict(_plain_state(layer, prefix + "state.", tensors))
    return entry


def _plain_state(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """Attributes of a layer of transformers' own: numbers here, tensors into `tensors`."""
    skip = vars(TightLayer(layer.shared, layer.cfg)) if isinstance(layer, TightLayer) else {}
    for name, value in vars(layer).items():
        if name in skip and name not in ("dtype", "device"):
            continue
        if isinstance(value, Tensor):
            tensors[prefix + name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, Tensor):
                    tensors[f"{prefix}{name}.{key}"] = item
            yield name, {str(k): None if isinstance(v, Tensor) else v for k, v in value.items()}
        elif isinstance(value, torch.dtype | torch.device):
            yield name, str(value) if isinstance(value, torch.dtype) else "device"
        elif value is None or isinstance(value, int | float | str):
            yield name, value
        else:
            raise ValueError(f"cannot save {type(layer).__name__}.{name}, a {type(value).__name__}")


def _load_layer(
    entry: dict[str, Any], tensors: dict[str, Tensor], cache: TightCache, device: torch.device
) -> Any:
    kind = entry["kind"]
    if "tight" in entry:
        cls: Any = TightHybridLayer if kind == "TightHybridLayer" else TightLayer
        layer = cls(cache.shared, KVQuantConfig.from_dict(entry["tight"]["quant"]), cache.kernels)
        _load_pages(layer, entry["tight"], tensors, device)
    else:
        cls = getattr(cache_utils, kind, None)
        if cls is None:
            raise ValueError(f"this transformers has no cache layer {kind!r}")
        layer = cls.__new__(cls)
    for name, value in entry.get("state", {}).items():
        if isinstance(value, dict):
            value = {int(k): tensors.get(f"state.{name}.{k}", v) for k, v in value.items()}
        elif name == "device":
            value = device if value is not None else None
        elif name == "dtype":
            value = _DTYPES.get(value)
        setattr(layer, name, value)
    for name, tensor in tensors.items():
        if name.startswith("state.") and name.count(".") == 1:
            setattr(layer, name.removeprefix("state."), tensor)
    return layer


def _load_pages(
    layer: TightLayer, entry: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
) -> None:
    layer.length = entry["length"]
    if entry["layout"] is None:
        return
    heads, dim, dtype = entry["layout"]
    layout = PageLayout(layer.cfg, heads, dim, _DTYPES[dtype])
    layer.kv = PagedKV(layout, layer.shared.table, device, layer.kernels)
    layer.dtype, layer.device, layer.is_initialized = layout.dtype, device, True
    for name in _KV_TENSORS:
        tensor, fresh = tensors[name], getattr(layer.kv, name)
        if tensor.shape[1:] != fresh.shape[1:] or tensor.dtype != fresh.dtype:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; the config gives another")
        setattr(layer.kv, name, tensor.clone())


def _check_layers(
    path: str | os.PathLike[str], loaded: list[Any], expected: list[Any], grows: bool
) -> None:
    """A cache made for a model takes only a file of the same layers."""
    kinds, wanted = [[type(layer).__name__ for layer in x] for x in (loaded, expected)]
    if expected and not grows and kinds != wanted:
        raise ValueError(
            f"{path} holds {len(kinds)} layers ({', '.join(sorted(set(kinds)))}); this model has "
            f"{len(wanted)} ({', '.join(sorted(set(wanted)))}). Load it with the model it is from"
        )
