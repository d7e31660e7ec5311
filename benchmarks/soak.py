"""Requests of all kinds against vLLM engines with a compressed cache, for as long as you like.

    python benchmarks/soak.py --minutes 60 --out rows.jsonl

The engines are vLLM's own, with a tiny random model and far too few blocks. Requests have mixed
lengths, share prefixes that push each other out of the cache, preempt each other, and some are
aborted. Every few minutes a worker is killed in the middle of its work and another engine takes
over. What must hold: answers are those of the same requests run alone; no block, ring, file
descriptor, process or shared memory is left behind; memory grows no more than that of an engine
with vLLM's own cache, which runs first where there is time. Exits with 1 where it does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
VOCABULARY, ROWS, SEQUENCES = 258, 8, 16
OPTIONS = {"page_size": 32, "exact_pages": 2, "exact_rows": ROWS}
CACHE_BYTES = {
    "k8v8": 340_000,
    "k4v4": 190_000,
    "own": 1_180_000,
}  # about 36 blocks: two of the longest sequences
PIECE = 240.0  # seconds of one engine
# Nats between the two best tokens up to which either is right: codes are read where a request
# alone reads exact tokens (after a prefix hit or a preemption, or without a ring).
TIES = {"k8v8": 0.05, "k4v4": 0.5, "own": math.inf}
LEAST_EQUAL = {"k8v8": 0.9, "k4v4": 0.4}
WAIT = 10.0  # seconds for Python's resource tracker to remove what an engine had
# KiB per request that memory may grow by: so much, or half more than with vLLM's own cache. Its
# engine on a CPU grows by about 7 KiB per request, none of it in objects of Python.
GROWTH = 12.0


@dataclass
class Answer:
    """Of one request alone: its tokens, and how far the second choice was at each, in nats."""

    tokens: list[int]
    gaps: list[float]


@dataclass
class Tally:
    """What one engine did."""

    rounds: int = 0
    finished: int = 0
    aborted: int = 0
    equal: int = 0
    tied: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    tokens: int = 0
    memory: list[float] = field(default_factory=list)
    """Resident MiB after each round."""
    descriptors: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def compare(self, name: str, told: list[int], alone: Answer, tie: float) -> None:
        """Of an aborted request, as far as it came."""
        pairs = zip(told, alone.tokens, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            self.equal += 1
        elif alone.gaps[at] < tie:
            self.tied += 1
        else:
            self.problems.append(f"{name}: token {at} differs, {alone.gaps[at]:.3f} nats apart")

    @property
    def growth(self) -> float:
        """KiB per request, between the first quarter of the rounds and the last one."""
        some = max(1, len(self.memory) // 4)
        grown = statistics.median(self.memory[-some:]) - statistics.median(self.memory[:some])
        return 1024 * grown / max(1, 0.75 * (self.finished + self.aborted))


def make_requests(count: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate); two of three begin with one of a few long prefixes."""
    choose = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [choose.randint(2, VOCABULARY - 1) for _ in range(number)]

    prefixes = [tokens(choose.randint(40, 260)) for _ in range(6)]
    return [
        (
            [*(choose.choice(prefixes) if i % 3 else []), *tokens(choose.randint(1, 120))],
            choose.choice((2, 10, 25, 50)),
        )
        for i in range(count)
    ]


def write_model(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_engine(folder: str, preset: str, **options: Any) -> Any:
    from vllm import LLM

    return LLM(
        model=folder,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=SEQUENCES,
        disable_log_stats=False,
        **({"block_size": 32} if preset == "own" else {}),
        additional_config={"tightkv": preset != "own" and {"preset": preset, **OPTIONS}},
        **options,
    ).llm_engine


def run_alone(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every request without company and without a cached prefix."""
    from vllm import SamplingParams

    options = {"enable_prefix_caching": False, "kv_cache_memory_bytes": 4 << 20}
    engine, found = make_engine(job["model"], job["preset"], **options), []
    for i, (prompt, count) in enumerate(job["requests"]):
        params = SamplingParams(
            temperature=0, max_tokens=count, logprobs=2, ignore_eos=True, detokenize=False
        )
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            told = engine.step()
        (output,) = told[0].outputs
        best = [
            sorted((e.logprob for e in step.values()), reverse=True) for step in output.logprobs
        ]
        found.append(asdict(Answer(list(output.token_ids), [x[0] - x[1] for x in best])))
    return found


class Soak:
    """One engine under load."""

    def __init__(self, job: dict[str, Any], **options: Any) -> None:
        size = CACHE_BYTES[job["preset"]]
        self.engine = make_engine(
            job["model"], job["preset"], kv_cache_memory_bytes=size, **options
        )
        self.most_growth = job.get("most_growth", math.inf)
        self.core = self.engine.engine_core.engine_core
        self.requests, self.tie = job["requests"], TIES[job["preset"]]
        self.alone = [Answer(**answer) for answer in job["alone"]]
        self.choose, self.tally = random.Random(job["seed"]), Tally()
        self.running: dict[str, int] = {}
        self.told: dict[str, list[int]] = {}
        self.sent = 0

    def add(self, which: int, count: int | None = None) -> None:
        from vllm import SamplingParams

        prompt, most = self.requests[which]
        params = SamplingParams(
            temperature=0, max_tokens=count or most, ignore_eos=True, detokenize=False
        )
        name, self.sent = str(self.sent), self.sent + 1
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        self.running[name], self.told[name] = which, []

    def step(self) -> None:
        for request in self.engine.step():
            name = request.request_id
            self.told[name] = list(request.outputs[0].token_ids)
            if request.finished and name in self.running:
                self.close(name)
                self.tally.finished += 1

    def close(self, name: str) -> None:
        told = self.told.pop(name)
        self.tally.tokens += len(told)
        self.tally.compare(name, told, self.alone[self.running.pop(name)], self.tie)

    def round(self) -> None:
        """A crowd, a few at a time or one by one, until the last request is done."""
        at_once, left = ((3 * SEQUENCES, 40), (4, 16), (1, 6))[self.tally.rounds % 3]
        aborts = 0.0 if at_once == 1 else self.choose.choice((0.01, 0.05))
        while left or self.running:
            while left and len(self.running) < at_once:
                self.add(self.choose.randrange(len(self.requests)))
                left -= 1
            if self.choose.random() < aborts:
                name = self.choose.choice(list(self.running))
                self.engine.abort_request([name])
                self.close(name)
                self.tally.aborted += 1
            self.step()
        self.check_idle()

    def check_idle(self) -> None:
        tally, pool = self.tally, self.core.scheduler.kv_cache_manager.block_pool
        blocks = self.core.vllm_config.cache_config.num_gpu_blocks
        if pool.get_num_free_blocks() != blocks - 1:  # block 0 is nobody's
            tally.problems.append(f"{blocks - 1 - pool.get_num_free_blocks()} blocks are leaked")
        if self.engine.engine_core.engine_core.scheduler.requests:
            tally.problems.append("the scheduler still has requests")
        tally.rounds += 1
        tally.memory.append(resident_mib())
        tally.descriptors.append(len(os.listdir("/proc/self/fd")))

    def check_rings(self) -> None:
        """As many sequences as there are rings: each has one."""
        short = sorted(range(len(self.requests)), key=lambda i: len(self.requests[i][0]))[:ROWS]
        for which in short:
            self.add(which, 3)
        used = 0
        while self.running:
            self.step()
            table = ring_table(self.core)
            used = max(used, int((table.used_at[:ROWS] == table.steps - 1).sum()))
        if used != ROWS:
            self.tally.problems.append(f"{used} of {ROWS} rings are used by {ROWS} sequences")

    def finish(self) -> Tally:
        counters = {m.name: m.value for m in self.engine.get_metrics() if hasattr(m, "value")}
        tally = self.tally
        tally.preemptions = counters["vllm:num_preemptions"]
        tally.prefix_hits = counters["vllm:prefix_cache_hits"]
        if tally.growth > self.most_growth:
            tally.problems.append(f"memory grew by {tally.growth:.1f} KiB per request")
        if tally.descriptors[-1] > tally.descriptors[0]:
            tally.problems.append(
                f"{tally.descriptors[0]} file descriptors became {tally.descriptors[-1]}"
            )
        return tally


def resident_mib() -> float:
    """Without pages of files, which come and go as other processes need memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("RssAnon")]
    return kib / 1024


def ring_table(core: Any) -> Any:
    """The RingTable of an engine in this process."""
    layers = core.vllm_config.compilation_config.static_forward_context.values()
    (group,) = {layer.impl.group_rings for layer in layers}
    return group.table


def run_piece(job: dict[str, Any]) -> dict[str, Any]:
    soak, end = Soak(job), time.monotonic() + job["seconds"]
    while not soak.tally.rounds or time.monotonic() < end:
        soak.round()
    if job["preset"] != "own":
        soak.check_rings()
    return asdict(soak.finish())


def run_killed(job: dict[str, Any]) -> dict[str, Any]:
    """An engine whose worker is a process of its own, which is killed while requests run."""
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    soak = Soak(job, distributed_executor_backend="mp")
    for which in range(len(soak.requests)):
        soak.add(which)
    for _ in range(5):
        soak.step()
    (worker,) = soak.core.model_executor.workers
    told: dict[str, Any] = {"worker": worker.proc.pid, "shared": sorted(shared_memory())}
    os.kill(worker.proc.pid, signal.SIGKILL)
    began = time.monotonic()
    try:
        while soak.running:
            soak.step()
    except Exception as error:  # whatever vLLM raises
        told["error"] = f"{type(error).__name__}: {error}"
    return {**told, "seconds": time.monotonic() - began}


def shared_memory() -> set[str]:
    """Files of /dev/shm that this process uses."""
    words = Path("/proc/self/maps").read_text().split()
    return {word for word in words if word.startswith("/dev/shm/")}


def problems_of_kill(told: dict[str, Any]) -> Iterator[str]:
    if "error" not in told:
        yield f"a killed worker was not noticed: {told}"
        return
    if told["seconds"] > 60:
        yield f"a killed worker was noticed after {told['seconds']:.0f} s"
    had = [Path("/proc") / str(told["worker"]), *map(Path, told["shared"])]
    end = time.monotonic() + WAIT
    while (left := [str(path) for path in had if path.exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    if left:
        yield f"a killed worker leaves {', '.join(left)}"


def in_a_process(run: Any, job: dict[str, Any]) -> Any:
    """In a fork of this one, which has imported vLLM."""
    place = Path(job["folder"]) / "told.json"
    place.unlink(missing_ok=True)

    def work() -> None:
        gc.freeze()  # engines collect garbage; that of imports is nobody's
        gc.unfreeze = lambda: None
        place.write_text(json.dumps(run(job)))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    if not place.exists():
        raise SystemExit(f"an engine ended with code {process.exitcode}")
    return json.loads(place.read_text())


def import_engine() -> None:
    import vllm.entrypoints.llm
    import vllm.model_executor.models.llama
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    registry._run_in_subprocess = lambda look: look()  # model classes are looked at here, too
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = lambda *_: None


def summary(preset: str, pieces: list[dict[str, Any]], own: float | None) -> dict[str, Any]:
    def total(name: str) -> Any:
        return sum(piece[name] for piece in pieces)

    tallies = [Tally(**piece) for piece in pieces]
    return {
        "preset": preset,
        "engines": len(pieces),
        "killed_workers": len(pieces),
        **{name: total(name) for name in ("rounds", "finished", "aborted", "tokens")},
        **{name: total(name) for name in ("equal", "tied", "preemptions", "prefix_hits")},
        "memory_mib": [round(piece["memory"][-1], 1) for piece in pieces],
        "growth_kib_per_request": [round(tally.growth, 1) for tally in tallies],
        "growth_with_vllms_own_cache": None if own is None else round(own, 1),
        "descriptors": [[piece["descriptors"][i] for i in (0, -1)] for piece in pieces],
    }


def run(minutes: float, preset: str, requests: int, seed: int = 0) -> dict[str, Any]:
    """The row of a soak; its "problems" is empty where all is well."""
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # the engines' files with metrics, too
        try:
            row = _run(minutes, preset, requests, seed, folder)
        finally:
            tempfile.tempdir = None
        row["problems"] += [f"{path.name} is left" for path in Path(folder).glob("tightkv-*/*")]
    return row


def _run(minutes: float, preset: str, requests: int, seed: int, folder: str) -> dict[str, Any]:
    write_model(Path(folder) / "model")
    job: dict[str, Any] = {
        "folder": folder,
        "model": str(Path(folder) / "model"),
        "preset": preset,
        "requests": make_requests(requests, seed),
    }
    job["alone"] = in_a_process(run_alone, job)
    pieces: list[dict[str, Any]] = []
    problems: list[str] = []
    left, own = 60 * minutes, None
    if left >= 2 * PIECE:  # less says nothing of memory
        control = {**job, "preset": "own", "seconds": PIECE, "seed": seed}
        own = Tally(**in_a_process(run_piece, control)).growth
        job["most_growth"] = max(GROWTH, 1.5 * own)
        left -= PIECE
    while left > 0:
        job["seconds"], job["seed"] = min(left, PIECE), seed + len(pieces)
        problems += problems_of_kill(in_a_process(run_killed, job))
        pieces.append(in_a_process(run_piece, job))
        problems += pieces[-1]["problems"]
        left -= job["seconds"]
    row = summary(preset, pieces, own)
    for name in ("preemptions", "prefix_hits", "aborted"):
        if not row[name]:
            problems.append(f"no {name}: the load was too light to tell anything")
    if row["equal"] < LEAST_EQUAL[preset] * (row["equal"] + row["tied"]):
        problems.append(f"{row['tied']} answers differ at a tie, {row['equal']} are equal")
    return {**row, "problems": problems}


def provenance() -> dict[str, Any]:
    import torch
    import vllm

    from tightkv.tools.rows import provenance

    return {"vllm": vllm.__version__, **provenance(torch.device("cpu"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="under load; 60")
    parser.add_argument("--preset", choices=tuple(LEAST_EQUAL), default="k8v8")
    parser.add_argument("--requests", type=int, default=60, help="different ones; 60")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="appends a row to this file")
    args = parser.parse_args()
    if args.requests < ROWS or args.minutes <= 0:
        parser.error(f"at least {ROWS} requests, and more than 0 minutes")
    os.environ.update({**SETTINGS, **os.environ})
    import_engine()
    row = {**run(args.minutes, args.preset, args.requests, args.seed), **provenance()}
    sys.stdout.write(json.dumps(row) + "\n")
    if args.out is not None:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 1 if row["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
