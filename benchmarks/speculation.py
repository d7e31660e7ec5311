"""Time per output token with and without speculation, of vLLM's own cache and of compressed ones.

    python benchmarks/speculation.py --out rows.jsonl

The draft is an EAGLE head of one layer. Weights are random, and so no draft would be accepted:
vLLM's synthetic rejection sampling accepts as many as --accepted says, the same of every cache
(not on a CPU, where vLLM has none). A row per cache, number of drafts (0: no speculation), batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightkv.config import PRESETS
from tightkv.tools.bench.engine_plan import SHAPES

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
_ROUND = 512  # a multiple of every block


def write_models(config: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Folders of a model and of an EAGLE head for it; a config.json is all that is in them."""
    for name, changes in (("model", {}), ("head", {"num_hidden_layers": 1})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder / "model"), str(folder / "head")


def accepted_length(drafts: int, rate: float) -> float:
    """Mean tokens per step if each draft is accepted with `rate`, given that those before were."""
    return sum(rate**i for i in range(drafts + 1))


def engine_arguments(
    args: argparse.Namespace, cache: str, drafts: int, model: str, head: str
) -> dict[str, Any]:
    ours = cache in PRESETS
    longest = args.context + args.tokens + drafts + 1
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy",
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": "auto" if ours else cache,
        "additional_config": {"tightkv": {"preset": cache} if ours else False},
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_model_len": -(-longest // _ROUND) * _ROUND,
        "max_num_seqs": max(args.batches),
    }
    if drafts:
        arguments["speculative_config"] = {
            "method": "eagle",
            "model": head,
            "num_speculative_tokens": drafts,
        }
    if args.device == "cuda" and drafts:
        arguments["speculative_config"] |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": accepted_length(drafts, args.accepted),
        }
    if args.device == "cuda":
        tokens = {batch * count for batch in args.batches for count in (1, 1 + drafts)}
        arguments["max_num_batched_tokens"] = 16384
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted(tokens),
        }
        arguments["gpu_memory_utilization"] = 0.15  # several engines start at a time
    else:
        arguments["enforce_eager"] = True
    if args.kv_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
    return {**arguments, **json.loads(args.engine)}


def decode(engine: Any, prompts: list[list[int]], params: Any) -> dict[str, float]:
    """From when all sequences have a token until the first has all: seconds, tokens, steps."""
    for i, prompt in enumerate(prompts):
        engine.add_request(f"{time.monotonic()} {i}", {"prompt_token_ids": prompt}, params)
    counts: dict[str, int] = {}
    began = ended = 0.0
    before = tokens = steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            counts[output.request_id] = len(output.outputs[0].token_ids)
        now, made = time.perf_counter(), sum(counts.values())
        if not began and len(counts) == len(prompts) and min(counts.values()):
            began, before = now, made
        elif began and not ended:
            steps, tokens = steps + 1, made - before
            if max(counts.values()) >= params.max_tokens:
                ended = now
    return {"seconds": ended - began, "tokens": tokens, "steps": steps}


def run_engine(job: dict[str, Any]) -> list[dict[str, Any]]:
    import vllm

    if job["cache"] in PRESETS:
        from tightkv.integrations.vllm import register

        register()  # vLLM finds the plugin itself only where tightkv is installed
    wait_for(job["start"])
    llm = vllm.LLM(**job["engine"])
    choose, rows = random.Random(0), []

    def prompts(batch: int) -> list[list[int]]:
        length = range(job["context"])
        return [[choose.randint(10, job["vocabulary"] - 1) for _ in length] for _ in range(batch)]

    params = vllm.SamplingParams(
        temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False
    )
    decode(llm.llm_engine, [prompts(1)[0][:64]], params)
    Path(job["ready"]).touch()
    wait_for(job["turn"])
    for batch in job["batches"]:
        asked = prompts(batch)
        runs = [decode(llm.llm_engine, asked, params) for _ in range(job["repeats"] + 1)][1:]
        best = min(runs, key=lambda run: run["seconds"] / run["tokens"])
        rows.append(
            {
                "batch": batch,
                "tpot_ms": round(1e3 * batch * best["seconds"] / best["tokens"], 3),
                "step_ms": round(1e3 * best["seconds"] / best["steps"], 3),
                "tokens_per_step": round(best["tokens"] / best["steps"] / batch, 3),
            }
        )
    return rows


def wait_for(path: str) -> None:
    parent = os.getppid()
    while not Path(path).exists():
        time.sleep(0.05)
        if os.getppid() != parent:
            raise SystemExit("the process that measures has ended")


def measure(args: argparse.Namespace, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Rows of one cache after another.

    Its engines start together and are measured in turn; those of the others have imported vLLM.
    """
    config = {**SHAPES[args.shape], **({"num_hidden_layers": args.layers} if args.layers else {})}
    model, head = write_models(config, folder)
    processes = {}
    for cache in args.caches:
        for drafts in (0, *args.drafts):
            name = f"{cache}-{drafts}"
            job = {
                "cache": cache,
                "engine": engine_arguments(args, cache, drafts, model, head),
                "vocabulary": config["vocab_size"],
                **{key: getattr(args, key) for key in ("context", "tokens", "batches", "repeats")},
                "start": str(folder / f"start-{cache}"),
                **{key: str(folder / f"{key}-{name}") for key in ("ready", "turn")},
            }
            (folder / f"job-{name}").write_text(json.dumps(job))
            words = [__file__, "--job", *(str(folder / f"{x}-{name}") for x in ("job", "rows"))]
            process = subprocess.Popen([sys.executable, *words], env={**os.environ, **SETTINGS})
            processes[name] = process
    for cache in args.caches:
        rows = []
        (folder / f"start-{cache}").touch()
        names = [f"{cache}-{drafts}" for drafts in (0, *args.drafts)]
        while any(
            processes[name].poll() is None and not (folder / f"ready-{name}").exists()
            for name in names
        ):
            time.sleep(0.1)
        for drafts, name in zip((0, *args.drafts), names, strict=True):
            (folder / f"turn-{name}").touch()
            if code := processes[name].wait():
                found = [{"error": f"exit code {code}"}]
            else:
                found = json.loads((folder / f"rows-{name}").read_text())
            rows += [{"cache": cache, "drafts": drafts, **row} for row in found]
        yield rows


def with_ratios(rows: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast as without speculation, and as the first cache with the same drafts.

    `before`: rows of other caches. Rows of engines that failed are left as they are.
    """
    known = [*before, *rows]
    times = {(r["cache"], r["drafts"], r["batch"]): r["tpot_ms"] for r in known if "tpot_ms" in r}
    first = known[0]["cache"]

    def ratios(row: dict[str, Any]) -> dict[str, float]:
        others = {
            "to no speculation": (row["cache"], 0, row["batch"]),
            f"to {first}": (first, row["drafts"], row["batch"]),
        }
        return {
            name: round(times[key] / row["tpot_ms"], 3)
            for name, key in others.items()
            if key in times
        }

    return [{**row, "ratios": ratios(row)} if "tpot_ms" in row else row for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--caches", nargs="+", default=["auto", "k4v4"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[3, 5], help="tokens per step")
    parser.add_argument("--accepted", type=float, default=0.7, help="rate of each draft; 0.7")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape's")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=256, help="that each sequence decodes")
    parser.add_argument("--repeats", type=int, default=2, help="of which the fastest counts")
    parser.add_argument("--kv-gib", type=float, default=10.0, help="memory of each cache")
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="append rows to this .jsonl file")
    parser.add_argument("--job", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        args.job[1].write_text(json.dumps(run_engine(json.loads(args.job[0].read_text()))))
        return 0
    if min(args.drafts) < 1 or not 0 <= args.accepted <= 1:
        parser.error(
            f"--drafts {args.drafts} --accepted {args.accepted}; at least 1, and from 0 to 1"
        )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for found in measure(args, Path(folder)):
            new = with_ratios(found, rows)
            rows += new
            sys.stdout.write("".join(json.dumps(row) + "\n" for row in new))
            sys.stdout.flush()
            if args.out is not None:
                write(new, args)
    return 1 if any("error" in row for row in rows) else 0


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    import torch

    from tightkv.tools.rows import append_rows, provenance

    names = ("dtype", "context", "tokens", "accepted", "layers")
    kind = {"bench": "speculation", "method": "eagle", "model": args.shape}
    kind |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    facts = provenance(torch.device(args.device))
    append_rows(args.out, [{**row, **kind, **facts} for row in rows])


if __name__ == "__main__":
    sys.exit(main())
