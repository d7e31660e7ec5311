"""Weights in pieces for a machine without a network, and a GGUF file as a folder with safetensors.

    python benchmarks/depth/convert.py pack model.gguf pieces         57 MiB each, with checksums
    python benchmarks/depth/convert.py join pieces model.gguf
    python benchmarks/depth/convert.py weights model.gguf FOLDER      FOLDER: config and tokenizer

`weights` dequantizes to bfloat16 on all cores, which takes seconds where loading a GGUF file with
transformers takes minutes. It knows the tensors of Qwen2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE = 57 << 20
_LIST = "pieces.json"
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def pack(source: Path, folder: Path, size: int = PIECE) -> list[Path]:
    """Pieces of a file, and a list of their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    sums: dict[str, str] = {}
    paths: list[Path] = []
    with source.open("rb") as file:
        while data := file.read(size):
            path = folder / f"piece-{len(paths):03}"
            path.write_bytes(data)
            sums[path.name] = hashlib.sha256(data).hexdigest()
            paths.append(path)
    (folder / _LIST).write_text(json.dumps(sums, indent=1), encoding="utf-8")
    return paths


def join(folder: Path, out: Path) -> None:
    """The file again, once every piece is there and whole."""
    sums = json.loads((folder / _LIST).read_text("utf-8"))
    unfinished = out.with_name(f"{out.name}.part")
    with unfinished.open("wb") as file:
        for name, digest in sums.items():
            data = (folder / name).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(f"{folder / name} is damaged; copy it again")
            file.write(data)
    unfinished.rename(out)


def name_of(tensor: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor)
    if found is None or found[2] not in _NAMES:
        raise ValueError(f"tensor {tensor!r} is none of Qwen2; load this GGUF with transformers")
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{_NAMES[found[2]]}.{found[3]}"


def weights(gguf: Path, folder: Path) -> Path:
    """model.safetensors in bfloat16; the folder's config says whether the embeddings are tied."""
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] != "qwen2":
        raise ValueError(f"model_type {config['model_type']!r}; supported: 'qwen2'")

    def one(tensor: Any) -> tuple[str, torch.Tensor]:
        found = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        return name_of(tensor.name), found.to(torch.bfloat16)

    with ThreadPoolExecutor() as pool:  # NumPy leaves the interpreter to other threads
        tensors = dict(pool.map(one, GGUFReader(gguf).tensors))
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("pack", "join", "weights"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args(words)
    if args.what == "pack":
        paths = pack(args.source, args.target)
        sys.stdout.write(f"{len(paths)} pieces in {args.target}\n")
    else:
        {"join": join, "weights": weights}[args.what](args.source, args.target)


if __name__ == "__main__":
    main()
