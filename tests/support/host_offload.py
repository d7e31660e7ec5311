"""vLLM's OffloadingConnector on a CPU: its scheduler and its host tier, with copies in torch.

vLLM has kernels for these copies on GPUs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):
    def __init__(self, caches: Any, chunks: int) -> None:
        self.caches = [entry.tensor for entry in caches.tensors]  # [blocks, bytes]
        self.host = [cache.new_empty(chunks, cache.shape[1]) for cache in self.caches]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.copy(job_id, self.caches, src_spec, self.host, dst_spec)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self.copy(job_id, self.host, src_spec, self.caches, dst_spec)
        return True

    def copy(self, job_id: int, source: Any, from_: Any, target: Any, to: Any) -> None:
        read, write = (torch.as_tensor(x.block_ids).long() for x in (from_, to))
        for a, b in zip(source, target, strict=True):
            b[write] = a[read]
        self.finished.append(TransferResult(job_id=job_id, success=True))

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass  # all are done


class HostSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> HostWorker:
        return HostWorker(kv_caches, self.num_chunks)


class TieringWorker(HostWorker):
    """The same, with the memory that vLLM's other tiers (files) read and write."""

    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        super().__init__(caches, 0)
        self.host = [region.create_next_worker_view(cache.shape[1]) for cache in self.caches]


class HostTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> TieringWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return TieringWorker(kv_caches, region)
