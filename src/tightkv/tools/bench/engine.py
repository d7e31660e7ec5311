"""vLLM engines with different KV caches, one after another, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tightkv.config import PRESETS
from tightkv.tools.bench.engine_models import write_shape
from tightkv.tools.bench.loads import Load

Row = dict[str, Any]

OWN = "auto"  # vLLM's cache in the model's dtype: what the ratios are to
VLLM_CACHES = (
    OWN, "fp8", "nvfp4", "int4_per_token_head", "int8_per_token_head",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
)  # fmt: skip
CACHES = (*VLLM_CACHES, *PRESETS)
# Ragged loads stand beside equal ones that hold as many tokens.
SIZES = {
    device: tuple(map(Load.parse, sizes.split()))
    for device, sizes in {
        "cuda": "32x8k 32x6k-10k 128x2k 128x1k-3k 256x1k 256x512-1536 8x32k 1x32k",
        "cpu": "1x512 1x2k 8x512 8x256-768",
    }.items()
}
_POLL_SECONDS = 1.0
_MOST_MIXED = 256  # requests of a mixed load that run at a time, as vLLM's servers allow
_ROUND = 512  # a multiple of every block, so that no cache loses tokens to a half-used one
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class MixedLoad:
    """Requests that all arrive at once, of lengths between (and with) two bounds each."""

    requests: int
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"mixed requests: {self.requests}; there must be at least 1")
        for name in ("prompt", "answer"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"mixed {name} lengths {low}-{high}; give 1 <= LOW <= HIGH")


@dataclass(frozen=True)
class EnginePlan:
    """What is measured in every engine; what the engines share."""

    model: str | None = None
    shape: str | None = None
    """A name of `engine_models.SHAPES`, in place of a model: random weights."""
    sizes: Sequence[Load] = ()
    """Of each measurement of decoding."""
    prefill: Sequence[int] = ()
    new_lengths: bool = False
    """Measure the first prompt of a length as well, near each of `prefill`."""
    mixed: MixedLoad | None = None
    decode_tokens: int = 64
    repeats: int = 3
    device: str = "cpu"
    dtype: str | None = None
    kv_memory: int | None = None
    """Bytes for the KV cache; None leaves it to vLLM's own measurement of the memory."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise ValueError("give either a model or --shape")
        numbers = {"decode tokens": self.decode_tokens, "repeats": self.repeats}
        numbers |= {f"prefill of {tokens}": tokens for tokens in self.prefill}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name}: {number}; it must be at least 1")
        if not (self.sizes or self.prefill or self.mixed):
            raise ValueError(
                "nothing to measure: give a size (batch x context), a prefill or a mixed load"
            )


def engine_rows(
    plan: EnginePlan,
    caches: Sequence[str],
    log: Path | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Iterator[Row]:
    """Rows of every cache as they are measured, with ratios to vLLM's own where that is there.

    `progress` is told of each engine as it begins. An engine that fails gives a row with an
    "error" and ends neither the others nor the run.
    """
    for name in caches:
        if name not in CACHES:
            raise ValueError(f"KV cache {name!r}; supported: {', '.join(CACHES)}")
    own: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="tightkv-bench-") as folder, _Workers() as workers:
        names = sorted(dict.fromkeys(caches), key=lambda name: name != OWN)
        jobs = {name: _write_job(plan, name, Path(folder)) for name in names}
        for number, name in enumerate(names, start=1):
            progress(f"engine {number} of {len(names)}: {name}")
            workers.start(jobs[name])
            if plan.device == "cuda" and number < len(names):  # it imports vLLM, and waits
                workers.start(jobs[names[number]])
            for row in _run_engine(plan, jobs[name], workers, log):
                yield _with_ratio(row, own)


def what_is_measured(row: Mapping[str, Any]) -> str:
    """The same text for every cache."""
    if row["measure"] == "prefill":
        return f"prefill of {Load.of_row(row) if 'batch' in row else row['tokens']}, tokens/s"
    if row["measure"] == "new_lengths":
        return f"first prefill of a length near {row['tokens']}, tokens/s"
    if row["measure"] == "mixed":
        return f"{row['load']['requests']} mixed requests, tokens/s"
    if row["measure"] == "tpot":
        return f"TPOT {Load.of_row(row)}, ms"
    return "capacity, tokens"


def _with_ratio(row: Row, own: dict[str, Row]) -> Row:
    """The row with its ratios to vLLM's own: of the figure, and of single steps where it has them.

    `own`: vLLM's rows so far, by what is measured; this one joins them.
    """
    if row.get("value") is None:
        return row
    key = what_is_measured(row)
    if row["kv"] == OWN:
        own[key] = row
    theirs, found = _figures(own.get(key, {})), _figures(row)
    ratios = {name: found[name] / theirs[name] for name in found if theirs.get(name)}
    return {**row, "ratios": {**ratios, **row.get("ratios", {})}} if ratios else row


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    found = {"to auto": row.get("value")}
    for name in ("step", "host"):
        found[f"{name} to auto"] = (row.get(f"{name}_ms") or {}).get("p50")
    return {name: value for name, value in found.items() if value is not None}


def engine_arguments(plan: EnginePlan, name: str, model: str) -> dict[str, Any]:
    """Arguments of vllm.LLM; the same for every cache but for the cache."""
    batches = [load.batch for load in plan.sizes] or [1]
    lengths = [load.longest + plan.decode_tokens + 1 for load in plan.sizes]
    lengths += [tokens + 1 for tokens in plan.prefill]
    if plan.mixed is not None:
        most = min(_MOST_MIXED, plan.mixed.requests)
        batches += [most, *range(8, most, 8)]
        lengths.append(plan.mixed.prompt[1] + plan.mixed.answer[1])
    longest = max(lengths)
    ours = name in PRESETS
    arguments: dict[str, Any] = {
        "model": model,
        "load_format": "dummy" if plan.shape else "auto",
        "skip_tokenizer_init": True,
        "dtype": plan.dtype or ("bfloat16" if plan.device == "cuda" else "float32"),
        "kv_cache_dtype": OWN if ours else name,
        "max_model_len": -(-longest // _ROUND) * _ROUND,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": True,
    }
    if plan.device == "cuda":
        arguments["gpu_memory_utilization"] = 0.85
        arguments["max_num_batched_tokens"] = 16384
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({1, *batches}),
        }
    else:
        arguments["enforce_eager"] = True
    if plan.kv_memory is not None:
        arguments["kv_cache_memory_bytes"] = plan.kv_memory
    given = dict(plan.engine_args)
    # False: TIGHTKV_* variables must not compress what is compared with
    additional = {
        **given.pop("additional_config", {}),
        "tightkv": {"preset": name} if ours else False,
    }
    return {**arguments, **given, "additional_config": additional}


@dataclass(frozen=True)
class _Job:
    """The files of one engine's process, and what they are about."""

    kv: str
    model_name: str
    env: Mapping[str, str]
    job: Path
    rows: Path
    said: Path
    turn: Path
    """There when the process may use the device."""


def _write_job(plan: EnginePlan, name: str, folder: Path) -> _Job:
    if plan.shape is not None:
        model = str(write_shape(plan.shape, folder / plan.shape))
    else:
        model = str(plan.model)
    paths = [folder / f"{name}.{end}" for end in ("json", "jsonl", "txt", "turn")]
    written = _Job(name, str(plan.shape or plan.model), _environment(model), *paths)
    job = {
        **asdict(plan),
        "kv": name,
        "model_name": written.model_name,
        "arguments": engine_arguments(plan, name, model),
        "batch_prefill": plan.device == "cuda",  # minutes on a CPU
        "turn": str(written.turn),
    }
    written.job.write_text(json.dumps(job), encoding="utf-8")
    written.rows.touch()
    return written


class _Workers:
    """The processes of engines; leaving the block ends them."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()  # does nothing to one that has ended
            process.wait()

    def start(self, job: _Job) -> None:
        """Once each."""
        if job.kv in self._processes:
            return
        module = "tightkv.tools.bench.engine_worker"
        command = [sys.executable, "-m", module, str(job.job), str(job.rows)]
        with job.said.open("w", encoding="utf-8") as output:
            self._processes[job.kv] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(job.env),
            )

    def rows(self, job: _Job, timeout: float) -> Generator[Row, None, str | None]:
        """It is its turn: the rows as they come; then None, or why the process ended."""
        job.turn.touch()
        process, deadline = self._processes[job.kv], time.monotonic() + timeout
        with job.rows.open(encoding="utf-8") as rows:
            try:
                while process.poll() is None and time.monotonic() < deadline:
                    yield from _new_rows(rows)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL_SECONDS)
                late = process.poll() is None
            finally:
                process.kill()
                process.wait()
            yield from _new_rows(rows)
        if late:
            return f"not done after {timeout:g} seconds"
        if process.returncode == 0:
            return None
        return _why(process.returncode, job.said.read_text(encoding="utf-8", errors="replace"))


def _run_engine(plan: EnginePlan, job: _Job, workers: _Workers, log: Path | None) -> Iterator[Row]:
    error = yield from workers.rows(job, plan.timeout)
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(job.said.read_text(encoding="utf-8", errors="replace"))
    if error is not None:
        yield {"bench": "engine", "kv": job.kv, "model": job.model_name, "error": error}


def _environment(model: str) -> dict[str, str]:
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
    return {**_SETTINGS, **offline, **os.environ}


def _new_rows(file: TextIO) -> Iterator[Row]:
    """The rows that a file has gained; half a line is left for the next time."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return
        yield json.loads(line)


def _why(code: int, output: str) -> str:
    """What a process that failed said last: its exception, else its last line."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = (
            "; the processor lacks an instruction: try --dtype float32" if name == "SIGILL" else ""
        )
        return f"the engine was ended by {name}{hint}"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*:", line)]
    return (raised or lines or [f"exit code {code}"])[-1]
