"""Decoding with .pte files: our cache against ExecuTorch's own, in its runtime and in one run.

    python benchmarks/export_executorch.py --out benchmarks/results/export_executorch.jsonl

The same model (SmolLM2-135M, float32, XNNPACK) is exported once for each cache: `k4v4`, and
ExecuTorch's `sdpa_with_kv_cache` over float32 and bfloat16, and its int8 cache with the attention
for it. Steps are taken in turn, and the processor's time is measured. `--kernel` measures one layer
of another shape, operators alone. See docs/export.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from executorch.examples.models.llama.source_transformation.custom_kv_cache import (
    QuantizedCacheType,
    QuantizedKVCache,
)
from executorch.exir._serialize._program import deserialize_pte_binary
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
from executorch.extension.pybindings.portable_lib import _unsafe_reset_threadpool
from executorch.kernels import quantized  # noqa: F401
from export_cpu import summary
from torch import Tensor, nn

from tightkv.config import KVQuantConfig
from tightkv.export import StaticKV
from tightkv.integrations.executorch import load_pte, to_pte
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.pages.layout import page_layout
from tightkv.tools.bench.cpu import machine
from tightkv.tools.model_loading.bundled import BUNDLED_NAME, bundled_folder
from tightkv.tools.rows import append_rows, provenance

CONTEXTS = (256, 1024, 2048, 4096, 8192)
STEPS = 64  # a page of ours: sealing it has its share
CHUNK = 512


@dataclass(frozen=True)
class LayerShape:
    heads: int
    kv_heads: int
    head_dim: int
    tokens: int


# --- ExecuTorch's caches, called as StaticKV is ---
class Plain(nn.Module):
    """`sdpa_with_kv_cache`, which appends and attends; the cache has the dtype of its operands."""

    def __init__(self, shape: LayerShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        for name in ("keys", "values"):
            size = (1, shape.tokens, shape.kv_heads, shape.head_dim)
            self.register_buffer(name, torch.zeros(size, dtype=dtype), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, **options: Any
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2).to(self.dtype) for x in (query, key, value))
        start = _start(position, self.keys)
        out: Tensor = torch.ops.llama.sdpa_with_kv_cache(
            q, k, v, self.keys, self.values, start, q.shape[1], None, 0.0, True
        )
        return out.to(query.dtype)


class Int8(nn.Module):
    """`QuantizedKVCache` and the attention for it: a scale and zero point for each token and head.

    `custom_quantized_sdpa` is called as ExecuTorch's `QuantizedSDPA` does, on the cache as it lies:
    the transposes there and back, which its own exporter removes, would copy all of it.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.cache = QuantizedKVCache(
            1,
            shape.tokens,
            shape.kv_heads,
            shape.head_dim,
            QuantizedCacheType.AffineAsymmetric,
            use_custom_update_cache_op=True,
            return_float_values=False,
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, **options: Any
    ) -> Tensor:
        cache = self.cache
        start = _start(position, cache.k_cache)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        keys, values = cache._update_and_return_quantized_values(position, k, v)
        codes, scales, zeros = cache._quantize(q)
        out: Tensor = torch.ops.llama.custom_quantized_sdpa(
            codes,
            keys,
            values,
            start,
            None,
            0,
            True,
            None,
            zeros.to(torch.int8),
            scales.to(torch.float32),
            cache.k_cache_zero_points,
            cache.k_cache_scales,
            cache.v_cache_zero_points,
            cache.v_cache_scales,
        )
        return out


def _start(position: Tensor, cache: Tensor) -> Any:
    """Where the new tokens go, which the tracer must know to be in range."""
    start = position[0].item()
    torch._check(start >= 0)
    torch._check(start < cache.shape[1])
    return start


def caches(shape: LayerShape) -> dict[str, Callable[[], nn.Module]]:
    """Name -> how to make one; ours comes with the model."""
    return {
        "fp32": lambda: Plain(shape, torch.float32),
        "bf16": lambda: Plain(shape, torch.bfloat16),
        "int8": lambda: Int8(shape),
    }


# --- the model ---
def exportable(model: Any, name: str, tokens: int) -> ExportableModel:
    """A model whose layers have the cache of that name."""
    own = ExportableModel(model, "k4v4", max_tokens=tokens)
    if name != "k4v4":
        config = model.config
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        shape = LayerShape(heads, kv_heads, config.hidden_size // heads, tokens)
        own.caches = nn.ModuleList(caches(shape)[name]() for _ in own.caches)
    return own


def write_files(model: Any, tokens: int, folder: Path, names: Sequence[str]) -> dict[str, int]:
    """A .pte for each cache, unless it is there; the bytes of the caches."""
    sizes = {}
    for name in names:
        own = exportable(model, name, tokens)
        sizes[name] = own.cache_bytes()
        path = folder / f"{name}.pte"
        if not path.is_file():
            sys.stderr.write(f"exporting {name} ...\n")
            path.write_bytes(to_pte(own.program(), backend="xnnpack"))
    return sizes


def planned_bytes(path: Path) -> int:
    """What a file asks for beside its weights: caches, and room for the activations."""
    plan = deserialize_pte_binary(path.read_bytes()).program.execution_plan[0]
    return sum(plan.non_const_buffer_sizes)


def decode_rows(files: Mapping[str, Path], contexts: Sequence[int]) -> list[dict[str, Any]]:
    """Milliseconds per token at each context, all caches in turn.

    Only ours must have been given the tokens before; the others read zeros, at the same speed.
    """
    runs = {name: load_pte(path) for name, path in files.items()}
    rows = []
    filled = 0
    for context in contexts:
        first = context - STEPS
        while filled < first:
            count = min(CHUNK, first - filled)
            ids = torch.randint(1000, 40_000, (1, count))
            runs["k4v4"](ids, torch.arange(filled, filled + count))
            filled += count
        times: dict[str, list[float]] = {name: [] for name in runs}
        for at in range(first, context):
            ids, position = torch.randint(1000, 40_000, (1, 1)), torch.tensor([at])
            for name, run in runs.items():
                start = time.process_time()
                run(ids, position)
                times[name].append(1e3 * (time.process_time() - start))
        filled = context
        rows.append({"context": context, **summary(times)})
        sys.stderr.write(f"{context}: {rows[-1]['ms']}\n")
    return rows


# --- one layer ---
@torch.no_grad()
def kernel_row(shape: LayerShape, repeats: int = STEPS) -> dict[str, Any]:
    """A step of one layer of another shape: the operators, called from torch."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[Tensor]:
        heads = (shape.heads, shape.kv_heads, shape.kv_heads)
        return [torch.randn(1, n, count, shape.head_dim, generator=generator) for n in heads]

    cfg = KVQuantConfig.preset("k4v4")
    layout = page_layout(cfg, shape.kv_heads, shape.head_dim, torch.float16)
    ours = StaticKV(layout, shape.tokens)
    ours(*tokens(shape.tokens - repeats), torch.arange(shape.tokens - repeats))
    layers: dict[str, nn.Module] = {"k4v4": ours}
    layers |= {name: make() for name, make in caches(shape).items()}
    times: dict[str, list[float]] = {name: [] for name in layers}
    for at in range(shape.tokens - repeats, shape.tokens):
        new, position = tokens(1), torch.tensor([at])
        for name, layer in layers.items():
            start = time.process_time()
            layer(*new, position)
            times[name].append(1e3 * (time.process_time() - start))
    sizes = {
        name: sum(x.numel() * x.element_size() for x in layer.buffers())
        for name, layer in layers.items()
    }
    return {
        "bench": "executorch kernel",
        "shape": asdict(shape),
        "cache_bytes": sizes,
        **summary(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--folder", type=Path, default=Path("build/executorch-bench"))
    parser.add_argument("--kernel", action="store_true", help="the shape of ExecuTorch's TQ4")
    parser.add_argument("--caches", nargs="+", default=("fp32", "int8", "bf16"), metavar="NAME")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="N")
    args = parser.parse_args()
    torch.set_num_threads(1)
    _unsafe_reset_threadpool(1)
    facts = {
        **provenance(torch.device("cpu")),
        **machine(),
        "threads": 1,
        "executorch": version("executorch"),
        "time_of": "the processor",
    }
    if args.kernel:
        rows = [{**kernel_row(LayerShape(16, 2, 256, 4096)), **facts}]
    else:
        args.folder.mkdir(parents=True, exist_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            bundled_folder(lambda line: None), dtype=torch.float32
        )
        model = model.eval().requires_grad_(False)
        names = ("k4v4", *args.caches)
        tokens = max(args.contexts)
        sizes = write_files(model, tokens, args.folder, names)
        files = {name: args.folder / f"{name}.pte" for name in names}
        planned = {name: planned_bytes(path) for name, path in files.items()}
        rows = [
            {
                "bench": "executorch",
                "model": BUNDLED_NAME,
                "backend": "xnnpack",
                "room": tokens,
                "cache_bytes": sizes,
                "planned_bytes": planned,
                "file_bytes": {name: path.stat().st_size for name, path in files.items()},
                **row,
                **facts,
            }
            for row in decode_rows(files, args.contexts)
        ]
    append_rows(args.out, rows)
    sys.stdout.write("".join(json.dumps(row["ms"]) + "\n" for row in rows))


if __name__ == "__main__":
    main()
