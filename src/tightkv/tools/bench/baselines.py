"""Attention over uncompressed caches: torch's backends, and a plain Triton kernel."""

import math
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tightkv.kernels.sdpa import sdpa_with_lse
from tightkv.kernels.triton import prefill as triton_prefill
from tightkv.tools.bench.bf16_kernel import bf16_decode
from tightkv.tools.bench.inputs import Shape, copies_for, random_bf16
from tightkv.tools.bench.timing import graph_ms, graph_times

SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def sdpa_decode(shape: Shape, device: torch.device, *, backend: SDPBackend) -> list[float]:
    """Milliseconds of a backend of torch; query heads are packed as query tokens."""
    if not shape.equal:
        raise ValueError("torch's attention takes sequences of one length")
    query, caches = _dense(shape, device)
    with sdpa_kernel(backend):
        return graph_times([partial(scaled_dot_product_attention, query, k, v) for k, v in caches])


def triton_decode(shape: Shape, device: torch.device) -> list[float]:
    """Milliseconds of the plain Triton kernel, over a padded cache."""
    if shape.head_dim & (shape.head_dim - 1):
        raise ValueError(f"head_dim={shape.head_dim}; the plain Triton kernel takes powers of two")
    query, caches = _dense(shape, device)
    packed = query.flatten(1, 2)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    return graph_times([partial(bf16_decode, packed, k, v, lengths) for k, v in caches])


def _dense(shape: Shape, device: torch.device) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Queries [B, Hkv, Hq / Hkv, D]; keys and values [B, Hkv, N, D] of as many caches as needed."""
    random = partial(random_bf16, device, shape.batch, shape.kv_heads)
    caches = [
        (random(shape.tokens, shape.head_dim), random(shape.tokens, shape.head_dim))
        for _ in range(copies_for(shape.bf16_bytes))
    ]
    return random(shape.query_heads // shape.kv_heads, shape.head_dim), caches


def sdpa_extend(shape: Shape, prefix: int, device: torch.device) -> dict[str, float]:
    """Causal attention of `tokens` new tokens after `prefix` others, all in bf16."""
    hq, hkv, d = shape.query_heads, shape.kv_heads, shape.head_dim
    total = prefix + shape.tokens
    query = random_bf16(device, shape.batch, hq, shape.tokens, d)
    key, value = (random_bf16(device, shape.batch, hkv, total, d) for _ in range(2))
    times = {}
    for name, backend in SDPA.items():
        with sdpa_kernel(backend), suppress(RuntimeError, ValueError, NotImplementedError):
            call = partial(_aligned_sdpa, query, key, value, prefix)
            times[f"sdpa {name}"] = graph_ms([call], repeats=5)
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
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
