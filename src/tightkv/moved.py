"""Modules under the names that they had before they moved: scripts and pickled caches use them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    **{name: f"pages.{name}" for name in ("codec", "latent", "layout", "pack")},
    **{name: f"paged.{name}" for name in ("attention", "cache", "offload", "sequences")},
    **{name: f"model_shape.{name}" for name in ("cache_bytes", "planner")},
    **{name: f"fit.{name}" for name in ("calibration", "key_check")},
    **{name: f"tools.{name}" for name in ("bench", "cli", "eval", "model_loading", "validate")},
    "integrations.vllm.nixl": "integrations.vllm.connectors.nixl",
}


def new_name(name: str) -> str | None:
    """Of a module under `tightkv` that has moved, or of one in it; None for others."""
    if not name.startswith("tightkv."):
        return None
    for old, new in MOVED.items():
        old = f"tightkv.{old}"
        if name == old or name.startswith(f"{old}."):
            return f"tightkv.{new}{name[len(old) :]}"
    return None


class _Finder(MetaPathFinder, Loader):
    """Gives an old name the module itself, not a copy."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if new_name(fullname) is None else spec_from_loader(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = new_name(spec.name)
        assert new is not None
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._specs[spec.name] = module.__spec__  # the import system is about to replace it
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def follow_moves() -> None:
    """Once for the process; importing an old name then imports the new one."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the one that would look into a moved folder
