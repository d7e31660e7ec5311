"""EngineMonitor: what an engine's compressed cache holds and does, as Prometheus metrics.

It lives in the process of the scheduler. `/metrics` is answered by another one, where a
StatsCollector reads what the monitor has written to a StatsFile, in Prometheus' text format.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tightkv.files.atomic import whole_file

if TYPE_CHECKING:
    from tightkv.integrations.vllm.prefix.cache_format import CacheFormat

logger = logging.getLogger("vllm.tightkv")
_LABELS = ("model_name", "engine")
_GAUGES = {
    "kv_cache_used_bytes": "Bytes of the compressed blocks in use.",
    "kv_cache_bytes": "Bytes of all compressed blocks.",
    "compression_ratio": "Bytes of a 16-bit cache per compressed byte.",
    "exact_rings": "Sequences that can have an exact ring at a time.",
    "exact_rings_in_use": "Sequences that have an exact ring.",
    "sequences_without_ring": "Sequences whose newest tokens are read from codes.",
}
_COUNTERS = {
    "prefix_hits_without_window": (
        "Sequences that began with a cached prefix and without an exact ring."
    ),
    "prefix_hits_without_state": (
        "Sequences whose cached prefix ends within their exact window: no state before it."
    ),
}
_SECONDS = 1.0  # between two writes while requests run; one follows when the engine becomes idle
_STOPPED = "tightkv: this engine has no tightkv: metrics, its vLLM differs from those known: %s"


class EngineMonitor:
    """Metrics of one engine, and one warning when sequences are less exact than configured."""

    def __init__(self, found: CacheFormat, blocks: int, labels: list[str]) -> None:
        """`blocks`: how many the cache has; `labels`: the model's name and the engine."""
        self.found, self.blocks = found, blocks
        self.file: StatsFile | None = None
        self.registry = CollectorRegistry()
        self._written, self._warned = -_SECONDS, False
        newest: dict[str, Any] = {"registry": self.registry, "multiprocess_mode": "mostrecent"}
        self._gauges = {
            name: Gauge(f"tightkv:{name}", text, _LABELS, **newest).labels(*labels)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(f"tightkv:{name}", text, _LABELS, registry=self.registry).labels(*labels)
            for name, text in _COUNTERS.items()
        }
        names = (*_LABELS, "format", "kernels", "fingerprint", "page_size")
        info = Gauge("tightkv:cache_info", "1; the labels say what the cache is.", names, **newest)
        kernels = ",".join(found.kernels)
        info.labels(*labels, found.name, kernels, found.fingerprint, found.page_size).set(1)
        self._gauges["kv_cache_bytes"].set(blocks * found.block_bytes)
        self._gauges["compression_ratio"].set(found.ratio)
        self._gauges["exact_rings"].set(found.rows)
        self.update(0, 0.0, 0)

    def update(self, running: int, usage: float, hits: int, stateless: int = 0) -> None:
        """Update the metrics after a step.

        `running` sequences use a share `usage` of the blocks. `hits` new ones have a cached prefix,
        which for `stateless` of them ends within their window.
        """
        rows = self.found.rows
        without = max(0, running - rows)
        self._gauges["kv_cache_used_bytes"].set(usage * self.blocks * self.found.block_bytes)
        self._gauges["exact_rings_in_use"].set(min(running, rows))
        self._gauges["sequences_without_ring"].set(without)
        self._counters["prefix_hits_without_window"].inc(min(hits, without))
        self._counters["prefix_hits_without_state"].inc(stateless)
        if without and rows and not self._warned:
            self._warned = True
            logger.warning(
                "tightkv: %d sequences run at a time and %d have an exact ring: the newest tokens "
                "of the others are read from their codes. Raise exact_rows or lower --max-num-seqs",
                running,
                rows,
            )
        now = time.monotonic()
        if self.file is not None and (not running or now - self._written >= _SECONDS):
            self._written = now
            self.file.write(generate_latest(self.registry))


def watch_scheduler(scheduler: Any, vllm_config: Any, found: CacheFormat) -> None:
    """Update the metrics after every step of a vLLM Scheduler.

    A Scheduler with other attributes costs a warning and the metrics, and no request.
    """
    original = scheduler.update_from_output

    def update_from_output(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(scheduler_output, *args, **kwargs)
        try:
            _follow_step(monitor, scheduler, scheduler_output)
        except (AttributeError, TypeError) as error:
            scheduler.update_from_output = original
            logger.warning(_STOPPED, error)
        return outputs

    try:
        cache, index = vllm_config.cache_config, vllm_config.parallel_config.data_parallel_index
        labels = [vllm_config.model_config.served_model_name, str(index)]
        monitor = EngineMonitor(found, cache.num_gpu_blocks or 0, labels)
        shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ  # the values are
        if scheduler.log_stats and not shared:
            monitor.file = StatsFile.of_engine(vllm_config.instance_id, index)
        scheduler.update_from_output = update_from_output
    except (AttributeError, TypeError) as error:
        logger.warning(_STOPPED, error)


def _follow_step(monitor: EngineMonitor, scheduler: Any, scheduler_output: Any) -> None:
    resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
    begun = sum(new.num_computed_tokens > 0 for new in scheduler_output.scheduled_new_reqs)
    usage = scheduler.kv_cache_manager.usage
    stateless = 0
    if monitor.found.rows:
        stateless = sum(
            cached > monitor.found.reusable_tokens(tokens - 1)
            for cached, tokens in _beginnings(scheduler, scheduler_output)
        )
    monitor.update(len(scheduler.running), usage, begun + len(resumed), stateless)


def _beginnings(scheduler: Any, scheduler_output: Any) -> Iterator[tuple[int, int]]:
    """Cached tokens and all tokens of each sequence that begins, or is resumed, with a step."""
    for new in scheduler_output.scheduled_new_reqs:
        if new.prompt_token_ids:  # not where there are only embeddings
            yield new.num_computed_tokens, len(new.prompt_token_ids)
    cached = scheduler_output.scheduled_cached_reqs
    if cached.resumed_req_ids:
        columns = cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens
        for name, computed, outputs in zip(*columns, strict=True):
            request = scheduler.requests.get(name)  # None: it has ended with this step
            if name in cached.resumed_req_ids and request is not None:
                yield computed, request.num_prompt_tokens + outputs


# --- from the process of an engine to that of the API server ---
@dataclass(frozen=True)
class StatsFile:
    """A file that both processes find: in the user's own folder, by the engine's instance id."""

    path: Path

    @classmethod
    def of_engine(cls, instance_id: str, index: int) -> StatsFile | None:
        """An engine's file; None, with one warning, if no folder belongs to the user alone."""
        try:
            folder = Path(tempfile.gettempdir()) / f"tightkv-{os.getuid()}"
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            logger.warning("tightkv: no tightkv: metrics (%s)", error)
            return None
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            logger.warning("tightkv: no tightkv: metrics, %s is not a folder of this user", folder)
            return None
        return cls(folder / f"{instance_id}-{index}.prom")

    def write(self, text: bytes) -> None:
        """Write the file whole or not at all; a full disk costs metrics and no request."""
        try:
            with whole_file(self.path) as temporary:
                temporary.write_bytes(text)
        except OSError:
            logger.debug("tightkv: metrics are not written", exc_info=True)

    def remove(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


class StatsCollector:
    """Metrics of the engines behind an API server, for the registry that /metrics shows."""

    _name = "vllm:tightkv"  # vLLM unregisters by such names before it starts another engine

    def __init__(self, files: list[StatsFile]) -> None:
        self.files = files

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for file in self.files:
            try:
                text = file.path.read_text()
            except OSError:
                continue  # not started yet, or on another machine
            for family in text_string_to_metric_families(text):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()


def show_stats(vllm_config: Any, engine_indexes: list[int] | None) -> None:
    """Have /metrics of this process show the metrics of these engines, until the process ends."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return  # vLLM's registry reads the values of all processes there
    indexes = engine_indexes or [0]
    files = [StatsFile.of_engine(vllm_config.instance_id, index) for index in indexes]
    known = [file for file in files if file is not None]
    REGISTRY.register(StatsCollector(known))
    for file in known:
        Finalize(None, file.remove, exitpriority=0)  # also at the end of a forked process
