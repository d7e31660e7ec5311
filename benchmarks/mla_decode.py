"""Time of decoding one layer of latent attention (MLA) on one GPU, beside vLLM's bf16 kernels.

python benchmarks/mla_decode.py [ROWS.jsonl]

Calls over three caches run from a CUDA graph, so that tokens come from memory as in a model; the
time is that of one call. vLLM's kernels need vLLM 0.32.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.kernels.triton import mla
from tightkv.pages.latent import LatentCodec, LatentLayout
from tightkv.tools.rows import provenance

DEVICE = torch.device("cuda")
CACHES, PAGE, RANK, ROPE, SCALE = 3, 64, 512, 64, 192**-0.5
Calls = list[Callable[[], Any]]


class Step(NamedTuple):
    """Queries of one decode step, and where the tokens of its sequences are."""

    query: Tensor
    query_rope: Tensor
    lengths: Tensor
    block_table: Tensor

    @classmethod
    def of(cls, batch: int, tokens: int, heads: int) -> Step:
        table = torch.randperm(batch * tokens // PAGE, device=DEVICE).int().view(batch, -1)
        return cls(
            torch.randn(batch, heads, RANK, device=DEVICE).bfloat16(),
            torch.randn(batch, heads, ROPE, device=DEVICE).bfloat16(),
            torch.full((batch,), tokens, dtype=torch.int32, device=DEVICE),
            table,
        )

    @property
    def tokens(self) -> int:
        return self.block_table.shape[1] * PAGE


def ours(step: Step, bits: int) -> Calls:
    cfg = KVQuantConfig(key_bits=bits, value_bits=bits)
    codec = LatentCodec(LatentLayout(cfg, RANK, ROPE))
    count = step.block_table.numel()
    slots = torch.arange(count * PAGE, device=DEVICE)
    calls: Calls = []
    for _ in range(CACHES):
        pages = torch.zeros(count, codec.layout.page_bytes, dtype=torch.uint8, device=DEVICE)
        for part in slots.split(1 << 16):
            x = torch.randn(len(part), RANK + ROPE, device=DEVICE).bfloat16()
            mla.append(codec, pages, x[:, :RANK], x[:, RANK:], part)
        tokens = (pages, step.block_table, step.lengths)
        calls.append(partial(mla.decode, codec, step.query, step.query_rope, *tokens, SCALE))
    return calls


def bf16_caches(step: Step) -> list[Tensor]:
    shape = (step.block_table.numel(), PAGE, RANK + ROPE)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(CACHES)]


def flash_attention(step: Step) -> Calls:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    batch, heads = step.query.shape[:2]
    starts = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)
    plan = get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=1,
        max_seqlen_k=step.tokens,
        num_heads_q=heads,
        num_heads_kv=1,
        headdim=ROPE,
        cache_seqlens=step.lengths,
        qkv_dtype=torch.bfloat16,
        headdim_v=RANK,
        page_size=PAGE,
        cu_seqlens_q=starts,
        causal=True,
        num_splits=0,
    )
    options: dict[str, Any] = {
        "q": step.query_rope,
        "q_v": step.query,
        "max_seqlen_q": 1,
        "cu_seqlens_q": starts,
        "max_seqlen_k": step.tokens,
        "seqused_k": step.lengths,
        "block_table": step.block_table,
        "softmax_scale": SCALE,
        "causal": True,
        "fa_version": 3,
        "scheduler_metadata": plan,
        "num_splits": 0,
    }
    return [
        partial(
            flash_attn_varlen_func,
            k=cache[..., RANK:].unsqueeze(-2),
            v=cache[..., :RANK].unsqueeze(-2),
            **options,
        )
        for cache in bf16_caches(step)
    ]


def flash_mla(step: Step) -> Calls:
    from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata

    plan, _ = get_mla_metadata(step.lengths, step.query.shape[1], 1, is_fp8_kvcache=False)
    options: dict[str, Any] = {
        "q": torch.cat([step.query, step.query_rope], -1).unsqueeze(1),
        "block_table": step.block_table,
        "cache_seqlens": step.lengths,
        "head_dim_v": RANK,
        "tile_scheduler_metadata": plan,
        "softmax_scale": SCALE,
        "causal": True,
        "is_fp8_kvcache": False,
    }
    return [
        partial(flash_mla_with_kvcache, k_cache=cache.unsqueeze(-2), **options)
        for cache in bf16_caches(step)
    ]


def triton_mla(step: Step) -> Calls:
    from vllm.v1.attention.backends.mla.triton_mla import _compute_num_kv_splits
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    splits = _compute_num_kv_splits(step.tokens, processors)
    query = torch.cat([step.query, step.query_rope], -1)
    out, lse = torch.empty_like(step.query), step.query.new_empty(step.query.shape[:2])
    states = query.new_empty(*lse.shape, splits, RANK + 1, dtype=torch.float32)
    one = torch.ones(1, device=DEVICE)
    rest = (out, lse, step.block_table, step.lengths, states, splits, SCALE, PAGE)
    options: dict[str, Any] = {"k_scale": one, "v_scale": one, "is_mla": True}
    caches = (cache.unsqueeze(2) for cache in bf16_caches(step))
    return [
        partial(decode_attention_fwd, query, k, k[..., :RANK], *rest, **options) for k in caches
    ]


KERNELS: dict[str, Callable[[Step], Calls]] = {
    "vLLM FLASHMLA bf16": flash_mla,
    "vLLM FLASH_ATTN_MLA bf16": flash_attention,
    "vLLM TRITON_MLA bf16": triton_mla,
    "tightkv 4 bits": lambda step: ours(step, 4),
    "tightkv 3 bits": lambda step: ours(step, 3),
}


def microseconds(calls: Calls, replays: int = 200) -> float:
    """Median time of one call."""
    for call in calls:  # compile, and plan
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def measured() -> Iterator[dict[str, Any]]:
    for heads, (batch, tokens) in itertools.product((128, 16), ((32, 8192), (8, 32768))):
        step = Step.of(batch, tokens, heads)
        for name, make in KERNELS.items():
            us = round(microseconds(make(step)), 1)
            torch.cuda.empty_cache()
            shape = {"batch": batch, "tokens": tokens, "query_heads": heads}
            yield {"bench": "mla_decode", "shape": shape, "kernel": name, "us": us}


def main() -> None:
    torch.manual_seed(0)
    facts = provenance(DEVICE)
    rows = []
    for row in measured():
        sys.stdout.write(json.dumps(row) + "\n")
        rows.append(row | facts)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
