"""The file through which an engine's metrics reach the API server."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightkv.integrations.vllm.metrics import monitor

pytestmark = pytest.mark.vllm  # comes with prometheus_client
TEXT = b"""# HELP tightkv:exact_rings Sequences.
# TYPE tightkv:exact_rings gauge
tightkv:exact_rings{engine="%d"} 8.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"tightkv-{os.getuid()}"


def engine_file(index: int) -> monitor.StatsFile:
    file = monitor.StatsFile.of_engine("abcde", index)
    assert file is not None
    return file


def test_without_a_temporary_folder_there_are_no_metrics(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/dev/null/none"])
    assert monitor.StatsFile.of_engine("abcde", 0) is None
    assert "no tightkv: metrics" in caplog.text


class OtherScheduler:
    """Of a vLLM that moved what the metrics are read from."""

    log_stats = False

    def update_from_output(self, scheduler_output: Any) -> str:
        return f"outputs of {scheduler_output}"


def test_a_scheduler_that_changed_costs_the_metrics_and_no_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    found: Any = SimpleNamespace(
        fingerprint="abc",
        name="k4v4",
        page_size=64,
        rows=8,
        block_bytes=576.0,
        ratio=3.7,
        kernels=("cpu",),
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=9, block_size=64),
        parallel_config=SimpleNamespace(data_parallel_index=0),
        model_config=SimpleNamespace(served_model_name="tiny"),
        instance_id="abcde",
    )
    scheduler: Any = OtherScheduler()
    monitor.watch_scheduler(scheduler, config, found)
    assert [scheduler.update_from_output(step) for step in (1, 2)] == [
        "outputs of 1",
        "outputs of 2",
    ]
    assert len(caplog.messages) == 1 and "scheduled_cached_reqs" in caplog.text
    monitor.watch_scheduler(OtherScheduler(), SimpleNamespace(), found)
    assert len(caplog.messages) == 2 and "cache_config" in caplog.text


def test_prompts_of_compressed_windows_are_told_to_be_slow_on_gpus() -> None:
    from tightkv.integrations.vllm.start.install import slow_prompts

    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert "leave sliding_windows out" in (slow_prompts(512, cuda) or "")
    assert slow_prompts(None, cuda) is None and slow_prompts(512, cpu) is None


def test_prefixes_that_end_within_the_exact_window_are_counted() -> None:
    """Of sequences that begin and of those that are resumed, with a window of 100 tokens."""
    updates: list[tuple[float, ...]] = []
    found = SimpleNamespace(rows=4, reusable_tokens=lambda newest: newest - 100)
    watched: Any = SimpleNamespace(found=found, update=lambda *values: updates.append(values))
    scheduler = SimpleNamespace(
        running=[0, 0],
        kv_cache_manager=SimpleNamespace(usage=0.5),
        requests={name: SimpleNamespace(num_prompt_tokens=300) for name in "ab"},
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(num_computed_tokens=cached, prompt_token_ids=ids)
            for cached, ids in ((199, [1] * 300), (200, [1] * 300), (50, None))
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["a", "b", "ended"],
            resumed_req_ids={"b", "ended"},
            num_computed_tokens=[300, 240, 300],
            num_output_tokens=[5, 40, 0],
        ),
    )
    monitor._follow_step(watched, scheduler, output)
    assert updates == [(2, 0.5, 5, 2)]
    found.rows = 0  # nothing is exact then
    monitor._follow_step(watched, scheduler, output)
    assert updates[1] == (2, 0.5, 5, 0)


def test_metrics_of_all_engines_are_one_family(folder: Path) -> None:
    files = [engine_file(index) for index in range(3)]
    for index in range(2):  # the third has not started
        files[index].write(TEXT % index)
    (family,) = monitor.StatsCollector(files).collect()
    assert [sample.labels["engine"] for sample in family.samples] == ["0", "1"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(path.suffix for path in folder.iterdir()) == [".prom", ".prom"]
    files[0].remove()
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_is_not_the_users_own_is_not_used(
    folder: Path, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with caplog.at_level(logging.WARNING, logger="vllm.tightkv"):
        logging.getLogger("vllm.tightkv").addHandler(caplog.handler)
        assert monitor.StatsFile.of_engine("abcde", 0) is None
        logging.getLogger("vllm.tightkv").removeHandler(caplog.handler)
    assert "is not a folder of this user" in caplog.text


def test_a_disk_that_takes_nothing_costs_no_request(folder: Path) -> None:
    file = engine_file(0)
    folder.rmdir()
    file.write(TEXT % 0)
    assert list(monitor.StatsCollector([file]).collect()) == []
