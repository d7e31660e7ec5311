"""ModelConfig: the language model's part of whatever config a user names, its values checked."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightkv.files.strict_json import short
from tightkv.model_shape.families import DEFAULTS, NESTED_DEFAULTS

# Where a composite (vision, audio) model keeps its language model.
TEXT_PARTS = ("text_config", "thinker_config", "language_config", "llm_config")
# Read from the whole config when the language part does not say.
SHARED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")

# No model has more: lists of layers and tensors of heads would fill the memory.
MOST_LAYERS = MOST_HEADS = MOST_DIM = 4096
MOST = 1 << 48


@dataclass(frozen=True)
class ModelConfig:
    """A language model's config; each look-up checks its value and names it if it is wrong."""

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

    def wrong(self, name: str, allowed: str) -> ValueError:
        return ValueError(f"{name}={short(self.values[name])} of {self.name}; allowed: {allowed}")

    def number(self, *names: str, least: int = 1, most: int = MOST) -> int | None:
        """The `first` of `names`, which must be a whole number."""
        name = next((n for n in names if self.values.get(n) is not None), names[0])
        allowed = f"a whole number from {least} to {most}"
        return self._checked(name, allowed, lambda x: _is_number(x) and least <= x <= most)

    def flag(self, name: str) -> bool | None:
        value = self._checked(name, "true or false", lambda x: x in (False, True))
        return None if value is None else bool(value)

    def text(self, name: str) -> str | None:
        return self._checked(name, "a string", lambda x: isinstance(x, str))

    def record(self, name: str) -> Mapping[Any, Any] | None:
        return self._checked(name, "an object", lambda x: isinstance(x, Mapping))

    def words(self, name: str) -> Sequence[str] | None:
        return self._checked(name, "a list of strings", _is_list_of(lambda x: isinstance(x, str)))

    def numbers(self, name: str) -> Sequence[int] | None:
        """Numbers of layers, or 0 and 1 for each of them."""
        each = _is_list_of(lambda x: isinstance(x, int) and x >= 0)
        return self._checked(name, "a list of whole numbers", each)

    def _checked(self, name: str, allowed: str, check: Callable[[Any], bool]) -> Any:
        value = self.values.get(name)
        if value is not None and not check(value):
            raise self.wrong(name, allowed)
        return value

    def need(self, *names: str, most: int = MOST) -> int:
        value = self.number(*names, most=most)
        if value is None:
            raise ValueError(
                f"the config of {self.name} (model_type {self.model_type!r}) has no "
                f"{' or '.join(names)}"
            )
        return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def is_local(source: str | os.PathLike[str]) -> bool:
    """Whether `source` names a file or folder rather than a model on a hub."""
    text = os.fspath(source)
    looks_like_path = text.endswith(".json") or text.startswith((".", "/", "~", "\\"))
    return looks_like_path or text.count("/") > 1 or Path(text).exists()


def load_config(source: Any) -> ModelConfig:
    """The config of a folder, a config.json, a mapping, or an object with `to_dict`."""
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
    while key := next((k for k in TEXT_PARTS if part.get(k) is not None), None):
        inner = dict(ModelConfig(part, name, folder, nested).record(key) or {})
        for shared in SHARED:
            if inner.get(shared) is None and part.get(shared) is not None:
                inner[shared] = part[shared]
        inner.setdefault("model_type", part.get("model_type"))
        part, nested = inner, True
    family = ModelConfig(part, name, folder, nested).text("model_type") or ""
    defaults = {**(NESTED_DEFAULTS.get(family, {}) if nested else {}), **DEFAULTS.get(family, {})}
    return ModelConfig({**defaults, **part}, name, folder, nested)
