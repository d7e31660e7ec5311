"""PageBlocks: what all our attention backends tell vLLM about their blocks."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf

from tightkv.config import PAGE_SIZES


class PageBlocks:
    """Our pages in vLLM's blocks. Layers are given such a backend; it is not selected by name."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(min(PAGE_SIZES))]  # whole blocks

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
