"""Runs vLLM engines in a process of their own and compares what they say."""

from __future__ import annotations

import functools
import json
import math
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).with_name("vllm_engine.py")
VOCABULARY = 258  # of write_tiny_folder
TIE = 2e-3  # nats: which of two such tokens comes first is rounding


def random_tokens(choose: random.Random, count: int) -> list[int]:
    return [choose.randint(2, VOCABULARY - 1) for _ in range(count)]


def write_jobs(jobs: dict[str, dict[str, Any]], models: dict[str, Path], folder: Path) -> list[str]:
    """The files that vllm_engine.py reads and writes."""
    jobs = json.loads(json.dumps(jobs))  # some share a dictionary
    for engine in (entry["engine"] for entry in jobs.values() if "engine" in entry):
        for models_of in (engine, engine.get("speculative_config", {})):
            if "model" in models_of:
                models_of["model"] = str(models[models_of["model"]])
    names = ("jobs.json", "results.json", "log.txt")
    (folder / names[0]).write_text(json.dumps(jobs))
    return [str(folder / name) for name in names]


@functools.cache
def _engine_server() -> subprocess.Popen[str]:
    """Until this process ends; files whose tests ask for engines share a worker (workers.py)."""
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, str(ENGINE)], text=True, stdin=pipe, stdout=pipe)


class Engines(dict[str, dict[str, Any]]):
    """Results of jobs of vllm_engine.py, each run when a test first asks for it.

    "log" in a result is what the engine printed. Every engine has to leave its blocks free.
    """

    def __init__(
        self, jobs: dict[str, dict[str, Any]], models: dict[str, Path], folder: Path
    ) -> None:
        self.jobs, self.models, self.folder = jobs, models, folder

    def __missing__(self, name: str) -> dict[str, Any]:
        names = [name]
        if "taken_over" in self.jobs[name]:  # the engine that hands over goes first, and stays
            source = self.jobs[name]["taken_over"][0]
            names = [x for x, job in self.jobs.items() if job.get("hands_over") == source] + names
        self[name] = told = self.run({x: self.jobs[x] for x in names})[name]
        if "blocks" in told:
            assert told["free_blocks"] == told["blocks"] - 1, name  # block 0 is nobody's
        return told

    def run(self, jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        server, files = _engine_server(), write_jobs(jobs, self.models, self.folder)
        assert server.stdin is not None and server.stdout is not None
        print(json.dumps(files), file=server.stdin, flush=True)
        answer, log = server.stdout.readline(), Path(files[2])
        said = log.read_text() if log.exists() else "vLLM was not imported"
        assert answer == "done\n", said[-4000:]
        return {
            name: {**told, "log": said}
            for name, told in json.loads(Path(files[1]).read_text()).items()
        }


def run_engines_apart(
    jobs: dict[str, dict[str, Any]], models: dict[str, Path], folder: Path, at_once: int
) -> dict[str, dict[str, Any]]:
    """The same, every job in a process of its own: vLLM captures CUDA graphs once a process."""

    def run(name: str) -> dict[str, Any]:
        place = folder / "engines" / name.replace(" ", "_")  # models are in `folder`, too
        place.mkdir(parents=True)
        try:
            files = write_jobs({name: jobs[name]}, models, place)
            subprocess.run([sys.executable, str(ENGINE), *files], check=True)
            found: dict[str, Any] = json.loads(Path(files[1]).read_text())[name]
            return found
        except subprocess.CalledProcessError:  # of this one; the others' tests can still run
            return {"error": Path(files[2]).read_text()[-4000:]}

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


def outputs(result: dict[str, Any]) -> list[dict[str, Any]]:
    assert "error" not in result, result
    return [output for batch in result["outputs"] for output in batch]


def batches(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each batch of a result as a result of its own."""
    assert "error" not in result, result
    return [{"outputs": [batch]} for batch in result["outputs"]]


def assert_same_text(
    one: dict[str, Any], two: dict[str, Any], tie: float = TIE, share: float = 0.9
) -> None:
    """Equal tokens, but for choices between two that one engine finds equally good."""
    pairs = list(zip(outputs(one), outputs(two), strict=True))
    exact = 0
    for a, b in pairs:
        at = first_difference(a["tokens"], b["tokens"])
        exact += at is None
        if at is not None:
            (_, best), (_, second) = a["best"][at][:2]
            assert best - second < tie, (at, a["tokens"], b["tokens"], a["best"][at][:2])
    assert exact >= share * len(pairs)


def first_difference(a: list[int], b: list[int]) -> int | None:
    assert len(a) == len(b)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def mean_kl(one: dict[str, Any], two: dict[str, Any], part: str) -> float:
    """Of two's next-token distributions from one's; of generated text where it is the same."""
    terms = []
    for a, b in zip(outputs(one), outputs(two), strict=True):
        agree = first_difference(a["tokens"], b["tokens"])
        end = None if part == "prompt" else (len(a["tokens"]) if agree is None else agree + 1)
        for p, q in list(zip(a[part], b[part], strict=True))[:end]:
            other = dict(q)
            assert len(p) == len(other) == VOCABULARY
            terms.append(sum(math.exp(lp) * (lp - other[token]) for token, lp in p))
    assert len(terms) > 20, len(terms)
    return sum(terms) / len(terms)
