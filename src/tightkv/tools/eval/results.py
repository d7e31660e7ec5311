"""What a row says of a model, its texts and a cache, and results that are kept for a later run."""

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import tightkv
from tightkv.config import cache_root
from tightkv.files.atomic import check_appendable
from tightkv.integrations.transformers.cache_size import growing_layers
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.tools.eval.forward import CacheRun, MakeCache
from tightkv.tools.eval.tasks.base import digest
from tightkv.tools.eval.text import Text
from tightkv.tools.rows import append_rows, versions

_SAMPLES = 64  # numbers of each weight that go into a model's fingerprint

# Parts of the package that measure nothing.
_NOT_MEASURING = ("tools/bench", "tools/cli", "tools/validate")
_SUFFIXES = (".py", ".c", ".cu", ".cuh", ".h", ".so")


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
    """The kernels of a cache of this model, by name, and the size of its pages.

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
    bytes_per_token = (key + value) / 8
    key, value = key / elements, value / elements
    return {
        "kernels": ", ".join(sorted(kernels)) or "none",
        "bits": {"key": key, "value": value, "mean": (key + value) / 2},
        "bytes_per_token": bytes_per_token,
    }


# --- results that are kept, so that a run can go on after an interruption ---
class Store(dict[str, Any]):
    """A result by its key; `fresh` finds nothing but still keeps what is measured."""

    def __init__(self, path: str | Path | None = None, fresh: bool = False) -> None:
        self.path = cache_root() / "eval.jsonl" if path is None else Path(path)
        check_appendable(self.path)
        self._lost = False
        super().__init__({} if fresh else _read(self.path))

    def keep(self, key: str, about: Mapping[str, Any], result: Any) -> None:
        """Written at once: an interrupted run goes on after it. A full disk stops no run."""
        self[key] = result
        time = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = {"kind": "eval-result", "key": key, "time": time, **about, "result": result}
        try:
            append_rows(self.path, [row])
        except OSError as error:
            if not self._lost:
                warnings.warn(f"results are not stored in {self.path}: {error}", stacklevel=2)
            self._lost = True


def result_key(about: Mapping[str, Any]) -> str:
    """Of model, config, task and settings, and of the code that measures."""
    versions = [torch.__version__, transformers.__version__, code_digest()]
    return digest([dict(about), versions])


@cache
def code_digest() -> str:
    """16 hex digits of the package's own source: a changed kernel gives new results."""
    root = Path(tightkv.__file__).resolve().parent
    found = hashlib.sha256()
    for file in sorted(root.rglob("*")):
        place = file.relative_to(root)
        if file.suffix in _SUFFIXES and not str(place).startswith(_NOT_MEASURING):
            found.update(str(place).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    """The last result of each key; a line that was cut off by an interruption is none."""
    results: dict[str, Any] = {}
    if not path.is_file():
        return results
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and row.get("kind") == "eval-result" and "key" in row:
            results[str(row["key"])] = row.get("result")
    return results
