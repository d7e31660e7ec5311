"""Peak memory of a long prefill and decode against what `tightkv plan` says.

    python benchmarks/peak_memory.py --preset k4v4 --tokens 32768 [--device cuda] [--results FILE]

A small Llama with random weights takes the tokens in chunks and decodes past a page's end. On a GPU
the allocator's peak is read, on a CPU the bytes of all live tensors are followed; what was held
after a short warm-up (weights, workspaces) is taken off.
"""

from __future__ import annotations

import argparse
import json
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import LlamaConfig, LlamaForCausalLM

from tightkv import KVQuantConfig, TightCache
from tightkv.model_shape import read_model_shape
from tightkv.model_shape.planner import config_plan
from tightkv.tools.rows import append_rows, provenance


def run(model: LlamaForCausalLM, quant: KVQuantConfig, tokens: int, chunk: int) -> None:
    """Prefill `tokens` in chunks, then 70 tokens one by one."""
    ids = torch.randint(0, 256, (1, tokens + 70), device=model.device)
    cache = TightCache(quant, model=model)
    with torch.no_grad():
        for at in range(0, tokens, chunk):
            model(ids[:, at : min(tokens, at + chunk)], past_key_values=cache, logits_to_keep=1)
        for at in range(tokens, tokens + 70):
            model(ids[:, at : at + 1], past_key_values=cache)


class LiveTensors(TorchDispatchMode):
    """Follows the bytes of the storages that operators made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._add, out)
        return out

    def _add(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self.seen:
            self.seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def measure(model: LlamaForCausalLM, quant: KVQuantConfig, tokens: int, chunk: int) -> int:
    """Peak bytes of a run beyond what is held before it."""
    device = model.device
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run(model, quant, tokens, chunk)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with LiveTensors() as live:
        run(model, quant, tokens, chunk)
    return live.peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="k4v4")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--results")
    args = parser.parse_args()
    device = torch.device(args.device)
    dtype = torch.bfloat16  # what `plan` counts with
    config = LlamaConfig(
        hidden_size=64 * args.heads, intermediate_size=64, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.heads, head_dim=64,
        vocab_size=256, max_position_embeddings=args.tokens + 1024,
        attn_implementation="tightkv",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, dtype).eval()
    quant = KVQuantConfig.preset(args.preset)
    run(model, quant, 2 * args.chunk, args.chunk)  # warm-up
    measured = measure(model, quant, args.tokens, args.chunk)
    shape = read_model_shape(config)
    planned = config_plan(args.preset, shape, quant).total_bytes(args.tokens + 70)
    row = {
        "bench": "peak_memory", "preset": args.preset, "tokens": args.tokens, "chunk": args.chunk,
        "layers": args.layers, "kv_heads": args.heads, "dtype": str(dtype).removeprefix("torch."),
        "peak_bytes": measured, "planned_bytes": planned, "ratio": measured / planned,
        **provenance(device),
    }  # fmt: skip
    sys.stdout.write(json.dumps(row, indent=1) + "\n")
    if args.results:
        append_rows(args.results, [row])


if __name__ == "__main__":
    main()
