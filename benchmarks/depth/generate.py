"""Answers to the task file's prompts through vLLM, one engine per cache, free-running.

    python benchmarks/depth/generate.py MODEL --tasks tasks.json.xz --out answers \\
        --caches auto k4v4 k3v3 k2v2 k8v4 fp8 again --seeds 2 --seconds 1100

Each cache answers every prompt with the first seed before any with the second, and writes an answer
as soon as it is there: what a time limit cuts off is lost, what was answered is not, and the same
command goes on with what is missing. `again` is `auto` with other batches, so that sums are taken
in another order: the noise floor. `NAME+calibrated` takes --calibration. All caches sample with the
same random numbers for the same prompt, seed and position.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks import FAMILIES, Encoder, Prompt, TaskFile, in_turn

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
AGAIN = "again"
_GRACE = 60.0  # seconds after which an engine is ended that does not end itself


def chosen(file: TaskFile, args: argparse.Namespace) -> list[Prompt]:
    """The prompts in the order in which they are asked."""
    prompts = [
        prompt
        for prompt in in_turn(file.prompts)
        if prompt.family in args.families and prompt.depth <= args.max_depth
    ]
    return prompts[: args.limit]


def answers(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; a last line that was cut off is no row."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def missing(
    prompts: Sequence[Prompt], seeds: Sequence[int], rows: Iterable[dict[str, Any]]
) -> list[tuple[Prompt, int]]:
    """All prompts of the first seed, then of the next, but for those that have an answer."""
    done = {(row["id"], row["seed"]) for row in rows}
    return [(p, seed) for seed in seeds for p in prompts if (p.id, seed) not in done]


def cache_arguments(name: str, calibration: str | None) -> dict[str, Any]:
    """What of `vllm.LLM` differs for a cache."""
    from tightkv.config import PRESETS

    plain, _, calibrated = name.partition("+")
    if calibrated not in ("", "calibrated") or (calibrated and plain not in PRESETS):
        raise ValueError(f"cache {name!r}; a preset may be followed by +calibrated, nothing else")
    if calibrated and calibration is None:
        raise ValueError(f"cache {name!r} needs --calibration FILE (tightkv calibrate)")
    options: Any = {"preset": plain} if plain in PRESETS else False
    if calibrated:
        options["calibration"] = calibration
    dtype = "auto" if options or plain == AGAIN else plain
    found = {"kv_cache_dtype": dtype, "additional_config": {"tightkv": options}}
    return {**found, "attention_backend": "FLASHINFER"} if plain == "nvfp4" else found


def engine_arguments(args: argparse.Namespace, name: str, longest: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(args.model),
        "dtype": args.dtype,
        "max_model_len": longest,
        "max_num_seqs": args.batch,
        "max_num_batched_tokens": args.chunk,
        "enable_prefix_caching": True,
        **cache_arguments(name, args.calibration),
    }
    if args.device == "cuda":
        if name in ("auto", AGAIN, "fp8"):
            arguments["block_size"] = 64  # as pages: a prompt has fewer blocks to hash
        arguments["gpu_memory_utilization"] = args.gpu_share
        sizes = sorted({1, 8, 16, 32, 64, *range(128, args.batch + 1, 64), args.batch})
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sizes,
        }
    else:
        # vLLM's CPU engine cannot take a random number back after a part of a prompt
        arguments |= {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 30}
    if name == AGAIN:
        arguments["max_num_seqs"] = args.batch * 3 // 4 or 1
        if args.device == "cuda":
            arguments["max_num_batched_tokens"] = max(args.chunk * 3 // 4, 512)
    return {**arguments, **args.engine_args}


def run_cache(args: argparse.Namespace, name: str) -> None:
    """What one cache has not answered yet, until the time that standard input tells.

    It tells once the engine before has ended: imports and tokens are ready by then.
    """
    file = TaskFile.load(args.tasks)
    path = args.out / f"{name}.jsonl"
    work = missing(chosen(file, args), range(args.seeds), answers(path))
    if not work:
        return
    from transformers import AutoTokenizer
    from vllm import LLM

    encoder = Encoder(AutoTokenizer.from_pretrained(args.model), file)
    encoded = {p.id: encoder.encode(p) for p, seed in work}
    longest = max(len(encoded[p.id]) + p.max_tokens for p, _ in work)
    from tightkv.integrations.vllm import register

    register()  # vLLM finds the plugin itself only where tightkv is installed
    if not (line := sys.stdin.readline()):
        return  # whoever started this process is gone
    start, end = time.monotonic(), float(line)
    engine = LLM(**engine_arguments(args, name, longest + 1)).llm_engine
    say(f"{name}: {len(work)} prompts, the engine is there after {time.monotonic() - start:.0f} s")
    given = answer(engine, work, encoded, args, path, end)
    say(f"{name}: {given} of {len(work)} answered in {time.monotonic() - start:.0f} s")


def answer(
    engine: Any,
    work: Sequence[tuple[Prompt, int]],
    encoded: dict[str, list[int]],
    args: argparse.Namespace,
    path: Path,
    end: float,
) -> int:
    """Keep the engine busy and write what comes out of it; how many answers were written."""
    from vllm import SamplingParams

    from tightkv.tools.rows import append_rows

    waiting, held = iter(work), dict[str, tuple[Prompt, int]]()
    given = 0
    while time.time() < end:
        while len(held) < 2 * args.batch and (one := next(waiting, None)) is not None:
            prompt, seed = one
            params = SamplingParams(
                temperature=args.temperature,
                top_p=args.top_p,
                seed=seed,
                max_tokens=prompt.max_tokens,
                stop=list(prompt.stop),
            )
            name = f"{prompt.id} {seed}"
            held[name] = one
            engine.add_request(name, {"prompt_token_ids": encoded[prompt.id]}, params)
        if not held:
            break
        rows = []
        for output in engine.step():
            if not output.finished:
                continue
            prompt, seed = held.pop(output.request_id)
            first = output.outputs[0]
            row = {
                "id": prompt.id,
                "seed": seed,
                "text": first.text,
                "tokens": len(first.token_ids),
                "finish": first.finish_reason,
                "prompt_tokens": len(encoded[prompt.id]),
            }
            rows.append(row)
        if rows:
            append_rows(path, rows)
            given += len(rows)
    return given


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What answers of one folder must have in common."""
    names = ("model", "dtype", "temperature", "top_p", "calibration", "engine_args")
    return {name: getattr(args, name) for name in names} | {"tasks": args.tasks.name}


def check_settings(args: argparse.Namespace) -> None:
    path = args.out / "settings.json"
    own = json.loads(json.dumps(settings(args)))
    if path.exists() and (known := json.loads(path.read_text("utf-8"))) != own:
        different = [key for key in own if known.get(key) != own[key]]
        raise ValueError(
            f"{args.out} has answers with other settings ({', '.join(different)}); "
            "take another --out, or the same settings"
        )
    path.write_text(json.dumps(own, indent=1), encoding="utf-8")


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def parse_args(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a folder with weights and tokenizer")
    parser.add_argument("--tasks", type=Path, required=True, help="made by prepare.py")
    parser.add_argument("--out", type=Path, required=True, help="a folder: a file per cache")
    parser.add_argument(
        "--caches", nargs="+", default=["auto", "k4v4", "k3v3", "k2v2", "again", "fp8", "k8v4"]
    )
    parser.add_argument("--calibration", help="of the caches NAME+calibrated")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.2)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all caches")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--max-depth", type=int, default=1 << 30)
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--batch", type=int, default=256, help="sequences at a time")
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a step")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu-share", type=float, default=0.85)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON, of vllm.LLM")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # a cache
    return parser.parse_args(words)


class Worker:
    """The process of one cache, started before its turn."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        self.name = name
        command = [sys.executable, __file__, *words, "--worker", name]
        environment = {**os.environ, **SETTINGS}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)

    def run(self, seconds: float) -> bool:
        """Its turn; whether it ended well. One that hangs leaves the others their time."""
        limit = None if seconds == float("inf") else seconds + _GRACE
        try:
            self.process.communicate(f"{time.time() + seconds}\n", timeout=limit)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return self.process.returncode == 0


def run_all(args: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """One cache after another; the names of those that failed."""
    end, failed = time.time() + args.seconds, []
    following: Worker | None = None
    for i, name in enumerate(args.caches):
        worker = following or Worker(name, words)
        last = i + 1 == len(args.caches)
        following = None if last else Worker(args.caches[i + 1], words)
        share = (end - time.time()) / (len(args.caches) - i)
        if not worker.run(share):
            say(f"{name}: failed")
            failed.append(name)
    return failed


def main() -> None:
    words = sys.argv[1:]
    args = parse_args(words)
    if args.worker:
        run_cache(args, args.worker)
        return
    for name in args.caches:
        cache_arguments(name, args.calibration)  # refuse a wrong one before the first engine
    args.out.mkdir(parents=True, exist_ok=True)
    check_settings(args)
    if failed := run_all(args, words):
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
