"""StatsFile: metrics in Prometheus' text format, from an engine's process to the API server's."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tightkv.files.atomic import whole_file

logger = logging.getLogger("vllm.tightkv")


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
