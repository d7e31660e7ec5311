"""Agents that come back: time to the first token of late turns, with a host tier behind the GPU.

    python benchmarks/agent_replay.py --out rows.jsonl

Each agent has a long prefix of its own after a system prompt that all share, and asks once per
round; its next prompt is everything said before and a question. The GPU holds a few agents, the
host tier (vLLM's OffloadingConnector) more of them the smaller their blocks are. All caches get the
same GPU and host memory. A row per cache and round, and one of the late rounds together.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
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
LATE = 2  # rounds at the end that count


@dataclass
class Replay:
    """The conversations, the same for every cache."""

    agents: int
    system: int
    context: int
    question: int
    answer: int
    rounds: int
    vocabulary: int
    seed: int = 0
    said: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        system = self.tokens(self.system)
        self.said = [[*system, *self.tokens(self.context)] for _ in range(self.agents)]

    def tokens(self, count: int) -> list[int]:
        return [self.random.randint(10, self.vocabulary - 1) for _ in range(count)]

    @property
    def longest(self) -> int:
        turn = self.question + self.answer
        return self.system + self.context + self.rounds * turn

    def order(self) -> list[int]:
        """Of the agents in a round."""
        return self.random.sample(range(self.agents), self.agents)

    def ask(self, agent: int) -> list[int]:
        """The prompt of an agent's next turn. What the model answers is not part of the replay."""
        self.said[agent] += self.tokens(self.question)
        prompt = list(self.said[agent])
        self.said[agent] += self.tokens(self.answer)
        return prompt


@dataclass
class Turn:
    round: int
    ttft: float
    """Seconds."""
    prompt: int
    cached: int
    """Prompt tokens that were not computed."""


def summary(turns: list[Turn]) -> dict[str, Any]:
    times = sorted(1e3 * turn.ttft for turn in turns)
    return {
        "requests": len(turns),
        "ttft_ms": round(statistics.median(times), 2),
        "ttft_ms_mean": round(statistics.mean(times), 2),
        "ttft_ms_p90": round(times[int(0.9 * (len(times) - 1))], 2),
        "hit_rate": round(sum(t.cached for t in turns) / sum(t.prompt for t in turns), 4),
    }


def run_turn(engine: Any, name: str, prompt: list[int], params: Any) -> tuple[float, int]:
    """Seconds to the first token, and how many prompt tokens were cached."""
    began, first, cached = time.perf_counter(), None, 0
    engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if first is None and output.outputs[0].token_ids:
                first, cached = time.perf_counter() - began, output.num_cached_tokens or 0
    assert first is not None
    return first, cached


def run_engine(job: dict[str, Any]) -> list[Turn]:
    import vllm

    if job["cache"] in PRESETS:
        from tightkv.integrations.vllm import register

        register()  # vLLM finds the plugin itself only where tightkv is installed
    llm = vllm.LLM(**job["engine"])
    engine, replay = llm.llm_engine, Replay(**job["replay"])
    params = vllm.SamplingParams(
        temperature=0, max_tokens=replay.answer, ignore_eos=True, detokenize=False
    )
    warm = Replay(**{**job["replay"], "agents": 1, "seed": 1})
    for i in range(2):  # compiles, and plans for these lengths
        run_turn(engine, f"warm {i}", warm.ask(0), params)
    Path(job["ready"]).touch()
    while not Path(job["turn"]).exists():  # another engine has the device
        time.sleep(0.1)
    turns, end = [], time.monotonic() + job["seconds"]
    for number in range(replay.rounds):
        for agent in replay.order():
            prompt = replay.ask(agent)
            ttft, cached = run_turn(engine, f"{number} {agent}", prompt, params)
            turns.append(Turn(number, ttft, len(prompt), cached))
            if time.monotonic() > end:
                return turns
    return turns


def rows_of(cache: str, turns: list[Turn], rounds: int) -> list[dict[str, Any]]:
    rows = []
    for number in range(rounds):
        mine = [turn for turn in turns if turn.round == number]
        if mine:
            rows.append({"cache": cache, "round": number + 1, **summary(mine)})
    late = [turn for turn in turns if turn.round >= rounds - LATE]
    if late:
        rows.append({"cache": cache, "round": "late", **summary(late)})
    return rows


def arguments(args: argparse.Namespace, cache: str, longest: int) -> dict[str, Any]:
    ours = cache in PRESETS
    transfer = json.loads(args.connector)
    extra = {"cpu_bytes_to_use": int(args.host_gib * 2**30)}
    compiled: dict[str, Any] = {"enforce_eager": True}
    if args.device == "cuda":  # prompts are what is measured
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        compiled = {"compilation_config": graphs}
    transfer["kv_connector_extra_config"] = {
        **extra,
        **transfer.get("kv_connector_extra_config", {}),
    }
    return {
        "model": args.model,
        "load_format": args.load_format,
        "dtype": args.dtype,
        "skip_tokenizer_init": True,
        "kv_cache_dtype": "auto" if ours else cache,
        "additional_config": {"tightkv": {"preset": cache} if ours else False},
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "max_model_len": -(-(longest + 512) // 512) * 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16384,
        "kv_cache_memory_bytes": int(args.gpu_gib * 2**30),
        "gpu_memory_utilization": round(0.9 / len(args.caches), 2),  # others are there too
        "kv_transfer_config": {"kv_role": "kv_both", **transfer},
        **compiled,
        **json.loads(args.engine),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--caches", nargs="+", default=["auto", "fp8", "k4v4"])
    parser.add_argument("--model", help="a folder; random weights of --shape unless given")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=12, help="of the shape; 12")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--system", type=int, default=2048, help="tokens that all share")
    parser.add_argument("--context", type=int, default=12288, help="tokens of each agent's own")
    parser.add_argument("--question", type=int, default=256)
    parser.add_argument("--answer", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu-gib", type=float, default=2.0)
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each cache's requests")
    parser.add_argument("--connector", default='{"kv_connector": "OffloadingConnector"}')
    parser.add_argument("--engine", default="{}", help="further arguments of vllm.LLM, as JSON")
    parser.add_argument("--out", type=Path, help="append rows to this .jsonl file")
    parser.add_argument("--job", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        turns = run_engine(json.loads(args.job[0].read_text()))
        args.job[1].write_text(json.dumps([vars(turn) for turn in turns]))
        return 0
    if args.rounds <= LATE:
        parser.error(f"--rounds {args.rounds}; at least {LATE + 1}, the first are not late")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # engines end with this process
    with tempfile.TemporaryDirectory() as folder:
        return replay(args, Path(folder))


def replay(args: argparse.Namespace, folder: Path) -> int:
    """All engines start together; then one after another has the device."""
    args.load_format = "auto"
    vocabulary = None
    if args.model is None:
        config = {**SHAPES[args.shape], "num_hidden_layers": args.layers}
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(config))
        args.model, args.load_format = str(folder / "model"), "dummy"
    config = json.loads((Path(args.model) / "config.json").read_text())
    vocabulary = config["vocab_size"]
    names = ("agents", "system", "context", "question", "answer", "rounds")
    sizes = {**{name: getattr(args, name) for name in names}, "vocabulary": vocabulary}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        return run_engines(args, folder, sizes, processes)
    finally:  # none outlives this one: it would hold the device and the host's memory
        for process in processes:
            process.kill()


def run_engines(
    args: argparse.Namespace,
    folder: Path,
    sizes: dict[str, Any],
    processes: list[subprocess.Popen[bytes]],
) -> int:
    longest = Replay(**{**sizes, "agents": 1}).longest
    for i, cache in enumerate(args.caches):
        job = {
            "cache": cache,
            "ready": str(folder / f"ready{i}"),
            "turn": str(folder / f"turn{i}"),
            "engine": arguments(args, cache, longest),
            "replay": sizes,
            "seconds": args.seconds,
        }
        (folder / f"job{i}.json").write_text(json.dumps(job))
        paths = [str(folder / f"{name}{i}.json") for name in ("job", "turns")]
        words = [sys.executable, __file__, "--job", *paths]
        processes.append(subprocess.Popen(words, env={**os.environ, **SETTINGS}))
    for i, process in enumerate(processes):  # none starts while another is measured
        while not (folder / f"ready{i}").exists() and process.poll() is None:
            time.sleep(0.1)
    failed = 0
    for i, (cache, process) in enumerate(zip(args.caches, processes, strict=True)):
        (folder / f"turn{i}").touch()
        code = process.wait()
        failed += code != 0
        rows = [{"cache": cache, "error": f"exit code {code}"}]
        if code == 0:
            turns = [Turn(**turn) for turn in json.loads((folder / f"turns{i}.json").read_text())]
            rows = rows_of(cache, turns, args.rounds)
        write(rows, args, sizes)
    return 1 if failed else 0


def write(rows: list[dict[str, Any]], args: argparse.Namespace, sizes: dict[str, Any]) -> None:
    import torch

    from tightkv.tools.rows import append_rows, provenance

    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    if args.out is not None:
        memory = {"gpu_gib": args.gpu_gib, "host_gib": args.host_gib}
        model = {"model": args.shape, "layers": args.layers, "dtype": args.dtype}
        facts = provenance(torch.device(args.device))
        kind = {"bench": "agent replay", **model, **sizes, **memory}
        append_rows(args.out, [{**row, **kind, **facts} for row in rows])


if __name__ == "__main__":
    sys.exit(main())
