"""From what a user names to the language model's part of its config, and the values in it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightkv.model_shape.families import DEFAULTS, NESTED_DEFAULTS

# Where a composite (vision, audio) model keeps its language model.
TEXT_PARTS = ("text_config", "thinker_config", "language_config", "llm_config")
# Read from the whole config when the language part does not say.
SHARED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")


@dataclass(frozen=True)
class ModelConfig:
    """The language model's config as a mapping with checked look-ups."""

    values: Mapping[str, Any]
    name: str
    folder: Path | None
    nested: bool

    @property
    def model_type(self) -> str:
        return str(self.values.get("model_type") or "")

    def first(self, *names: str) -> Any:
        """The first of `names` that is present and not null, else None."""
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        return None

    def number(self, *names: str) -> int | None:
        """As `first`, checked to be a whole number above 0."""
        value = self.first(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            name = next(n for n in names if self.values.get(n) is not None)
            raise ValueError(f"{name}={value!r} of {self.name}; it must be an integer > 0")
        return value

    def need(self, *names: str) -> int:
        value = self.number(*names)
        if value is None:
            raise ValueError(
                f"the config of {self.name} (model_type {self.model_type!r}) has no "
                f"{' or '.join(names)}"
            )
        return value


def is_local(source: str | os.PathLike[str]) -> bool:
    """Whether `source` names a file or folder rather than a model on a hub."""
    text = os.fspath(source)
    looks_like_path = text.endswith(".json") or text.startswith((".", "/", "~", "\\"))
    return looks_like_path or text.count("/") > 1 or Path(text).exists()


def load_config(source: Any) -> ModelConfig:
    """From a folder, a config.json, a mapping, or an object with `to_dict` (transformers)."""
    folder = None
    if isinstance(source, Mapping):
        whole, name = dict(source), source.get("_name_or_path")
    elif hasattr(source, "to_dict"):
        whole, name = source.to_dict(), getattr(source, "name_or_path", None)
    else:
        path = _config_path(source)
        folder, whole, name = path.parent, _read_json(path), path.parent.resolve().name
    return _text_part(whole, str(name or whole.get("model_type") or "model"), folder)


def _config_path(source: str | os.PathLike[str]) -> Path:
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{os.fspath(source)!r} is neither a folder with a config.json nor such a file"
        )
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a JSON {type(data).__name__}; a config is an object")
    return data


def _text_part(whole: dict[str, Any], name: str, folder: Path | None) -> ModelConfig:
    """The language model inside `whole`, with the defaults of its family."""
    part, nested = whole, False
    while key := next((k for k in TEXT_PARTS if isinstance(part.get(k), dict)), None):
        inner = dict(part[key])
        for shared in SHARED:
            if inner.get(shared) is None and part.get(shared) is not None:
                inner[shared] = part[shared]
        inner.setdefault("model_type", part.get("model_type"))
        part, nested = inner, True
    family = str(part.get("model_type") or "")
    defaults = {**(NESTED_DEFAULTS.get(family, {}) if nested else {}), **DEFAULTS.get(family, {})}
    return ModelConfig({**defaults, **part}, name, folder, nested)
