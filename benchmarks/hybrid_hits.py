"""Prompt tokens that a cached prefix saves in models with states: vLLM's own cache, and ours.

    python benchmarks/hybrid_hits.py --shape qwen3-next --out rows.jsonl

Each prompt runs twice, then once more with a question after it. A row per cache and length says how
many tokens of the second and of the third prompt were found, and how long their first tokens took.
With --decode, a row per cache and batch has the time per step of sequences that decode, which more
groups of layers make longer. Weights are random. The shapes have few layers, or narrow ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import transformers as hf

from tightkv.config import PRESETS

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
LENGTHS = (1000, 1564, 2048, 3000, 4096, 6264, 8192, 12000, 16000)
QUESTION = 300  # tokens that the third prompt has beyond the first
SMALL = {"vocab_size": 1024, "max_position_embeddings": 32768, "tie_word_embeddings": True}
ONE_OF_FOUR = {"num_hidden_layers": 16, "num_key_value_heads": 1, "num_attention_heads": 2}
SHAPES: dict[str, hf.PretrainedConfig] = {
    # Mamba-2, as in Granite 4 and Nemotron-H
    "granite": hf.GraniteMoeHybridConfig(
        **{**SMALL, **ONE_OF_FOUR},
        hidden_size=256,
        intermediate_size=256,
        shared_intermediate_size=256,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 4,
        num_local_experts=0,
        mamba_expand=4,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_state=128,
        mamba_n_groups=1,
        architectures=["GraniteMoeHybridForCausalLM"],
    ),
    # short convolutions
    "lfm2": hf.Lfm2Config(
        **{**SMALL, **ONE_OF_FOUR},
        hidden_size=256,
        intermediate_size=256,
        layer_types=["conv", "conv", "full_attention", "conv"] * 4,
        conv_dim=256,
        block_dim=256,
        block_multiple_of=32,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        architectures=["Lfm2ForCausalLM"],
    ),
    # gated delta nets, with the heads and states of Qwen3-Next-80B-A3B
    "qwen3-next": hf.Qwen3NextConfig(
        **SMALL,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=48,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        architectures=["Qwen3NextForCausalLM"],
    ),
}


def engine_arguments(args: argparse.Namespace, cache: str, model: str) -> dict[str, Any]:
    ours = cache in PRESETS
    longest = max(args.lengths) + QUESTION + 16
    compiled: dict[str, Any] = {"enforce_eager": True}
    if args.device == "cuda":
        compiled = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return {
        "model": model,
        "load_format": args.load_format,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": "auto" if ours else cache,
        "additional_config": {"tightkv": {"preset": cache} if ours else False},
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_model_len": -(-longest // 512) * 512,
        "max_num_seqs": max([1, *args.decode]),
        "max_num_batched_tokens": args.chunk,
        "kv_cache_memory_bytes": int(args.kv_gib * 2**30),
        **compiled,
        **json.loads(args.engine),
    }


def first_token(llm: Any, prompt: list[int]) -> tuple[int, float]:
    """Prompt tokens that were found, and milliseconds."""
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    (done,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return done.num_cached_tokens or 0, round(1e3 * (time.perf_counter() - began), 2)


def ms_per_step(llm: Any, prompts: list[list[int]]) -> float:
    """The median of the steps in which all sequences decode."""
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    engine, times = llm.llm_engine, []
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{len(prompts)} {i}", {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        outputs = engine.step()
        if len(outputs) == len(prompts):
            times.append(1e3 * (time.perf_counter() - began))
    return round(statistics.median(times[10:]), 3)


def run_engine(job: dict[str, Any]) -> list[dict[str, Any]]:
    import vllm

    if job["cache"] in PRESETS:
        from tightkv.integrations.vllm import register

        register()  # vLLM finds the plugin itself only where tightkv is installed
    if job["device"] == "cpu":  # whose kernels keep no state inside of a step
        from vllm.model_executor.layers.mamba import mamba_mixer2

        base = mamba_mixer2.MambaBase
        mamba_mixer2.MambaMixer2.get_kv_cache_spec = lambda *given: base.get_kv_cache_spec(*given)
    llm = vllm.LLM(**job["engine"])
    core = llm.llm_engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    choose, rows = random.Random(0), []
    blocks = {
        "block": groups[0].kv_cache_spec.block_size,
        "groups": len(groups),
        "blocks": core.vllm_config.cache_config.num_gpu_blocks,
    }
    for length in job["lengths"]:
        prompt = [choose.randint(10, job["vocabulary"] - 1) for _ in range(length)]
        longer = prompt + [choose.randint(10, job["vocabulary"] - 1) for _ in range(QUESTION)]
        (_, fresh), again, later = (first_token(llm, each) for each in (prompt, prompt, longer))
        times = {"ttft_ms_fresh": fresh, "ttft_ms": again[1], "ttft_ms_longer": later[1]}
        rows.append({"length": length, "found": again[0], "found_longer": later[0], **times})
    for batch in job["decode"]:
        prompts = [
            [choose.randint(10, job["vocabulary"] - 1) for _ in range(512)] for _ in range(batch)
        ]
        rows.append({"batch": batch, "ms_per_step": ms_per_step(llm, prompts)})
    return [{"cache": job["cache"], **blocks, **row} for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--caches", nargs="+", default=["auto", "k4v4"])
    parser.add_argument("--model", help="a folder; random weights of --shape unless given")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="granite")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--decode", nargs="+", type=int, default=[], help="batches that decode")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens per step")
    parser.add_argument("--kv-gib", type=float, default=8.0)
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="append rows to this .jsonl file")
    parser.add_argument("--job", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        args.job[1].write_text(json.dumps(run_engine(json.loads(args.job[0].read_text()))))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run(args, Path(folder))


def run(args: argparse.Namespace, folder: Path) -> int:
    """One engine after another, each in a process of its own."""
    args.load_format, failed, name = "auto", 0, args.model or args.shape
    if args.model is None:
        SHAPES[args.shape].save_pretrained(folder / "model")
        args.model, args.load_format = str(folder / "model"), "dummy"
    config = json.loads((Path(args.model) / "config.json").read_text())
    vocabulary = config.get("text_config", config)["vocab_size"]
    for cache in args.caches:
        engine = engine_arguments(args, cache, args.model)
        job = {"cache": cache, "engine": engine, "device": args.device, "vocabulary": vocabulary}
        paths = [folder / f"{cache} {name}.json" for name in ("job", "rows")]
        paths[0].write_text(json.dumps({**job, "lengths": args.lengths, "decode": args.decode}))
        words = [sys.executable, __file__, "--job", *map(str, paths)]
        code = subprocess.run(words, env={**os.environ, **SETTINGS}, check=False).returncode
        failed += code != 0
        rows = json.loads(paths[1].read_text()) if code == 0 else [{"error": f"exit code {code}"}]
        write([{"cache": cache, **row} for row in rows], args, name)
    return 1 if failed else 0


def write(rows: list[dict[str, Any]], args: argparse.Namespace, name: str) -> None:
    import torch
    import vllm

    from tightkv.tools.rows import append_rows, provenance

    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    if args.out is not None:
        kind = {"bench": "hybrid hits", "model": name, "dtype": args.dtype}
        facts = {"chunk": args.chunk, "question": QUESTION, "vllm": vllm.__version__}
        machine = provenance(torch.device(args.device))
        append_rows(args.out, [{**row, **kind, **facts, **machine} for row in rows])


if __name__ == "__main__":
    sys.exit(main())
