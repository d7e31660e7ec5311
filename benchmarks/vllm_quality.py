"""What each preset does to a model's answers inside vLLM, by the log-probabilities of prompts.

    python benchmarks/vllm_quality.py MODEL --presets k4v4 k3v3 k2v2 --out rows.jsonl

Every cache has an engine of its own. Prompts are prefilled in chunks (`--chunk` tokens), so that
most positions read what came before from compressed pages. The KL is over the `TOP` most likely
tokens of vLLM's own cache and, as one outcome, all others: a little less than the whole KL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
OWN = "auto"
TOP = 256

Position = tuple[float, dict[int, float]]  # log p of the prompt's token, and of the most likely


def run_engine(job: dict[str, Any]) -> list[list[Position]]:
    """Of every position of every prompt but the first."""
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    params = SamplingParams(max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    found = []
    for ids in job["prompts"]:
        (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        positions = zip(ids[1:], output.prompt_logprobs[1:], strict=True)
        found.append(
            [(x[token].logprob, {t: y.logprob for t, y in x.items()}) for token, x in positions]
        )
    return found


def engine_in_a_process(job: dict[str, Any]) -> list[list[Position]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("job.json", "found.json")]
        paths[0].write_text(json.dumps(job))
        words = [sys.executable, __file__, "--job", *map(str, paths)]
        subprocess.run(words, env={**os.environ, **SETTINGS}, check=True)
        windows = json.loads(paths[1].read_text())
    return [[(own, {int(t): p for t, p in top.items()}) for own, top in w] for w in windows]


def kl(p: dict[int, float], q: dict[int, float]) -> float:
    """Over the tokens that both have, and all others as one; in nats."""
    both = p.keys() & q.keys()
    terms = [(math.exp(p[t]), math.exp(q[t])) for t in both]
    terms.append(tuple(max(1e-9, 1 - sum(x)) for x in zip(*terms, strict=True)))
    return sum(a * math.log(a / b) for a, b in terms if a > 0)


def compare(own: list[list[Position]], other: list[list[Position]], prefill: int) -> dict[str, Any]:
    pairs = [
        pair
        for windows in zip(own, other, strict=True)
        for pair in list(zip(*windows, strict=True))[prefill:]
    ]
    kls = sorted(kl(a[1], b[1]) for a, b in pairs)
    change = sum(a[0] - b[0] for a, b in pairs) / len(pairs)
    same = sum(max(a[1], key=a[1].get) == max(b[1], key=b[1].get) for a, b in pairs)
    return {
        "positions": len(pairs),
        "kl": sum(kls) / len(kls),
        "kl_p999": kls[math.ceil(0.999 * len(kls)) - 1],
        "top1": same / len(pairs),
        "perplexity_increase": math.exp(change) - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", help="a folder (default: the bundled model)")
    parser.add_argument("--presets", nargs="+", default=["k4v4", "k3v3", "k2v2"])
    parser.add_argument("--calibration", help="a file, or auto: presets are measured with it too")
    parser.add_argument("--window", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--prefill", type=int, default=256, help="first tokens, not scored")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", help="append rows to this .jsonl file")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        found = run_engine(json.loads(Path(args.job[0]).read_text()))
        Path(args.job[1]).write_text(json.dumps(found))
        return

    from transformers import AutoTokenizer

    from tightkv.tools.eval.results import with_transformers
    from tightkv.tools.eval.text import default_texts
    from tightkv.tools.eval.windows import cut_windows
    from tightkv.tools.model_loading.bundled import bundled_folder
    from tightkv.tools.rows import append_rows

    folder = Path(args.model or bundled_folder(print))
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
    caches: dict[str, Any] = {OWN: False}
    for name in args.presets:
        caches[name] = {"preset": name}
        if args.calibration:
            calibrated = {"preset": name, "calibration": args.calibration}
            caches[f"{name} calibrated"] = calibrated
    own: list[list[Position]] = []
    for name, options in caches.items():
        job = {
            "engine": {**engine, "additional_config": {"tightkv": options}},
            "prompts": windows.ids.tolist(),
        }
        found = engine_in_a_process(job)
        if name == OWN:
            own = found
            continue
        row = {"model": folder.name if args.model else "SmolLM2-135M-Instruct", "cache": name}
        row |= compare(own, found, args.prefill)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        if args.out:
            sizes = {key: getattr(args, key) for key in ("window", "windows", "prefill", "chunk")}
            kind = {"kind": "vllm-quality", "dtype": args.dtype, "top": TOP, **sizes}
            append_rows(args.out, [{**kind, **row, **with_transformers()}])


if __name__ == "__main__":
    main()
