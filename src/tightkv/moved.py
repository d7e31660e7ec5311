"""Modules under the names that they had before they moved: scripts and pickled caches use them."""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

_VLLM_MOVES = {
    "connectors": "connector_checks nixl store_loads",
    "latent": "mla",
    "metrics": "monitor",
    "prefix": "blocks cache_format prefix_hits",
    "start": "engine_checks engine_core engine_plan install plugin",
    "step": "attention backend batch_split flash_attention layer_step metadata "
    "ring_kernel ring_table warm_up",
}
_VLLM_MERGED = {
    "checkpoint": "options",
    "install_mla": "start.install",
    "page_blocks": "step.backend",
    "stats_file": "metrics.monitor",
    "store_keys": "start.engine_core",
}
_FITTED = "attention_weights fingerprint key_noise query_metric"
MOVED = {
    **{name: f"files.{name}" for name in ("strict_json", "tensor_file")},
    **{name: f"pages.{name}" for name in ("codec", "latent", "layout", "pack")},
    **{name: f"paged.{name}" for name in ("attention", "cache", "offload", "sequences")},
    **{name: f"model_shape.{name}" for name in ("cache_bytes", "planner")},
    **{name: f"fit.{name}" for name in ("calibration", "key_check")},
    **{f"model_shape.{name}": f"fit.{name}" for name in _FITTED.split()},
    **{f"{folder}.checkpoint_metric": "fit.query_metric" for folder in ("model_shape", "fit")},
    **{f"{folder}.checkpoint_noise": "fit.key_noise" for folder in ("model_shape", "fit")},
    "model_shape.tensors": "files.tensor_file",
    **{name: f"tools.{name}" for name in ("bench", "cli", "eval", "model_loading", "validate")},
    "provenance": "tools.rows",
    "extras": "integrations.extras",
    **{
        f"integrations.vllm.{name}": f"integrations.vllm.{folder}.{name}"
        for folder, names in _VLLM_MOVES.items()
        for name in names.split()
    },
    "integrations.transformers.protect_keys": "integrations.transformers.attention",
    "integrations.transformers.saving.reading": "integrations.transformers.saving.file",
    **{f"integrations.vllm.{x}": f"integrations.vllm.{y}" for x, y in _VLLM_MERGED.items()},
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
        new = new_name(fullname)
        if new is None:
            return None
        # By its file, not with `importlib.util.find_spec`: that imports packages, and finders are
        # called under the import lock, for which another thread may wait that imports them.
        place = Path(__file__).parent.joinpath(*new.split(".")[1:])
        package = place.is_dir()
        file = place / "__init__.py" if package else place.with_name(f"{place.name}.py")
        if not file.is_file():
            return None
        return ModuleSpec(fullname, self, origin=str(file), is_package=package)

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

    def get_code(self, fullname: str) -> CodeType | None:
        """What `python -m` runs."""
        found = find_spec(new_name(fullname) or fullname)
        assert found is not None and isinstance(found.loader, InspectLoader)
        return found.loader.get_code(found.name)


def follow_moves() -> None:
    """Once for the process; importing an old name then imports the new one."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before the one that would look into a moved folder
