"""Runs vLLM engines one after another, each in a process of its own: jobs in, results out, as JSON.

    python tests/support/vllm_engine.py [jobs.json results.json log.txt]

With files, all jobs run in this process. Without, it reads lines with three such files until its
input ends, and answers each with a line. There a job is a fork of the process, which has imported
vLLM: that takes longer than most jobs.

A job is {"engine": arguments of vllm.LLM, "batches": [[prompt, ...], ...], "sampling": {...}}; its
prompts are token ids, and the prompts of one batch are in the engine together. With "forced",
tokens for each prompt of each batch, those come out whatever the model says. With
"new_weights_before", a number, the model's weights change before that batch. "tenants" are one
{"salt": cache salt, "adapter": LoRA folder} per batch, both or either may be left out. With
"format_version", pages are of that version; with "drafts_convolve", convolutions forget rejected
drafts, which those of vLLM's CPU engine do not; with "no_checkpoints", Mamba-2 is not asked for
states inside of a step, which its kernel for CPUs does not return. With "hands_over", a file, the
engine stays for jobs with "taken_over", that file and the number of a batch: they take over its
prompts by NIXL. With "kernels", those run; with "seals_at_once", no page waits to be sealed. With
"stays", the engine is there until all jobs of its file have run.
{"soak": arguments of benchmarks/soak.py's run} is a job, too, and so is {"faults": arguments of
benchmarks/faults.py's run_case}.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # more workers than cores
}
METRICS = (
    "vllm:external_prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prefix_cache_hits",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
)
HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}
ENGINES_THAT_STAY: list[Any] = []


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    if "soak" in job:
        return run_soak(job["soak"])
    if "faults" in job:
        return {"rows": run_faults(job["faults"])}
    from vllm import LLM, SamplingParams

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
    if "forced" in job:
        engine["logits_processors"] = [forcing_processor()]
    if "format_version" in job:
        from tightkv.config import quant

        quant.FORMAT_VERSION = job["format_version"]
    if "kernels" in job:
        os.environ["TIGHTKV_KERNELS"] = job["kernels"]
    if "seals_at_once" in job:
        from tightkv.integrations.vllm.step import backend

        backend.seals_later = lambda impl: False
    if "drafts_convolve" in job:
        from vllm.model_executor.layers.mamba import mamba_mixer2

        mamba_mixer2.causal_conv1d_update = convolve_drafts
    if "no_checkpoints" in job:
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaBase, MambaMixer2

        MambaMixer2.get_kv_cache_spec = lambda *given: MambaBase.get_kv_cache_spec(*given)
    taken: list[Any] = []
    if "hands_over" in job or "taken_over" in job:
        prepare_transfer()
    if "taken_over" in job:
        file, batch = job["taken_over"]
        taken = [json.loads(Path(file).read_text())[batch]]
    try:
        llm = LLM(**engine)
    except ValueError as error:
        return {"error": str(error)}
    if "hands_over" in job:
        hand_over(llm, job)
    if engine.get("pipeline_parallel_size", 1) > 1:
        llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(prepare_stage)
    sampling = {"temperature": 0, "max_tokens": 16, "logprobs": 2, "detokenize": False}
    params = SamplingParams(**{**sampling, **job.get("sampling", {})})
    outputs = []
    for i, batch in enumerate(job["batches"]):
        if i == job.get("new_weights_before"):
            llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(change_weights)
            assert llm.reset_prefix_cache(reset_connector="kv_transfer_config" in engine)
        tenant = job["tenants"][i] if "tenants" in job else {}
        salt = {"cache_salt": tenant["salt"]} if "salt" in tenant else {}
        prompts = [{"prompt_token_ids": ids, **salt} for ids in batch]
        adapter = lora_request(tenant.get("adapter"))
        chosen: Any = params
        if "forced" in job:
            chosen = [forced_params(params, tokens) for tokens in job["forced"][i]]
        if taken:
            for one, given in zip(chosen, taken[i], strict=True):
                one.extra_args["kv_transfer_params"] = given
        done = llm.generate(prompts, chosen, use_tqdm=False, lora_request=adapter)
        outputs.append([result(request) for request in done])
    core = llm.llm_engine.engine_core.engine_core
    context = core.vllm_config.compilation_config.static_forward_context
    wanted = [metric for metric in llm.get_metrics() if metric.name in METRICS]
    counters = {m.name: m.values if hasattr(m, "values") else m.value for m in wanted}
    return {
        "outputs": outputs,
        "metrics": counters,
        "blocks": core.vllm_config.cache_config.num_gpu_blocks,
        "block_size": core.vllm_config.cache_config.block_size,
        "layers": {
            name: type(getattr(layer, "impl", layer)).__name__ for name, layer in context.items()
        },
        **kinds_of_layers(context),
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
        "tightkv": tightkv_metrics(),
        "sealed_later": count_sealed_later(context),
        "free_blocks": core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
    }


def count_sealed_later(context: dict[str, Any]) -> int:
    """Layers that leave the sealing of pages to later steps."""
    impls = [layer.impl for layer in context.values() if hasattr(layer, "impl")]
    groups = [getattr(impl, "group_rings", None) for impl in impls]
    late = (rings.sealing.late for rings in groups if rings is not None and rings.sealing)
    return len(set[Any]().union(*late))


def hand_over(llm: Any, job: dict[str, Any]) -> None:
    """Compute prompts, write down where they are, and stay until the process is ended."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": dict(HAND_OVER)})
    handed = []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": ids} for ids in batch]
        done = llm.generate(prompts, params, use_tqdm=False)
        handed.append([request.kv_transfer_params for request in done])
    place = Path(job["hands_over"])
    place.with_suffix(".part").write_text(json.dumps(handed))
    place.with_suffix(".part").rename(place)
    threading.Event().wait()


def lora_request(folder: str | None) -> Any:
    if folder is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(folder, 1 + zlib.crc32(folder.encode()) % (1 << 30), folder)


def change_weights(worker: Any) -> None:
    """In place, as trainers do that have an engine sample. vLLM's CPU engine packs matrices."""
    for name, weight in worker.get_model().named_parameters():
        if "input_layernorm" in name or name.endswith("sinks"):
            weight.data[::2] *= -1


def prepare_transfer() -> None:
    import nixl_agent

    nixl_agent.replace_agent()
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(nixl_agent.free_port())


def prepare_stage(worker: Any) -> None:
    """What vLLM's CPU runner does only when it compiles: a buffer for the stage before."""
    from vllm.distributed import get_pp_group

    runner = worker.model_runner
    if not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
        )


def convolve_drafts(
    x: Any, states: Any, weight: Any, bias: Any, _activation: Any, **of: Any
) -> Any:
    """vLLM's causal_conv1d_update in torch: a state begins after the last accepted token."""
    import torch
    import torch.nn.functional as F

    out, width = x.clone(), weight.shape[1]
    starts, accepted = of["query_start_loc"].tolist(), of["num_accepted_tokens"]
    for i, row in enumerate(of["conv_state_indices"].reshape(len(starts) - 1, -1)[:, 0].tolist()):
        new, state = x[starts[i] : starts[i + 1]].T, states[row]
        skip = 0 if accepted is None else int(accepted[i]) - 1
        tokens = torch.cat([state[:, skip : skip + width - 1], new], 1)
        out[starts[i] : starts[i + 1]] = F.silu(
            F.conv1d(tokens[None], weight[:, None], bias, groups=len(weight))
        )[0].T
        state[:, : tokens.shape[1] - 1] = tokens[:, 1:]
    return out


def kinds_of_layers(context: dict[str, Any]) -> dict[str, Any]:
    """How many layers are compressed, and of those with vLLM's own cache how many for what."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    from tightkv.integrations.vllm.layer_shapes import layer_shape
    from tightkv.model_shape import skip_reason

    layers = [layer for layer in context.values() if isinstance(layer, AttentionLayerBase)]
    names = ("TightAttention", "TightLatentAttention")  # older versions cannot import the second
    ours = [x.impl for x in layers if type(getattr(x, "impl", None)).__name__ in names]
    shared = sum(getattr(impl, "reads", None) is not None for impl in ours)
    kept = Counter(
        skip_reason(layer_shape(layer), "vllm")
        for layer in layers
        if getattr(layer, "impl", None) not in ours
    )
    return {"compressed": {"own": len(ours) - shared, "shared": shared}, "kept": dict(kept)}


def run_soak(arguments: dict[str, Any]) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import soak

    row: dict[str, Any] = soak.run(**arguments)
    return row


def run_faults(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    import faults

    return faults.run_case(**arguments)


def tightkv_metrics() -> dict[str, float]:
    from prometheus_client import REGISTRY

    samples = (sample for family in REGISTRY.collect() for sample in family.samples)
    ours = (sample for sample in samples if sample.name.startswith("tightkv:"))
    return {sample.name.removeprefix("tightkv:"): sample.value for sample in ours}


def forced_params(params: Any, tokens: list[int]) -> Any:
    changed = params.clone()
    changed.max_tokens, changed.extra_args = len(tokens), {"forced": tokens}
    return changed


def forcing_processor() -> type:
    """A logits processor that leaves one token; vLLM takes logprobs before it."""
    from vllm.v1.sample.logits_processor import LogitsProcessor
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    class Forced(LogitsProcessor):
        def __init__(self, *_: Any) -> None:
            self.requests: dict[int, tuple[list[int], list[int]]] = {}

        def is_argmax_invariant(self) -> bool:
            return False

        def update_state(self, batch_update: Any) -> None:
            process_dict_updates(
                self.requests, batch_update, lambda p, _, out: (p.extra_args["forced"], out)
            )

        def apply(self, logits: Any) -> Any:
            for row, (tokens, out) in self.requests.items():
                if len(out) < len(tokens):
                    logits[row] = -1e9
                    logits[row, tokens[len(out)]] = 0
            return logits

    return Forced


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


def run_forked(job: dict[str, Any], place: Path) -> dict[str, Any]:
    process = multiprocessing.get_context("fork").Process(target=write_result, args=(job, place))
    process.start()
    while "hands_over" in job and process.is_alive():
        if Path(job["hands_over"]).exists():
            ENGINES_THAT_STAY.append(process)
            return {}
        time.sleep(0.05)
    while "stays" in job and process.is_alive():
        if place.exists():
            ENGINES_THAT_STAY.append(process)
            return take_result(place)
        time.sleep(0.05)
    process.join()
    if process.exitcode:  # of this one; the others' tests can still run
        return {"error": f"exit code {process.exitcode}; the log says why"}
    return take_result(place)


def take_result(place: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(place.read_text())
    place.unlink()
    return result


def write_result(job: dict[str, Any], place: Path) -> None:
    from vllm.v1.executor import multiproc_executor

    gc.freeze()  # engines collect garbage nine times; that of imports is nobody's
    gc.unfreeze = lambda: None
    if job.get("fork_ranks"):
        multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    place.with_suffix(".part").write_text(json.dumps(run_job(job)))
    place.with_suffix(".part").rename(place)
    if "stays" in job:
        threading.Event().wait()


def import_engine() -> None:
    """What all engines on a CPU do once: imports, and C++ in the place of Triton kernels."""
    import compressed_tensors  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.model_executor.layers.quantization.online.base
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.core.sched.scheduler
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    import tightkv.integrations.vllm.metrics.monitor
    import tightkv.integrations.vllm.start.engine_core
    import tightkv.integrations.vllm.start.install
    import tightkv.kernels.cuda.backend  # noqa: F401

    registry._run_in_subprocess = lambda look: look()  # model classes are looked at here, too
    if hasattr(type(current_platform), "register_triton_kernel_overrides"):  # from 0.31 on
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = lambda *_: None
    if find_spec("lmcache") is not None:
        import lmcache.integration.vllm.lmcache_mp_connector  # noqa: F401


def run_all(jobs: Path, done: Path, run: Callable[[dict[str, Any], Path], Any]) -> None:
    results = {name: run(job, done) for name, job in json.loads(jobs.read_text()).items()}
    while ENGINES_THAT_STAY:
        ENGINES_THAT_STAY.pop().kill()
    done.write_text(json.dumps(results))


def write_log(path: str) -> None:
    """What this process and its children print from now on goes to the file."""
    sys.stdout.flush()
    with open(path, "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def serve() -> None:
    """What vLLM's sampler and n-gram drafts would compile takes longer than most engines run."""
    os.environ["TORCH_COMPILE_DISABLE"] = os.environ["NUMBA_DISABLE_JIT"] = "1"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_engine()
    for line in sys.stdin:
        jobs, done, log = json.loads(line)
        write_log(log)
        run_all(Path(jobs), Path(done), run_forked)
        print("done", file=answers, flush=True)


def main() -> None:
    os.environ.update({**SETTINGS, **os.environ})
    if not sys.argv[1:]:
        return serve()
    jobs, done, log = sys.argv[1:]  # with a GPU, whose driver does not survive a fork
    write_log(log)
    run_all(Path(jobs), Path(done), lambda job, _: run_job(job))


if __name__ == "__main__":
    main()
