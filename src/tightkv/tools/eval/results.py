"""Results as plain data: rows that say on what they were measured, and with what."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import torch
import transformers

import tightkv
from tightkv.tools.eval.tasks.base import digest
from tightkv.tools.eval.text import Text
from tightkv.tools.rows import source_commit

_SAMPLES = 64  # numbers of each weight that go into a model's fingerprint


def provenance() -> dict[str, Any]:
    """Versions, commit and time."""
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "tightkv": tightkv.__version__,
        "commit": source_commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


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
