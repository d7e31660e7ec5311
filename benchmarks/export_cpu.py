"""A decode step of an exported model (.pt2) on a CPU: k4v4 beside static caches that are exact.

    python benchmarks/export_cpu.py --out benchmarks/results/export_cpu.jsonl

The same model (SmolLM2-135M, float32) is compiled by AOTInductor once for each cache. Steps are
taken in turn, and the processor's time is measured. See docs/export.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from export_gpu import compile_package, load_package
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tightkv.integrations.transformers.export import ExportableModel
from tightkv.tools.bench.cpu import machine
from tightkv.tools.model_loading.bundled import BUNDLED_NAME, bundled_folder
from tightkv.tools.rows import append_rows, provenance

CONTEXTS = (256, 1024, 2048, 4096, 8192)
STEPS = 64  # a page of ours: sealing it has its share
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Static(nn.Module):
    """Exact keys and values; a step of one token reads those that are there, and no others.

    The query heads of a KV head are query tokens, so that nothing is repeated. Attention is in
    float32, whatever the cache's dtype: processors without bfloat16 are slow in it.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, heads: int, dim: int, tokens: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name in ("keys", "values"):
            buffer = torch.randn(1, heads, tokens, dim).to(dtype)
            self.register_buffer(name, buffer, persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, **options: Any
    ) -> Tensor:
        self.keys.index_copy_(2, position, key.to(self.keys.dtype))
        self.values.index_copy_(2, position, value.to(self.values.dtype))
        length = position[0].item() + 1
        torch._check(length > 1)
        torch._check(length <= self.keys.shape[2])
        keys, values = (x.narrow(2, 0, length).to(query.dtype) for x in (self.keys, self.values))
        _, heads, _, dim = query.shape
        packed = query.reshape(1, key.shape[1], -1, dim)  # [B, Hkv, G, D]
        return scaled_dot_product_attention(packed, keys, values).reshape(1, 1, heads, dim)


@torch.no_grad()
def prepare(model: Any, name: str, tokens: int) -> ExportableModel:
    """A model whose caches are full of random keys and values."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    exportable = ExportableModel(model, "k4v4", max_tokens=tokens if name == "k4v4" else 64)
    if name in DTYPES:
        caches = [Static(kv_heads, dim, tokens, DTYPES[name]) for _ in exportable.caches]
        exportable.caches = nn.ModuleList(caches)
    return exportable


@torch.no_grad()
def fill(exportable: ExportableModel, start: int, end: int) -> None:
    """Random keys and values for the tokens from `start` to `end` in every layer."""
    for cache in exportable.caches:
        heads, dim = cache.layout.num_kv_heads, cache.layout.head_dim
        query, key, value = torch.randn(3, 1, heads, end - start, dim)
        cache(query, key, value, torch.arange(start, end))


def decode_rows(
    runs: Mapping[str, Callable[..., Tensor]], ours: ExportableModel, contexts: Sequence[int]
) -> list[dict[str, Any]]:
    """Milliseconds per token at each context, all caches in turn."""
    rows, filled = [], 0
    for context in contexts:
        first = context - STEPS
        fill(ours, filled, first)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for at in range(first, context):
            ids, position = torch.randint(1000, 40_000, (1, 1)), torch.tensor([at])
            for name, run in runs.items():
                if at == first:
                    run(ids, position)  # touches the memory
                start = time.process_time()
                run(ids, position)
                times[name].append(1e3 * (time.process_time() - start))
        filled = context
        rows.append({"context": context, **summary(times)})
        sys.stderr.write(f"{context}: {rows[-1]['ms']}\n")
    return rows


def summary(times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Means: the step that seals a page counts as what it takes."""
    ms = {name: statistics.mean(found) for name, found in times.items()}
    return {
        "ms": {name: round(x, 4) for name, x in ms.items()},
        "median_ms": {name: round(statistics.median(x), 4) for name, x in times.items()},
        "ratios": {name: round(x / ms["k4v4"], 3) for name, x in ms.items() if name != "k4v4"},
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--folder", type=Path, default=Path("build/export-cpu"))
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_folder(lambda line: None), dtype=torch.float32
    )
    model = model.eval().requires_grad_(False)
    tokens = max(args.contexts)
    models = {name: prepare(model, name, tokens) for name in ("k4v4", *DTYPES)}
    runs = {}
    for name, exportable in models.items():
        path = args.folder / f"{name}-{tokens}.pt2"
        if not path.is_file():
            sys.stderr.write(f"compiling {name} ...\n")
            inputs = torch.ones(1, 1, dtype=torch.int64), torch.tensor([9])
            compile_package(exportable, inputs, path)
        runs[name] = load_package(exportable, path)
    facts = {
        "bench": "export_cpu",
        "model": BUNDLED_NAME,
        "room": tokens,
        "cache_bytes": {name: exportable.cache_bytes() for name, exportable in models.items()},
        **provenance(torch.device("cpu")),
        **machine(),
        "threads": 1,
        "time_of": "the processor",
    }
    rows = [{**row, **facts} for row in decode_rows(runs, models["k4v4"], args.contexts)]
    append_rows(args.out, rows)
    sys.stdout.write("".join(json.dumps(row["ms"]) + "\n" for row in rows))


if __name__ == "__main__":
    main()
