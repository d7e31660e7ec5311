"""Running OpenAI-compatible servers under the same load: throughput, latencies, preemptions."""

from __future__ import annotations

import http.client
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tightkv.tools.bench.openai_client import Answer, Server, ServerError, metric
from tightkv.tools.bench.timing import milliseconds
from tightkv.tools.rows import provenance

Row = dict[str, Any]
# Called with a title and a number of steps; the bar is told of each step.
Bars = Callable[[str, int], AbstractContextManager[Any]]

PREEMPTIONS = "vllm:num_preemptions"
_FAILURES = (OSError, http.client.HTTPException, ServerError)
_TOKENS = range(10, 250)  # valid in every vocabulary


@dataclass(frozen=True)
class Load:
    """`requests` completions, `concurrency` of them at a time, for at most `seconds`."""

    requests: int = 64
    concurrency: int = 16
    prompt_tokens: int = 512
    output_tokens: int = 128
    seconds: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "concurrency", "prompt_tokens", "output_tokens", "seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}; it must be more than 0")


def serve_rows(
    servers: Sequence[Server], load: Load, model: str | None, bars: Bars
) -> Iterator[Row]:
    """A row for each server, one server after another, with ratios to the first.

    All are asked for their model before the first is measured: a dead one ends it at once.
    """
    names = [server.name for server in servers]
    if len(set(names)) != len(names):
        raise ValueError(f"servers {', '.join(names)}; give each another name: NAME=URL")
    models = [_served_model(server, model) for server in servers]
    facts = provenance(torch.device("cpu"))
    first: Row | None = None
    for server, name in zip(servers, models, strict=True):
        title = f"{server.name}: requests"
        with bars(title, load.requests) as bar:
            row = {**_measure(server, name, load, bar.advance), "client": facts}
        first = first or row
        yield {**row, "ratios": _ratios(row, first)}


def _served_model(server: Server, wanted: str | None) -> str:
    try:
        served = server.models()
    except _FAILURES as error:
        raise ValueError(
            f"no OpenAI-compatible server answers at {server.url} ({error}); "
            "start one: tightkv serve MODEL --port PORT"
        ) from None
    if wanted is not None and wanted not in served:
        raise ValueError(f"model {wanted!r} at {server.url}; it serves: {', '.join(served)}")
    if not served:
        raise ValueError(f"{server.url} serves no model")
    return wanted or served[0]


def _measure(server: Server, model: str, load: Load, advance: Callable[[], object]) -> Row:
    bodies = _bodies(model, load)
    warm_up = {**bodies[-1], "max_tokens": 2}
    _request(server, warm_up, time.perf_counter() + load.seconds)
    before = _preemptions(server)
    start = time.perf_counter()
    deadline = start + load.seconds
    with ThreadPoolExecutor(load.concurrency) as clients:
        done = []
        for result in clients.map(lambda body: _request(server, body, deadline), bodies[:-1]):
            done.append(result)
            advance()
    seconds = time.perf_counter() - start
    after = _preemptions(server)
    return {
        "bench": "serve",
        "server": server.name,
        "url": server.url,
        "model": model,
        "load": asdict(load),
        **summary(done, seconds),
        "preemptions": None if before is None or after is None else int(after - before),
    }


def _bodies(model: str, load: Load) -> list[dict[str, Any]]:
    """One more than is measured; no two prompts share a prefix that matters."""
    choose = random.Random(load.seed)
    return [
        {
            "model": model,
            "prompt": choose.choices(_TOKENS, k=load.prompt_tokens),
            "max_tokens": load.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(load.requests + 1)
    ]


def _request(server: Server, body: dict[str, Any], deadline: float) -> Answer | str:
    """The answer, or why there is none; "" for lack of time."""
    if time.perf_counter() > deadline:
        return ""
    try:
        return server.complete(body, deadline)
    except TimeoutError:
        return ""
    except _FAILURES as error:
        return str(error) or type(error).__name__


def _preemptions(server: Server) -> float | None:
    try:
        return metric(server.get("/metrics"), PREEMPTIONS)
    except _FAILURES:
        return None


def summary(done: Sequence[Answer | str], seconds: float) -> Row:
    """What requests took, in all and each."""
    answers = [answer for answer in done if isinstance(answer, Answer)]
    errors = [error for error in done if isinstance(error, str) and error]
    output = sum(answer.tokens for answer in answers)
    prompt = [a.prompt_tokens for a in answers if a.prompt_tokens is not None]
    between = [a.per_token for a in answers if a.per_token is not None]
    return {
        "completed": len(answers),
        "failed": len(errors),
        "out_of_time": len(done) - len(answers) - len(errors),
        "first_error": errors[0] if errors else None,
        "seconds": seconds,
        "prompt_tokens": sum(prompt) if len(prompt) == len(answers) else None,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "requests_per_s": len(answers) / seconds,
        "ttft_ms": milliseconds([answer.first for answer in answers]),
        "tpot_ms": milliseconds(between),
    }


def _ratios(row: Row, first: Row) -> dict[str, float]:
    """To the first server: throughput, and medians of both latencies."""
    found = {}
    if first["output_tokens"] and row["output_tokens"]:
        found["throughput"] = row["output_tokens_per_s"] / first["output_tokens_per_s"]
    for name in ("ttft", "tpot"):
        mine, other = row[f"{name}_ms"], first[f"{name}_ms"]
        if mine and other and other["p50"]:
            found[name] = mine["p50"] / other["p50"]
    return found
