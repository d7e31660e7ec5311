"""What a prefill chunk costs in one layer, against bf16 in the same run, on one GPU.

python benchmarks/prefill_kernels.py [store | extend] [--preset k4v4] [--out rows.jsonl]

`extend` is attention of a chunk of queries over a compressed prefix and its own exact tokens,
beside torch's attention over bf16. `store` is the append of many tokens at once, beside writing
them as bf16. Rows are those of benchmarks/results/gpu_extend.jsonl and gpu_store.jsonl. Without a
word both are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from tightkv.config import KVQuantConfig
from tightkv.kernels.backend import Backend
from tightkv.kernels.registry import select
from tightkv.kernels.sdpa import sdpa_with_lse
from tightkv.kernels.triton import prefill as triton_prefill
from tightkv.kernels.view import AppendOptions, AttendOptions
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench.baselines import SDPA
from tightkv.tools.bench.inputs import Layer, Shape, fill, random_bf16
from tightkv.tools.bench.timing import graph_ms
from tightkv.tools.rows import append_rows, provenance

Row = dict[str, Any]


def store_rows(
    token_counts: Sequence[int], presets: Sequence[str], device: torch.device
) -> Iterator[Row]:
    """Appending many tokens at once (a prefill chunk), against writing them as bf16."""
    facts = provenance(device)
    for preset, tokens in product(presets, token_counts):
        shape = Shape(1, tokens)
        layer, module = one_layer(preset, shape, device)
        key, value = (random_bf16(device, tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        nothing = torch.zeros(1, dtype=torch.int32, device=device)
        options = AppendOptions(cu_seqlens, nothing, tokens, encode_partial_page=False)
        append = partial(module.append, layer.codec, layer.view, key, value, options)
        pairs = [(torch.empty_like(x), x) for x in (key, value)]
        slots = torch.randperm(tokens, device=device)

        def write_bf16(slots: Tensor = slots, pairs: Any = pairs) -> None:
            for target, x in pairs:
                target.index_copy_(0, slots, x)

        ours, bf16 = graph_ms([append]), graph_ms([write_bf16])
        yield {
            "bench": "store", "tokens": tokens, "preset": preset,
            "ms": ours, "bf16_write_ms": bf16, "more_us": (ours - bf16) * 1e3, **facts,
        }  # fmt: skip


def extend_rows(
    chunk: int, prefixes: Sequence[int], presets: Sequence[str], device: torch.device
) -> Iterator[Row]:
    """A chunk of queries over a compressed prefix and its own exact tokens, against bf16."""
    facts, shape = provenance(device), Shape(1, chunk)
    for preset, prefix in product(presets, prefixes):
        others = sdpa_extend(shape, prefix, device)
        layer, module = one_layer(preset, Shape(1, max(prefix, 1)), device)
        view = layer.view
        if not prefix:
            none = torch.zeros_like(view.lengths)
            nothing = {"lengths": none, "ring_read_from": none, "sink_counts": none}
            view = replace(view, **nothing, same_length=0)
        query = random_bf16(device, chunk, shape.query_heads, shape.head_dim)
        key, value = (random_bf16(device, chunk, shape.kv_heads, shape.head_dim) for _ in range(2))
        cu_seqlens = torch.tensor([0, chunk], dtype=torch.int32, device=device)
        options = AttendOptions(max_queries=chunk, new_key=key, new_value=value)
        attend = partial(module.attend, layer.codec, query, view, cu_seqlens, options)
        ours = graph_ms([attend], repeats=5)
        yield {
            "bench": "extend", "chunk": chunk, "prefix": prefix, "preset": preset,
            "ms": ours, "others_ms": others,
            "against_best_bf16": min(others.values()) / ours, **facts,
        }  # fmt: skip


def one_layer(preset: str, shape: Shape, device: torch.device) -> tuple[Layer, Backend]:
    cfg = KVQuantConfig.preset(preset)
    layout = PageLayout(cfg, shape.kv_heads, shape.head_dim, torch.bfloat16)
    module = select("auto", device, layout)
    return fill(layout, shape, module, device, 0), module


# --- the same in bf16 ---
def sdpa_extend(shape: Shape, prefix: int, device: torch.device) -> dict[str, float]:
    """Causal attention of `tokens` new tokens after `prefix` others, all in bf16."""
    hq, hkv, d = shape.query_heads, shape.kv_heads, shape.head_dim
    total = prefix + shape.tokens
    query = random_bf16(device, shape.batch, hq, shape.tokens, d)
    key, value = (random_bf16(device, shape.batch, hkv, total, d) for _ in range(2))
    times = {}
    for name, backend in SDPA.items():
        with sdpa_kernel(backend), suppress(RuntimeError, ValueError, NotImplementedError):
            call = partial(aligned_sdpa, query, key, value, prefix)
            times[f"sdpa {name}"] = graph_ms([call], repeats=5)
    if prefix:
        call = partial(two_parts, query, key, value, prefix)
        times["sdpa in two parts"] = graph_ms([call], repeats=5)
    return times


def two_parts(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> Tensor:
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


def aligned_sdpa(query: Tensor, key: Tensor, value: Tensor, prefix: int) -> Tensor:
    """Queries are the last tokens: torch's is_causal would align them to the first."""
    if not prefix:
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="The kernels of a prefill chunk, on one GPU.")
    parser.add_argument("what", nargs="*", metavar="store | extend", default=["store", "extend"])
    parser.add_argument("--preset", action="append", help="default: k4v4")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of store")
    parser.add_argument("--chunk", type=int, default=2048, help="queries of extend")
    parser.add_argument("--prefix", type=int, nargs="+", default=[0, 8192, 32768], help="of extend")
    parser.add_argument("--out", help="append the rows to a JSON-lines file")
    args = parser.parse_args()
    if unknown := set(args.what) - {"store", "extend"}:
        parser.error(f"{', '.join(unknown)}; give store, extend or nothing")
    presets, device = args.preset or ["k4v4"], torch.device("cuda")
    if "store" in args.what:
        show(store_rows(args.tokens, presets, device), args.out)
    if "extend" in args.what:
        show(extend_rows(args.chunk, args.prefix, presets, device), args.out)


def show(rows: Iterator[Row], out: str | None) -> None:
    """Print each row and keep it as soon as it is measured."""
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        if out is not None:
            append_rows(out, [row])


if __name__ == "__main__":
    main()
