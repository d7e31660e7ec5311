"""Runs vLLM engines one after another in a process of their own: jobs in, results out, as JSON.

    python tests/vllm_engine.py jobs.json results.json

A job is {"engine": arguments of vllm.LLM, "batches": [[prompt, ...], ...], "sampling": {...}}; its
prompts are token ids, and the prompts of one batch are in the engine together.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # more workers than cores
}
METRICS = (
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_accepted_tokens",
)


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = {
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_logprobs": 300,
        "kv_cache_memory_bytes": 8 << 20,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
        **job["engine"],
    }
    try:
        llm = LLM(**engine)
    except ValueError as error:
        return {"error": str(error)}
    sampling = {"temperature": 0, "max_tokens": 16, "logprobs": 2, "detokenize": False}
    params = SamplingParams(**{**sampling, **job.get("sampling", {})})
    outputs = []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        outputs.append([result(r) for r in llm.generate(prompts, params, use_tqdm=False)])
    core = llm.llm_engine.engine_core.engine_core
    context = core.vllm_config.compilation_config.static_forward_context
    counters = {m.name: m.value for m in llm.get_metrics() if m.name in METRICS}
    told = {
        "outputs": outputs,
        "metrics": counters,
        "blocks": core.vllm_config.cache_config.num_gpu_blocks,
        "block_size": core.vllm_config.cache_config.block_size,
        "layers": {
            name: type(getattr(layer, "impl", layer)).__name__ for name, layer in context.items()
        },
        "bits": {
            name: layer.impl.layout.cfg.name
            for name, layer in context.items()
            if hasattr(getattr(layer, "impl", None), "layout")
        },
        "feedback": {
            name: None if layer.impl.feedback is None else list(layer.impl.feedback.shape)
            for name, layer in context.items()
            if hasattr(getattr(layer, "impl", None), "feedback")
        },
        "groups": sorted(
            (type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size)
            for group in core.scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
        ),
        "free_blocks": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }
    del llm, core, context
    gc.collect()
    cleanup_dist_env_and_memory()
    return told


def result(request: Any) -> dict[str, Any]:
    """Tokens, prompt tokens of cached prefixes, and the best (token, logprob) of each step."""
    output = request.outputs[0]
    return {
        "tokens": list(output.token_ids),
        "cached": request.num_cached_tokens,
        "best": [best(step) for step in output.logprobs or []],
        "prompt": [best(step) for step in (request.prompt_logprobs or [])[1:]],
    }


def best(step: dict[int, Any]) -> list[tuple[int, float]]:
    return sorted(((token, e.logprob) for token, e in step.items()), key=lambda pair: -pair[1])


def main() -> None:
    os.environ.update({**SETTINGS, **os.environ})
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = {name: run_job(job) for name, job in jobs.items()}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
