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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tightkv.bench.engine_models import SHAPES
from tightkv.bench.provenance import provenance
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.provenance import append_rows

VLLM_ROWS = Path(__file__).parent / "results" / "vllm_engine.jsonl"
MODEL = "llama-3.1-8b"
REPEATS = 30


class Bf16Static(nn.Module):
    """Keys and values of fixed size as torch has them; one new token a call, read packed.

    The query heads of a KV head are query tokens, so that nothing is repeated.
    """

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


def compiled(program: torch.export.ExportedProgram, path: Path) -> Callable[..., Tensor]:
    """A .pt2 whose weights and buffers are those of the process: only the code is written."""
    options = {"aot_inductor.package_constants_in_so": False}
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs=options
    )
    run = torch._inductor.aoti_load_package(str(path))
    held = {**program.state_dict, **program.constants}
    run.load_constants(
        {name: held[name] for name in run.get_constant_fqns()},
        check_full_update=True,
        user_managed=True,
    )
    return run


def step_ms(run: Callable[[], Tensor]) -> dict[str, float]:
    """Milliseconds of a step as it is called, and replayed from a CUDA graph."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    found = {"called": _median(run)}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    found["graph"] = _median(graph.replay)
    return found


def _median(run: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start, stop = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def vllm_ms(batch: int, context: int) -> float | None:
    rows = [json.loads(line) for line in VLLM_ROWS.read_text("utf-8").splitlines()]
    wanted = {"measure": "tpot", "kv": "k4v4", "model": MODEL, "batch": batch, "context": context}
    found = [r["value"] for r in rows if all(r.get(k) == v for k, v in wanted.items())]
    return found[-1] if found else None


@torch.no_grad()
def measure(model: Any, preset: str | None, batch: int, context: int) -> dict[str, Any]:
    """`preset` None: the bf16 static cache."""
    room = context + 64
    start = time.monotonic()
    if preset is not None:
        exportable = ExportableModel(model, preset, max_tokens=room, batch=batch)
        fill(exportable, batch, context)
    else:
        exportable = ExportableModel(model, "k4v4", max_tokens=64, batch=1)
        config = model.config
        heads, dim = config.num_key_value_heads, config.head_dim
        caches = [Bf16Static(batch, heads, dim, room) for _ in exportable.caches]
        exportable.caches = nn.ModuleList(caches)
    ids = torch.ones(batch, 1, dtype=torch.int64, device="cuda")
    # written again and again: the step before is taken back
    position = torch.tensor([context], device="cuda")
    inputs: tuple[Tensor, ...] = (ids, position)
    eager = exportable(*inputs)
    program = torch.export.export(exportable, inputs, strict=False)
    with tempfile.TemporaryDirectory() as folder:
        run = compiled(program, Path(folder) / "model.pt2")
        seconds = time.monotonic() - start
        error = (run(*inputs) - eager).float().norm() / eager.float().norm()
        times = step_ms(lambda: run(*inputs))
    return {
        "ms": times,
        "cache_bytes": exportable.cache_bytes(),
        "error_to_eager": float(error),
        "prepare_s": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, appended to")
    args = parser.parse_args()
    model = random_model(args.layers)
    row: dict[str, Any] = {
        "bench": "export_gpu",
        "model": MODEL,
        "layers": args.layers,
        "batch": args.batch,
        "context": args.context,
        "caches": {},
    }
    for name in ("k4v4", "bf16"):
        preset = None if name == "bf16" else name
        row["caches"][name] = measure(model, preset, args.batch, args.context)
        sys.stderr.write(f"{name}: {row['caches'][name]}\n")
        torch.cuda.empty_cache()
    ours = row["caches"]["k4v4"]["ms"]["graph"]
    row["ratios"] = {"bf16": row["caches"]["bf16"]["ms"]["graph"] / ours}
    vllm = vllm_ms(args.batch, args.context)
    if vllm is not None and args.layers == SHAPES[MODEL]["num_hidden_layers"]:
        row["vllm_k4v4_ms"], row["ratios"]["to vllm"] = vllm, ours / vllm
    append_rows(args.out, [{**row, **provenance(torch.device("cuda"))}])
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
