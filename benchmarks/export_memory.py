"""Bytes of the caches of an exported model: k4v4 by part, beside exact ones of the same length.

    python benchmarks/export_memory.py --out benchmarks/results/export_memory.jsonl

They follow from the model (SmolLM2-135M) and the number of tokens alone. See docs/export.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from tightkv.export import StaticKV
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.tools.model_loading.bundled import BUNDLED_NAME, bundled_folder
from tightkv.tools.rows import append_rows, provenance

ITEM_SIZES = {"fp32": 4, "bf16": 2}


def memory_row(model: Any, tokens: int) -> dict[str, Any]:
    exportable = ExportableModel(model, "k4v4", max_tokens=tokens)
    parts: Counter[str] = Counter()
    exact = dict.fromkeys(ITEM_SIZES, 0)
    for cache in exportable.caches:
        assert isinstance(cache, StaticKV)
        for name, buffer in cache.named_buffers():
            parts[name] += buffer.numel() * buffer.element_size()
        heads, dim = cache.layout.num_kv_heads, cache.layout.head_dim
        for name, size in ITEM_SIZES.items():
            exact[name] += 2 * tokens * heads * dim * size
    assert parts.total() == exportable.cache_bytes()
    return {
        "bench": "export_memory",
        "model": BUNDLED_NAME,
        "dtype": str(model.dtype).removeprefix("torch."),
        "room": tokens,
        "parts": dict(parts),
        "cache_bytes": {"k4v4": parts.total(), **exact},
        "of_bf16": round(parts.total() / exact["bf16"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, appended to")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N")
    args = parser.parse_args()
    facts = provenance(torch.device("cpu"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        bundled_folder(lambda line: None), dtype=torch.float32
    )
    row = memory_row(model.eval(), args.tokens)
    append_rows(args.out, [{**row, **facts}])
    sys.stdout.write(f"{row['of_bf16']} of bf16's bytes: {row['parts']}\n")


if __name__ == "__main__":
    main()
