"""Decode steps of vLLM's own caches, called as its attention backends call them (vLLM 0.32)."""

import math
import os

import torch
from rival_pages import PagedBatch, PagedCache
from torch import Tensor

from tightkv.tools.bench.inputs import Shape

# Its log would mix with what --json prints.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

PAGE = 16  # vLLM's default block size
# What its backends set for decode steps in CUDA graphs.
_FA3_SPLITS = 32
_INT4_SPLITS, _INT4_PROGRAMS = 16, 128
_TURBOQUANT_SPLITS = 32


def flash_attention(shape: Shape, batch: PagedBatch, dtype: torch.dtype) -> PagedCache:
    """FlashAttention 3 over bf16 or fp8; for fp8 queries are converted too, as in vLLM."""
    from vllm import _custom_ops as ops
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    device, fp8 = batch.lengths.device, dtype == torch.float8_e4m3fn
    size = (batch.pages, batch.page, shape.kv_heads, 2 * shape.head_dim)
    cache = torch.zeros(size, dtype=torch.uint8 if fp8 else dtype, device=device)
    halves = cache.split(shape.head_dim, dim=-1)
    key_cache, value_cache = (half.view(dtype) for half in halves)
    one = torch.ones(1, dtype=torch.float32, device=device)
    descale = one.expand(shape.batch, shape.kv_heads)
    cu_seqlens = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)
    longest = max(shape.lengths)
    # once a step in vLLM, for all layers: not timed
    schedule = get_scheduler_metadata(
        batch_size=shape.batch, max_seqlen_q=1, max_seqlen_k=longest,
        num_heads_q=shape.query_heads, num_heads_kv=shape.kv_heads, headdim=shape.head_dim,
        cache_seqlens=batch.lengths, qkv_dtype=dtype, cu_seqlens_q=cu_seqlens,
        page_size=batch.page, causal=True, num_splits=_FA3_SPLITS,
    )  # fmt: skip

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        name = "fp8" if fp8 else "auto"
        ops.reshape_and_cache_flash(key, value, *halves, slots, name, one, one)

    def attend(query: Tensor) -> Tensor:
        out = torch.empty_like(query)
        if fp8:
            query = ops.scaled_fp8_quant(query.flatten(1), one)[0].view(query.shape)
        flash_attn_varlen_func(
            q=query, k=key_cache, v=value_cache, out=out, cu_seqlens_q=cu_seqlens,
            max_seqlen_q=1, seqused_k=batch.lengths, max_seqlen_k=longest, causal=True,
            softmax_scale=1 / math.sqrt(shape.head_dim), block_table=batch.block_table,
            scheduler_metadata=schedule, fa_version=3, num_splits=_FA3_SPLITS,
            q_descale=descale, k_descale=descale, v_descale=descale,
        )  # fmt: skip
        return out

    return PagedCache(attend, write)


def int4_per_token_head(shape: Shape, batch: PagedBatch) -> PagedCache:
    """Triton: rotated keys and values, 4 bits, a scale and zero point per token and head."""
    from vllm import _custom_ops  # noqa: F401  # registers the fast Hadamard transform
    from vllm.v1.attention.ops.int4_per_token_head import (
        reshape_and_cache_int4,
        unified_attention_int4,
    )

    device, width = batch.lengths.device, shape.head_dim // 2
    # a token of a head: its key's codes and scale, its value's codes and scale
    size = (batch.pages, batch.page, shape.kv_heads, 2 * (width + 4))
    cache = torch.zeros(size, dtype=torch.uint8, device=device)
    codes = cache.split(width + 4, dim=-1)
    floats = cache.view(torch.float32)
    scales = {
        "k_scale_cache": floats[..., width // 4],
        "v_scale_cache": floats[..., (2 * width + 4) // 4],
    }
    most = _INT4_PROGRAMS // shape.kv_heads  # larger batches are not split
    parts = (most, shape.query_heads, _INT4_SPLITS)
    padded = 1 << (shape.head_dim - 1).bit_length()
    scratch = {
        "softmax_segm_output": torch.empty(*parts, padded, dtype=torch.float32, device=device),
        "softmax_segm_max": torch.empty(parts, dtype=torch.float32, device=device),
        "softmax_segm_expsum": torch.empty(parts, dtype=torch.float32, device=device),
    }
    cu_seqlens = torch.arange(shape.batch + 1, dtype=torch.int32, device=device)

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        reshape_and_cache_int4(key, value, *codes, slots, **scales)

    def attend(query: Tensor) -> Tensor:
        out = torch.empty_like(query)
        unified_attention_int4(
            query, *codes, out, cu_seqlens_q=cu_seqlens, max_seqlen_q=1, seqused_k=batch.lengths,
            max_seqlen_k=max(shape.lengths), softmax_scale=1 / math.sqrt(shape.head_dim),
            window_size=(-1, -1), block_table=batch.block_table, softcap=0, sinks=None,
            alibi_slopes=None, use_alibi_sqrt=False, qq_bias=None, output_scale=None,
            mm_prefix_range=None, seq_threshold_3D=most, num_par_softmax_segments=_INT4_SPLITS,
            **scales, **scratch,
        )  # fmt: skip
        return out

    return PagedCache(attend, write)


def turboquant(shape: Shape, batch: PagedBatch, preset: str) -> PagedCache:
    """Triton: rotated keys in Lloyd-Max codes with their norm, values in uniform codes."""
    from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
    from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention
    from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

    device, d = batch.lengths.device, shape.head_dim
    cfg = TurboQuantConfig.from_cache_dtype(preset, d)
    size = (batch.pages, batch.page, shape.kv_heads, cfg.slot_size_aligned)
    cache = torch.zeros(size, dtype=torch.uint8, device=device)
    hadamard = _hadamard(d).to(device)
    centroids = get_centroids(d, cfg.centroid_bits).to(device, torch.float32)
    ordered = centroids.sort().values
    midpoints = (ordered[:-1] + ordered[1:]) / 2
    options = {
        "mse_bits": cfg.key_mse_bits,
        "key_packed_size": cfg.key_packed_size,
        "value_quant_bits": cfg.effective_value_quant_bits,
        "key_fp8": cfg.key_fp8,
    }

    def write(key: Tensor, value: Tensor, slots: Tensor) -> None:
        triton_turboquant_store(
            key, value, cache, slots, PiT=hadamard, midpoints=midpoints, **options
        )

    def attend(query: Tensor) -> Tensor:
        out: Tensor = triton_turboquant_decode_attention(
            query, cache, batch.block_table, batch.lengths, hadamard, centroids,
            scale=1 / math.sqrt(d), PiT=hadamard, norm_correction=cfg.norm_correction,
            max_num_kv_splits=_TURBOQUANT_SPLITS, **options,
        )  # fmt: skip
        return out

    return PagedCache(attend, write)


def _hadamard(dim: int) -> Tensor:
    """Orthonormal, of a power of two."""
    if dim & (dim - 1):
        raise ValueError(f"head_dim={dim}; vLLM's TurboQuant rotates powers of two")
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < dim:
        matrix = torch.cat([matrix.repeat(1, 2), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(dim)
