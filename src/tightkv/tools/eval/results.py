"""What a row says of a model, its texts and a cache: fingerprints, bits, kernels."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from tightkv.integrations.transformers.cache_size import growing_layers
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.tools.eval.forward import CacheRun, MakeCache
from tightkv.tools.eval.tasks.base import digest
from tightkv.tools.eval.text import Text
from tightkv.tools.rows import versions

_SAMPLES = 64  # numbers of each weight that go into a model's fingerprint


def with_transformers() -> dict[str, Any]:
    """`versions` of a row about models of transformers."""
    return {**versions(), "transformers": transformers.__version__}


def model_facts(model: Any, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "fingerprint": model_fingerprint(model),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
    }


def model_fingerprint(model: Any) -> str:
    """16 hex digits from the name, shape and some numbers of every weight."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        sample = []
        if type(weight) is torch.Tensor and not weight.is_meta:  # not quantized
            flat = weight.flatten()
            sample = flat[:: max(1, len(flat) // _SAMPLES)][:_SAMPLES].double().tolist()
        digest.update(json.dumps([name, list(weight.shape), sample]).encode())
    return digest.hexdigest()[:16]


def architecture(model: Any) -> str:
    """16 hex digits of the model's config: equal weights can be used in different ways."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    return digest(config)


def text_facts(texts: Iterable[Text]) -> list[dict[str, Any]]:
    return [
        {"name": text.name, "sha256": text.sha256, "characters": len(text.content)}
        for text in texts
    ]


def cache_facts(model: Any, make: MakeCache) -> dict[str, Any]:
    """The kernels of a cache of this model, by name, and its bits per element in pages.

    Scales, page means and padding count. Bits are means over the full-attention layers; those that
    are left alone have 16 bits.
    """
    run = CacheRun(model, make())
    run.feed(torch.zeros(1, 1, dtype=torch.long, device="cpu"), last_only=True)  # tells the shapes
    elements = key = value = 0.0
    kernels = set()
    for layer in growing_layers(run.cache.layers):
        if isinstance(layer, TightLayer) and layer.kv is not None:
            kernels.add(layer.kv.kernels.NAME)
            layout = layer.kv.layout
            size = layout.num_kv_heads * layout.head_dim
            planes = [plane.size for plane in layout.planes.values() if plane.side == "value"]
            value_bits = 8 * layout.num_kv_heads * sum(planes) / layout.page_size
            key += 8 * layout.bytes_per_token - value_bits
            value += value_bits
        else:
            size = layer.keys.shape[1] * layer.keys.shape[3]  # [B, Hkv, tokens, D]
            key, value = key + 16 * size, value + 16 * size
        elements += size
    if not elements:
        raise ValueError("no layer of this model has a cache that grows: nothing can be measured")
    key, value = key / elements, value / elements
    return {
        "kernels": ", ".join(sorted(kernels)) or "none",
        "bits": {"key": key, "value": value, "mean": (key + value) / 2},
    }
