"""Which tests share a pytest worker: those that share what takes seconds to make.

By their names: pytest-xdist 3.8 writes the groups of its marks into node ids, which pytest 9.2
ignores, so that tests of one group go to any worker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Longest first: they start in this order.
GROUPS = {
    "vllm engine": ("vllm_engine", "vllm_prefixes", "vllm_sealing", "faults"),
    "sanitizers": ("hostile_files",),
    "cuda on host": ("feedback", "kernels_cuda"),
    **{
        name: (name,)
        for name in (
            *("vllm_server", "export_executorch", "wheel", "eval", "plan_page", "validate"),
            *("documentation_runs", "calibration", "eval_tasks", "folder_noise"),
            *("compare_script", "rivals", "vllm_gpu", "vllm_plugin", "lmcache"),
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


def rank(nodeid: str, slow: bool) -> int:
    """Groups begin first and slow tests next, so that no worker idles at last."""
    names = (*GROUPS, "triton ahead")
    group = group_of(nodeid)
    return names.index(group) if group in names else len(names) + (not slow)


def make_scheduler(config: Any, log: Any) -> Any:
    """Groups in the order of their first tests, with --no-loadscope-reorder."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduler(config, log) if config.getoption("dist") == "loadgroup" else None
