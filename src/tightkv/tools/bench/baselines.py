"""Attention over uncompressed caches: torch's backends, and a plain Triton kernel."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tightkv.tools.bench.bf16_kernel import bf16_decode
from tightkv.tools.bench.inputs import Shape, copies_for, random_bf16
from tightkv.tools.bench.timing import graph_times

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
