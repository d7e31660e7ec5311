"""Attention over uncompressed caches: torch's backends, FlashInfer, and a plain Triton kernel."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tightkv.bench.bf16_kernel import bf16_decode
from tightkv.bench.inputs import L2_BYTES, Shape
from tightkv.bench.timing import graph_ms
from tightkv.kernels.sdpa import sdpa_with_lse
from tightkv.kernels.triton import prefill as triton_prefill

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _copies(shape: Shape, bytes_each: int, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(max(1, min(12, -(-L2_BYTES // bytes_each))))]


def sdpa_decode(shape: Shape, device: torch.device) -> dict[str, float]:
    """Milliseconds of every backend that takes the shape; query heads packed as query tokens.

    Torch's take no ragged lengths; the plain Triton kernel does, over a padded cache.
    """
    group = shape.query_heads // shape.kv_heads

    def random(tokens: int) -> Tensor:
        size = (shape.batch, shape.kv_heads, tokens, shape.head_dim)
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    query = random(group)
    caches = _copies(shape, shape.bf16_bytes, lambda: (random(shape.tokens), random(shape.tokens)))
    times = {}
    for name, backend in ({} if shape.ragged else SDPA).items():
        with sdpa_kernel(backend):
            calls = [partial(scaled_dot_product_attention, query, k, v) for k, v in caches]
            try:
                times[f"sdpa {name}"] = graph_ms(calls)
            except RuntimeError:  # the backend refuses this shape
                continue
    if shape.head_dim & (shape.head_dim - 1):  # the Triton kernel takes powers of two
        return times
    packed = query.flatten(1, 2)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    calls = [partial(bf16_decode, packed, k, v, lengths) for k, v in caches]
    times["triton bf16"] = graph_ms(calls)
    return times


def flashinfer_decode(shape: Shape, device: torch.device) -> dict[str, float]:
    """FlashInfer with tensor cores over shuffled pages, bf16 and fp8; empty if not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    import flashinfer

    page, b = 64, shape.batch
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    each = (lengths + page - 1) // page
    pages = int(each.sum())
    query = torch.randn(b, shape.query_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    order = torch.randperm(pages, device=device).int()
    ends = torch.cat([each.new_zeros(1), each.cumsum(0).int()])
    last = (lengths - 1) % page + 1
    times = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp8", torch.float8_e4m3fn)):
        bytes_each = shape.bf16_bytes * dtype.itemsize // 2

        def make(dtype: torch.dtype = dtype) -> Tensor:
            size = (pages, 2, page, shape.kv_heads, shape.head_dim)
            return torch.randn(size, dtype=torch.bfloat16, device=device).to(dtype)

        caches = _copies(shape, bytes_each, make)
        workspace = torch.empty(256 << 20, dtype=torch.uint8, device=device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(
            ends, order, last, shape.query_heads, shape.kv_heads, shape.head_dim, page,
            q_data_type=torch.bfloat16, kv_data_type=dtype,
        )  # fmt: skip
        calls = [partial(wrapper.run, query, cache) for cache in caches]
        times[f"flashinfer {name}"] = graph_ms(calls)
        del caches
    return times


def sdpa_extend(shape: Shape, prefix: int, device: torch.device) -> dict[str, float]:
    """Causal attention of `tokens` new tokens after `prefix` others, all in bf16."""
    hq, hkv, d = shape.query_heads, shape.kv_heads, shape.head_dim
    total = prefix + shape.tokens
    query = torch.randn(shape.batch, hq, shape.tokens, d, dtype=torch.bfloat16, device=device)
    key, value = (
        torch.randn(shape.batch, hkv, total, d, dtype=torch.bfloat16, device=device)
        for _ in range(2)
    )
    times = {}
    for name, backend in SDPA.items():
        with sdpa_kernel(backend):
            try:
                call = partial(_aligned_sdpa, query, key, value, prefix)
                times[f"sdpa {name}"] = graph_ms([call], repeats=5)
            except (RuntimeError, ValueError, NotImplementedError):
                continue
    if prefix:
        call = partial(_two_parts, query, key, value, prefix)
        times["sdpa in two parts"] = graph_ms([call], repeats=5)
    return times


def _two_parts(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> Tensor:
    """Prefix and new tokens apart, so that cuDNN's kernels can be used; merged by their LSEs.

    Nothing is copied, and the merge is one kernel: what our own prefill does, without the codes.
    """
    batch, _, _, d = query.shape
    scale = 1 / math.sqrt(d)
    packed = query.view(batch, key.shape[1], -1, d)  # heads of a group as further queries
    old_key, new_key = key[:, :, :prefix], key[:, :, prefix:]
    old_value, new_value = value[:, :, :prefix], value[:, :, prefix:]
    old = sdpa_with_lse(packed, old_key, old_value, scale, any_length=True)
    new = sdpa_with_lse(query, new_key, new_value, scale, causal=True, any_length=True)
    triton_prefill.merge_and_unrotate(None, old, new)
    return new.out


def _aligned_sdpa(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> Tensor:
    """Queries are the last tokens: torch's is_causal would align them to the first."""
    if not prefix:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


def best(times: dict[str, float], *words: str) -> float:
    """The least time of entries whose name has one of the words (or of all)."""
    picked = [t for name, t in times.items() if not words or any(w in name for w in words)]
    return min(picked, default=math.nan)
