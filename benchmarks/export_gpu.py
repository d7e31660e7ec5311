"""A decode step of an exported model (.pt2) on a GPU: k4v4 beside a bf16 static cache.

    python benchmarks/export_gpu.py --out benchmarks/results/export_gpu.jsonl

The model has the shape of Llama-3.1-8B and random weights. vLLM's time for the same batch and
context is taken from benchmarks/results/vllm_engine.jsonl. See docs/export.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tightkv.config import KVQuantConfig
from tightkv.export.operator import add_kernels
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.integrations.transformers.package import compile_pt2, load_pt2
from tightkv.tools.bench.engine_plan import SHAPES
from tightkv.tools.rows import append_rows, provenance

VLLM_ROWS = Path(__file__).parent / "results" / "vllm_engine.jsonl"
MODEL = "llama-3.1-8b"
STEPS = 64  # a page: sealing it has its share
ROUNDS = 5


class Bf16Static(nn.Module):
    """Keys and values of fixed size as torch has them; one new token a call, read packed.

    The query heads of a KV head are query tokens, so that nothing is repeated.
    """

    keys: Tensor
    values: Tensor
    at: Tensor

    def __init__(self, batch: int, heads: int, dim: int, tokens: int) -> None:
        super().__init__()
        shape = (batch, heads, tokens, dim)
        for name in ("keys", "values"):
            buffer = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
            self.register_buffer(name, buffer, persistent=False)
        self.register_buffer("at", torch.arange(tokens, device="cuda"), persistent=False)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, position: Tensor, **options: Any
    ) -> Tensor:
        self.keys.index_copy_(2, position, key)
        self.values.index_copy_(2, position, value)
        batch, heads, _, dim = query.shape
        packed = query.view(batch, key.shape[1], -1, dim)  # [B, Hkv, G, D]
        hidden = torch.where(self.at <= position, 0.0, float("-inf")).to(query.dtype)
        out = scaled_dot_product_attention(
            packed, self.keys, self.values, attn_mask=hidden.expand(batch, 1, packed.shape[2], -1)
        )
        return out.reshape(batch, 1, heads, dim)


def random_model(layers: int) -> Any:
    config = transformers.LlamaConfig(**{**SHAPES[MODEL], "num_hidden_layers": layers})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def fill(exportable: ExportableModel, batch: int, context: int) -> None:
    """Random keys and values of `context` tokens in every layer."""
    position = torch.arange(context, device="cuda")
    for cache in exportable.caches:
        layout = cache.layout
        heads = (32, layout.num_kv_heads, layout.num_kv_heads)
        x = [
            torch.randn(batch, context, n, layout.head_dim, dtype=torch.bfloat16, device="cuda")
            for n in heads
        ]
        cache(*[y.transpose(1, 2) for y in x], position)


def compile_package(exportable: ExportableModel, inputs: tuple[Tensor, ...], path: Path) -> None:
    """Only the code is written: weights and caches are those of the process that loads it."""
    device = inputs[0].device.type
    program = torch.export.export(exportable, inputs, strict=False)
    compile_pt2(program, path, device, package_constants_in_so=False)
    if device == "cuda":
        path.with_suffix(".kernels").write_bytes(exportable.kernel_file())


def load_package(exportable: ExportableModel, path: Path) -> Callable[..., Tensor]:
    kernels = path.with_suffix(".kernels")
    if kernels.is_file():
        add_kernels(kernels.read_bytes())
    run = load_pt2(path, exportable.model.device.type)
    held = {**dict(exportable.named_parameters()), **dict(exportable.named_buffers())}
    held |= dict(exportable.named_parameters(remove_duplicate=False))
    run.load_constants(
        {name: held[name] for name in run.get_constant_fqns()},
        check_full_update=True,
        user_managed=True,
    )
    loaded: Callable[..., Tensor] = run
    return loaded


def step_ms(run: Callable[[Tensor], Tensor], position: Tensor, context: int) -> dict[str, float]:
    """Milliseconds of a step as it is called, and replayed from a CUDA graph.

    Means over the last STEPS tokens of the context, so that sealing a page has its share.
    """

    def step() -> None:
        run(position)
        position.add_(1)

    position.fill_(context - STEPS)
    step()
    found = {"called": _mean(step, position, context)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found["graph"] = _mean(graph.replay, position, context)
    return found


def _mean(step: Callable[[], object], position: Tensor, context: int) -> float:
    """The median of several rounds."""
    times = []
    for _ in range(ROUNDS):
        position.fill_(context - STEPS)
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(STEPS):
            step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / STEPS)
    return statistics.median(times)


def vllm_ms(batch: int, context: int) -> float | None:
    rows = [json.loads(line) for line in VLLM_ROWS.read_text("utf-8").splitlines()]
    wanted = {"measure": "tpot", "kv": "k4v4", "model": MODEL, "batch": batch, "context": context}
    found = [r["value"] for r in rows if all(r.get(k) == v for k, v in wanted.items())]
    return found[-1] if found else None


def prepare(model: Any, cache: str, batch: int, context: int) -> ExportableModel:
    if cache != "bf16":
        quant = KVQuantConfig.preset(cache, feedback="off")  # random weights have no metric
        return ExportableModel(model, quant, max_tokens=context, batch=batch)
    exportable = ExportableModel(model, "k4v4", max_tokens=64)
    config = model.config
    heads, dim = config.num_key_value_heads, config.head_dim
    caches = [Bf16Static(batch, heads, dim, context) for _ in exportable.caches]
    exportable.caches = nn.ModuleList(caches)
    return exportable


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--caches", nargs="+", default=["k4v4", "bf16"])
    parser.add_argument("--folder", type=Path, default=Path("build/export-gpu"))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path, help="JSONL file, appended to")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    model = random_model(args.layers)
    row: dict[str, Any] = {
        "bench": "export_gpu",
        "model": MODEL,
        "layers": args.layers,
        "batch": args.batch,
        "context": args.context,
        "ms": {},
        "cache_bytes": {},
        "error_to_eager": {},
    }
    ids = torch.ones(args.batch, 1, dtype=torch.int64, device="cuda")
    position = torch.tensor([args.context - STEPS], device="cuda")
    for name in args.caches:
        start = time.monotonic()
        exportable = prepare(model, name, args.batch, args.context)
        path = args.folder / f"{name}-{args.layers}-{args.batch}-{args.context}.pt2"
        if not path.is_file():
            compile_package(exportable, (ids, position), path)
            sys.stderr.write(f"{name}: compiled in {time.monotonic() - start:.0f} s\n")
        if args.compile_only:
            continue
        if name != "bf16":
            fill(exportable, args.batch, args.context)
        run = load_package(exportable, path)
        position.fill_(args.context - STEPS)
        found, eager = run(ids, position), exportable(ids, position)
        row["error_to_eager"][name] = float((found - eager).float().norm() / eager.float().norm())
        row["ms"][name] = step_ms(lambda at, run=run: run(ids, at), position, args.context)
        row["cache_bytes"][name] = exportable.cache_bytes()
        sys.stderr.write(f"{name}: {row['ms'][name]}, {time.monotonic() - start:.0f} s\n")
        del run, exportable
        torch.cuda.empty_cache()
    if args.compile_only:
        return
    if {"k4v4", "bf16"} <= set(args.caches):
        row["ratios"] = {"bf16": row["ms"]["bf16"]["graph"] / row["ms"]["k4v4"]["graph"]}
    vllm = vllm_ms(args.batch, args.context)
    if vllm is not None and args.layers == SHAPES[MODEL]["num_hidden_layers"]:
        row["vllm_k4v4_ms"] = vllm
    if args.out is not None:
        append_rows(args.out, [{**row, **provenance(torch.device("cuda"))}])
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
