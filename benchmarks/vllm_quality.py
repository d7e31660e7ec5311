"""What each cache does to a model's answers inside vLLM, by the log-probabilities of prompts.

    python benchmarks/vllm_quality.py MODEL --caches k4v4 k3v3 k2v2 fp8 nvfp4 --out rows.jsonl

Caches are presets of tightkv and kv_cache_dtypes of vLLM; `again` is vLLM's own cache with other
chunks, the noise floor. Every cache has an engine of its own. Prompts are prefilled in chunks
(`--chunk` tokens), so that most positions read what came before from compressed pages. The KL is
over the `TOP` most likely tokens of vLLM's own cache and, as one outcome, all others: a little less
than the whole KL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightkv.config import PRESETS
from tightkv.tools.bench.engine_plan import VLLM_CACHES

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OWN, AGAIN = "auto", "again"
LARGE = 0.1  # nats
TOP = 256

Position = tuple[float, dict[int, float]]  # log p of the prompt's token, and of the most likely


def run_engine(job: dict[str, Any]) -> dict[str, Any]:
    """Every position of every prompt but the first, and what a token takes in blocks."""
    from vllm import LLM, SamplingParams

    from tightkv.integrations.vllm import register

    register()  # vLLM finds the plugin itself only where tightkv is installed
    llm = LLM(**job["engine"])
    params = SamplingParams(max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    found = []
    for ids in job["prompts"]:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        positions = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        found.append(
            [(x[token].logprob, {t: y.logprob for t, y in x.items()}) for token, x in positions]
        )
    return {"windows": found, "bytes_per_token": bytes_per_token(llm)}


def bytes_per_token(llm: Any) -> float:
    """Of the blocks of all layers."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    config = scheduler.kv_cache_config
    blocks = sum(tensor.size for tensor in config.kv_cache_tensors) / config.num_blocks
    return float(blocks / config.kv_cache_groups[0].kv_cache_spec.block_size)


def engine_in_a_process(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("job.json", "found.json")]
        paths[0].write_text(json.dumps(job))
        words = [sys.executable, __file__, "--job", *map(str, paths)]
        subprocess.run(words, env={**os.environ, **SETTINGS}, check=True)
        found: dict[str, Any] = json.loads(paths[1].read_text())
    found["windows"] = [
        [(own, {int(t): p for t, p in top.items()}) for own, top in window]
        for window in found["windows"]
    ]
    return found


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    """Over the tokens that both have, and all others as one; in nats."""
    both = p.keys() & q.keys()
    terms = [(math.exp(p[t]), math.exp(q[t])) for t in both]
    terms.append(tuple(max(1e-9, 1 - sum(x)) for x in zip(*terms, strict=True)))
    return sum(a * math.log(a / b) for a, b in terms if a > 0)


def compare(own: list[list[Position]], other: list[list[Position]], prefill: int) -> dict[str, Any]:
    windows = [list(zip(*both, strict=True))[prefill:] for both in zip(own, other, strict=True)]
    pairs = [pair for window in windows for pair in window]
    means = [sum(kl(a[1], b[1]) for a, b in window) / len(window) for window in windows]
    several = len(means) > 1
    kls = sorted(kl(a[1], b[1]) for a, b in pairs)
    change = sum(a[0] - b[0] for a, b in pairs) / len(pairs)
    same = sum(max(a[1], key=a[1].get) == max(b[1], key=b[1].get) for a, b in pairs)
    return {
        "positions": len(pairs),
        "kl": sum(kls) / len(kls),
        "kl_stderr": statistics.stdev(means) / math.sqrt(len(means)) if several else None,
        "kl_above": sum(x > LARGE for x in kls) / len(kls),
        "kl_p999": kls[math.ceil(0.999 * len(kls)) - 1],
        "top1": same / len(pairs),
        "perplexity_increase": math.exp(change) - 1,
    }


def cache_arguments(name: str, calibration: str | None) -> dict[str, Any]:
    """What of `vllm.LLM` differs for a cache: one of vLLM's own, a preset, `again`."""
    plain, _, calibrated = name.partition(" ")
    options: Any = {"preset": plain} if plain in PRESETS else False
    if calibrated:
        options["calibration"] = calibration
    dtype = OWN if options or plain == AGAIN else plain
    found = {"kv_cache_dtype": dtype, "additional_config": {"tightkv": options}}
    return {**found, "attention_backend": "FLASHINFER"} if plain == "nvfp4" else found


def named_caches(names: Sequence[str], calibration: str | None) -> list[str]:
    """What is measured: vLLM's own cache and the noise floor first."""
    for name in names:
        if name not in (*PRESETS, *VLLM_CACHES):
            raise ValueError(f"cache {name!r}; supported: {', '.join((*PRESETS, *VLLM_CACHES))}")
    pairs = [(n, f"{n} calibrated") if calibration and n in PRESETS else (n,) for n in names]
    return [OWN, AGAIN, *(name for pair in pairs for name in pair if name != OWN)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder (default: the bundled model)")
    parser.add_argument(
        "--caches", "--presets", nargs="+", default=["k4v4", "k3v3", "k2v2"],
        help="presets, and kv_cache_dtypes of vLLM",
    )  # fmt: skip
    parser.add_argument("--calibration", help="a file, or auto: presets are measured with it too")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=256, help="first tokens, not scored")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--name", help="of the model in the rows (default: the folder's)")
    parser.add_argument("--out", help="append rows to this .jsonl file")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.job:
        found = run_engine(json.loads(Path(args.job[0]).read_text()))
        Path(args.job[1]).write_text(json.dumps(found))
        return

    from transformers import AutoTokenizer

    from tightkv.tools.eval.results import with_transformers
    from tightkv.tools.eval.tasks.quality import Schedule
    from tightkv.tools.eval.text import default_texts
    from tightkv.tools.eval.windows import cut_windows
    from tightkv.tools.model_loading.bundled import bundled_folder
    from tightkv.tools.model_loading.source import BUNDLED_NAME
    from tightkv.tools.rows import append_rows

    names = named_caches(args.caches, args.calibration)
    Schedule(args.prefill, args.chunk).check_window(args.window)
    folder = Path(args.model or bundled_folder(print))
    model = args.name or (folder.name if args.model else BUNDLED_NAME)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows = cut_windows(tokenizer, default_texts(), args.window, args.windows)
    engine = {
        "model": str(folder),
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": args.window + 64,
        "max_num_seqs": 1,
        "max_num_batched_tokens": args.chunk,
        "max_logprobs": TOP,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": 0.1,  # other engines may run beside this one
    }
    sizes = {key: getattr(args, key) for key in ("window", "windows", "prefill", "chunk")}
    kind = {"kind": "vllm-quality", "dtype": args.dtype, "top": TOP, **sizes}
    own: list[list[Position]] = []
    for name in names:
        arguments = {**engine, **cache_arguments(name, args.calibration)}
        if name == AGAIN:
            arguments["max_num_batched_tokens"] = args.chunk * 3 // 4
        try:
            found = engine_in_a_process({"engine": arguments, "prompts": windows.ids.tolist()})
        except subprocess.CalledProcessError:
            if name == OWN:
                raise
            sys.stderr.write(f"{name}: the engine failed; the others go on\n")
            continue
        if name == OWN:
            own = found["windows"]
            continue
        row = {"model": model, "cache": name, "bytes_per_token": found["bytes_per_token"]}
        row |= compare(own, found["windows"], args.prefill)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if args.out:
            append_rows(args.out, [{**kind, **row, **with_transformers()}])


if __name__ == "__main__":
    main()
