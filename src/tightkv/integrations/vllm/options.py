"""What a vLLM engine says of itself: options of the compressed cache, and the checkpoint."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tightkv.config import (
    KVQuantConfig,
    Windows,
    env_fields,
    env_requests,
    is_off,
    is_windows,
    read_source,
)

_CONFIG_KEY = "tightkv"
_WINDOWS = "sliding_windows"


@dataclass(frozen=True)
class EngineOptions:
    """The cache's config and what only an engine needs to know."""

    config: KVQuantConfig
    exact_rows: int | None = None
    """Sequences that may have an exact ring; None takes a twentieth of the device's memory."""
    windows: Windows = False
    """Which layers with a sliding window are compressed too."""


def engine_options(
    additional_config: Any, env: Mapping[str, str] | None = None
) -> EngineOptions | None:
    """Options from `--additional-config '{"tightkv": {...}}'`, else from TIGHTKV_*, else None.

    A misspelt TIGHTKV_* variable is refused in both cases: whoever set it wants something of us,
    and an engine that runs without it would not show that.
    """
    env = os.environ if env is None else env
    given = additional_config if isinstance(additional_config, Mapping) else {}
    asked = given.get(_CONFIG_KEY, True)
    if asked is None or asked is False:
        return None
    requests = env_requests(env)
    if _CONFIG_KEY in given:
        return _from_config(asked)
    if not requests or is_off(env_fields(env)):
        return None
    return EngineOptions(KVQuantConfig.from_env(env))


def with_options(additional_config: Any, options: EngineOptions) -> Any:
    """The engine's own additional config with the options in it, wherever they came from."""
    given = {} if additional_config is None else additional_config
    if not isinstance(given, Mapping):
        return additional_config
    rows = {} if options.exact_rows is None else {"exact_rows": options.exact_rows}
    windows = {_WINDOWS: options.windows} if options.windows else {}
    return {**given, _CONFIG_KEY: options.config.to_dict() | rows | windows}


def _from_config(given: Any) -> EngineOptions | None:
    if given is True:
        return EngineOptions(KVQuantConfig())
    if isinstance(given, KVQuantConfig):
        return EngineOptions(given)
    fields = dict(given if isinstance(given, Mapping) else read_source(given))
    rows = fields.pop("exact_rows", None)  # beside the fields, or beside their kv_quant block
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ValueError(f"exact_rows={rows!r}; it must be a number of sequences, 0 for none")
    windows = fields.pop(_WINDOWS, False)
    if not is_windows(windows):
        raise ValueError(
            f"{_WINDOWS}={windows!r}; it must be true (windows that become smaller), false, or the "
            "shortest window to compress, in tokens"
        )
    config = KVQuantConfig.from_dict(fields)
    return None if is_off(fields) else EngineOptions(config, rows, windows)


def checkpoint_folder(vllm_config: Any) -> Path | str:
    """Where the loaded weights lie, or why that is not known."""
    load, model = vllm_config.load_config, vllm_config.model_config
    if load.load_format == "dummy":
        return "its weights are random (load_format dummy)"
    path = Path(model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return f"{model.model!r} is a file; folders with safetensors files are read"
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (ImportError, OSError, ValueError):
        return f"{model.model!r} is neither a folder nor in the hub's local cache"
    return Path(found)
