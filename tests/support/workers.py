"""Which tests share a pytest worker: those that share what takes seconds to make.

By their names: pytest-xdist 3.8 writes the groups of its marks into node ids, which pytest 9.2
ignores, so that tests of one group go to any worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    "vllm engine": ("vllm_engine", "vllm_prefixes", "vllm_sealing"),
    "cuda on host": ("feedback", "kernels_cuda"),
    "sanitizers": ("hostile_files",),
    **{
        name: (name,)
        for name in (
            *("calibration", "compare_script", "documentation_runs", "eval", "eval_tasks"),
            *(
                "export_executorch",
                "folder_noise",
                "plan_page",
                "rivals",
                "validate",
                "vllm_gpu",
                "vllm_plugin",
                "vllm_server",
                "wheel",
            ),
        )
    },
}
FILES = {f"test_{name}.py": group for group, names in GROUPS.items() for name in names}
FUNCTIONS = {
    "test_sanitizers_find_nothing": "sanitizers",
    "test_kernels_compile_and_fit_shared_memory": "triton ahead",
    "test_triton_fuses_no_product_with_a_sum": "triton ahead",
}


def group_of(nodeid: str) -> str:
    """The group of a test; most are one of their own."""
    path, _, function = nodeid.partition("::")
    return FUNCTIONS.get(function.partition("[")[0]) or FILES.get(Path(path).name, nodeid)


class Scheduler(LoadScopeScheduling):
    """Large groups first, and of tests alone those that are slow (conftest.py)."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def make_scheduler(config: Any, log: Any) -> Scheduler | None:
    return Scheduler(config, log) if config.getoption("dist") == "loadgroup" else None
