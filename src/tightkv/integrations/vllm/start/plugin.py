"""register(): what vLLM calls in each of its processes before it builds an engine."""

import logging
import multiprocessing
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from tightkv.integrations.extras import install_hint, untested
from tightkv.integrations.vllm.options import engine_options

logger = logging.getLogger("vllm.tightkv")  # vLLM's handlers show its children
_MARK = "_tightkv_wraps"


def register() -> None:
    """Let attention layers ask for compressed pages where an engine's options say so.

    vLLM asks every layer once, after loading and before memory is measured, what cache it needs.
    That answer is wrapped; without our options it is vLLM's own. Layers that keep vLLM's cache are
    wrapped too: one of them may be asked first, and the size of their blocks follows from ours.

    The scheduler of such an engine is told what its workers hold (`engine_core`), and the API
    server where it finds the metrics (`monitor`). Groups of layers with states say so.

    A vLLM that we do not fit is left alone, unless an engine asks for compression: that is refused.
    Metrics alone are no reason to refuse one.
    """
    try:
        for kind in _asked():
            _wrap(kind, "get_kv_cache_spec", get_kv_cache_spec)
        for owner, name, ours in _engine_hooks():
            _wrap(owner, name, ours)
    except (ImportError, AttributeError) as error:
        _refuse_requests(_does_not_fit(error))
        return
    try:
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        _wrap(PrometheusStatLogger, "__init__", _make_stat_logger)
    except (ImportError, AttributeError) as error:
        _warn_once("tightkv: /metrics has no tightkv: metrics with vLLM %s (%s)", _version(), error)


def _asked() -> tuple[Any, ...]:
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return Attention, MLAAttention, MambaBase


def _engine_hooks() -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore

    planning = "vllm.v1.core.kv_cache_planning"  # from 0.33 on
    found = import_module(planning if find_spec(planning) else "vllm.v1.core.kv_cache_utils")
    return (
        (found, "get_kv_cache_groups", _get_kv_cache_groups),
        (EngineCore, "_initialize_kv_caches", _initialize_kv_caches),
        (Scheduler, "__init__", _make_scheduler),
    )


# --- what takes the place of vLLM's functions, which come first ---
def get_kv_cache_spec(original: Any, self: Any, vllm_config: Any) -> Any:
    if not _is_asked(vllm_config):
        return original(self, vllm_config)
    try:
        from tightkv.integrations.vllm.start.install import compressed_spec, install
    except ImportError as error:
        raise RuntimeError(_does_not_fit(error)) from error
    install(vllm_config)
    return compressed_spec(self, original(self, vllm_config))


def _get_kv_cache_groups(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    groups = original(vllm_config, *args, **kwargs)
    if _is_asked(vllm_config):
        from tightkv.integrations.vllm.prefix.blocks import name_states

        name_states(groups)
    return groups


def _initialize_kv_caches(
    original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any
) -> Any:
    asked = _is_asked(vllm_config)
    if asked and (line := untested("vllm", _version())) is not None:
        logger.warning(line)
    made = original(self, vllm_config, *args, **kwargs)
    if asked:
        from tightkv.integrations.vllm.start.engine_core import read_format

        read_format(self, vllm_config)
    return made


def _make_scheduler(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
    original(self, vllm_config, *args, **kwargs)
    if _is_asked(vllm_config):
        from tightkv.integrations.vllm.start.engine_core import follow_scheduler

        follow_scheduler(self, vllm_config)


def _make_stat_logger(
    original: Any, self: Any, vllm_config: Any, engine_indexes: Any = None, **kwargs: Any
) -> None:
    original(self, vllm_config, engine_indexes, **kwargs)
    if _is_asked(vllm_config):
        from tightkv.integrations.vllm.metrics.monitor import show_stats

        show_stats(vllm_config, engine_indexes)


def _is_asked(vllm_config: Any) -> bool:
    return engine_options(vllm_config.additional_config) is not None


def _refuse_requests(reason: str) -> None:
    """Stop engines that ask for compression, in their options or in the environment."""

    def refuse(original: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if engine_options(getattr(vllm_config, "additional_config", None)) is not None:
            raise RuntimeError(reason)
        original(vllm_config, *args, **kwargs)

    try:
        from vllm.config import VllmConfig

        _wrap(VllmConfig, "__post_init__", refuse)
    except (ImportError, AttributeError):  # what an engine asks for cannot be seen either
        if engine_options(None) is not None:
            raise RuntimeError(reason) from None
    _warn_once("%s. Engines that do not ask for it run as if it were not there.", reason)


def _warn_once(line: str, *values: object) -> None:
    """Not in each of vLLM's processes."""
    if multiprocessing.parent_process() is None:
        logger.warning(line, *values)


def _wrap(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Once: vLLM may call `register` again in the same process."""
    original = getattr(owner, name)
    if not hasattr(original, _MARK):
        wrapped = wraps(original)(lambda *args, **kwargs: ours(original, *args, **kwargs))
        setattr(wrapped, _MARK, original)
        setattr(owner, name, wrapped)


def _version() -> str:
    found: str = getattr(sys.modules.get("vllm"), "__version__", "of an unknown version")
    return found


def _does_not_fit(error: Exception) -> str:
    return (
        f"tightkv cannot compress the KV cache of vLLM {_version()} ({error}); install one that it "
        f"supports ({install_hint('vllm')}), or take tightkv out of additional_config and "
        "TIGHTKV_* out of the environment"
    )
