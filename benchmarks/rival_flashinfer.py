"""FlashInfer's decode with tensor cores, over bf16, fp8 and nvfp4 caches."""

from typing import Any

import torch
from rival_pages import PagedBatch, PagedCache
from torch import Tensor

from tightkv.tools.bench.inputs import Shape, random_bf16

PAGE = 64


def _planned(shape: Shape, batch: PagedBatch, dtype: torch.dtype) -> Any:
    """A wrapper for these lengths. Packed nvfp4 is planned as uint8."""
    import flashinfer

    device, each = batch.lengths.device, batch.pages_each
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    used = torch.arange(batch.block_table.shape[1], device=device) < each[:, None]
    wrapper.plan(
        torch.cat([each.new_zeros(1), each.cumsum(0).int()]),
        batch.block_table[used],
        (batch.lengths - 1) % batch.page + 1,
        shape.query_heads, shape.kv_heads, shape.head_dim, batch.page,
        q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    return wrapper


def plain(shape: Shape, batch: PagedBatch, dtype: torch.dtype) -> PagedCache:
    """bf16 or fp8, filled; the new token's write is left out, to the favor of FlashInfer."""
    wrapper = _planned(shape, batch, dtype)
    size = (batch.pages, 2, batch.page, shape.kv_heads, shape.head_dim)
    cache = random_bf16(batch.lengths.device, *size).to(dtype)
    return PagedCache(attend=lambda query: wrapper.run(query, cache))


def nvfp4(shape: Shape, batch: PagedBatch) -> PagedCache:
    """4-bit floats with an fp8 scale for every 16, written and read as vLLM does on sm_90."""
    from flashinfer.page import nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as append

    wrapper = _planned(shape, batch, torch.uint8)
    device = batch.lengths.device

    def pair(width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        size = (batch.pages, batch.page, shape.kv_heads, width)
        key, value = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        return key.view(dtype), value.view(dtype)

    codes = pair(shape.head_dim // 2, torch.uint8)
    scales = pair(shape.head_dim // 16, torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32, device=device)
    return PagedCache(
        attend=lambda query: wrapper.run(query, codes, kv_cache_sf=scales),
        write=lambda key, value, slots: append(key, value, slots, codes, scales, one, one),
    )
