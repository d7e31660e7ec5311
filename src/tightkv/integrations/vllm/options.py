"""Where a vLLM engine's options for the compressed cache come from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tightkv.config import ENV_PREFIX, KVQuantConfig

_CONFIG_KEY = "tightkv"
# Variables that say how, not whether, to compress.
_NOT_A_REQUEST = ("TIGHTKV_KERNELS", "TIGHTKV_CACHE_DIR")


@dataclass(frozen=True)
class EngineOptions:
    """The cache's config and what only an engine needs to know."""

    config: KVQuantConfig
    exact_rows: int | None = None
    """Sequences that may have an exact ring; None takes a twentieth of the device's memory."""


def engine_options(
    additional_config: Any, env: Mapping[str, str] | None = None
) -> EngineOptions | None:
    """Options from `--additional-config '{"tightkv": {...}}'`, else from TIGHTKV_*, else None."""
    env = os.environ if env is None else env
    if isinstance(additional_config, Mapping) and _CONFIG_KEY in additional_config:
        return _from_config(additional_config[_CONFIG_KEY])
    wanted = [name for name in env if name.startswith(ENV_PREFIX) and name not in _NOT_A_REQUEST]
    return EngineOptions(KVQuantConfig.from_env(env)) if wanted else None


def with_options(additional_config: Any, options: EngineOptions) -> Any:
    """The engine's own additional config with the options in it, wherever they came from."""
    given = {} if additional_config is None else additional_config
    if not isinstance(given, Mapping) or _CONFIG_KEY in given:
        return additional_config
    return {**given, _CONFIG_KEY: options.config.to_dict()}


def _from_config(given: Any) -> EngineOptions | None:
    if given is None or given is False:
        return None
    if given is True:
        return EngineOptions(KVQuantConfig())
    if not isinstance(given, Mapping):
        return EngineOptions(KVQuantConfig.parse(given))
    fields = dict(given.get("kv_quant", given))
    rows = fields.pop("exact_rows", None)
    if rows is not None and (type(rows) is not int or rows < 0):
        raise ValueError(f"exact_rows={rows!r}; it must be a whole number of sequences, 0 for none")
    return EngineOptions(KVQuantConfig.from_dict(fields), rows)
