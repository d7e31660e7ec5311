"""One vLLM engine: its capacity, prefill and decode speed, as rows in a JSON-lines file.

    python -m tightkv.tools.bench.engine_worker job.json rows.jsonl

A process of its own, so that each engine finds the device as empty as the one before.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tightkv.config import PRESETS
from tightkv.tools.bench.serve import spread
from tightkv.tools.rows import append_rows, provenance

Row = dict[str, Any]
Prompt = list[int]

_STEPS = (37, 118, 251)  # by which new lengths are shorter


def rows(job: dict[str, Any]) -> Iterator[Row]:
    """Start the engine that `job` describes and measure; a row each."""
    import torch
    import vllm

    if job["kv"] in PRESETS:
        from tightkv.integrations.vllm import register

        register()  # vLLM finds the plugin itself only where tightkv is installed
    wait_for(Path(job["turn"]))
    started = time.perf_counter()
    engine = Engine(vllm.LLM(**job["arguments"]))
    facts = {
        "bench": "engine",
        "kv": job["kv"],
        "model": job["model_name"],
        "vllm": vllm.__version__,
        "start_s": round(time.perf_counter() - started, 2),
        "arguments": {k: v for k, v in job["arguments"].items() if k != "model"},
        "attention": engine.attention(),
        **provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }
    attention = facts["attention"]
    if job["kv"] in PRESETS and attention and not any("tightkv" in name for name in attention):
        raise RuntimeError(f"no layer took {job['kv']}: attention is {attention}")
    capacity = engine.capacity()
    yield {"measure": "capacity", **capacity, **facts}
    warm_up(engine, job["arguments"]["max_model_len"], capacity)
    for tokens in job["prefill"]:
        yield {**prefill(engine, tokens, job["repeats"], capacity), **facts}
        if job["new_lengths"]:
            yield {**new_lengths(engine, tokens, capacity), **facts}
    for batch, context in job["sizes"]:
        size = (batch, context, job["decode_tokens"])
        prompts = None
        if job["batch_prefill"]:
            row, prompts = batch_prefill(engine, *size, capacity)
            yield {**row, **facts}
        yield {**tpot(engine, *size, job["repeats"], capacity, prompts), **facts}
    if job["mixed"] is not None:
        yield {**mixed(engine, job["mixed"]), **facts}


def wait_for(turn: Path) -> None:
    """Another engine has the device; the process that measures makes this file next."""
    parent = os.getppid()
    while not turn.exists():
        time.sleep(0.05)
        if os.getppid() != parent:
            raise SystemExit("the process that measures has ended")


class Engine:
    """vllm.LLM, as far as it is needed here."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._config = llm.llm_engine.vllm_config
        self._random = random.Random(0)

    def attention(self) -> dict[str, int]:
        """How many layers have which attention; nothing where they are in other processes."""
        found: dict[str, int] = {}
        for layer in self._config.compilation_config.static_forward_context.values():
            if hasattr(layer, "impl"):
                kind = type(layer.impl)
                name = f"{kind.__module__}.{kind.__name__}"
                found[name] = found.get(name, 0) + 1
        return found

    def capacity(self) -> Row:
        """Tokens that fit; "reported" is the figure in vLLM's log, where it keeps that."""
        cache = self._config.cache_config
        return {
            "value": cache.num_gpu_blocks * cache.block_size,
            "unit": "tokens",
            "blocks": cache.num_gpu_blocks,
            "block_size": cache.block_size,
            "reported": getattr(cache, "kv_cache_size_tokens", None),
        }

    def prompts(self, batch: int, tokens: int) -> list[Prompt]:
        """Random tokens, never the same again, so that no prefix is in the cache."""
        words = range(3, self._config.model_config.get_vocab_size())
        return [self._random.choices(words, k=tokens) for _ in range(batch)]

    def seconds(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        """How long it takes to answer all prompts, each with `new_tokens` tokens."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(given, params, use_tqdm=False)
        taken = time.perf_counter() - start
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {new_tokens}:
            raise RuntimeError(f"asked for {new_tokens} tokens, got {sorted(counts)}")
        return taken

    def answer_all(self, prompts: Sequence[Prompt], answers: Sequence[int]) -> list[list[float]]:
        """Seconds from now to each token of each answer; all requests arrive now."""
        from vllm import SamplingParams

        core = self._llm.llm_engine
        start = time.perf_counter()
        for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
            params = SamplingParams(
                max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
            core.add_request(f"mixed-{number}", {"prompt_token_ids": prompt}, params)
        times: list[list[float]] = [[] for _ in prompts]
        while core.has_unfinished_requests():
            for output in core.step():
                # vLLM may add to the id
                of = times[int(output.request_id.split("-")[1])]
                more = len(output.outputs[0].token_ids) - len(of)
                of += [time.perf_counter() - start] * more
        counts = [len(of) for of in times]
        if counts != list(answers):
            raise RuntimeError(f"asked for {list(answers)} tokens, got {counts}")
        return times


def warm_up(engine: Any, max_tokens: int, capacity: Row) -> None:
    """A small batch that is not counted: what the first requests load and compile, in any engine.

    Two prompts of 512 tokens and a short one, as far as they fit.
    """
    answer = 4
    long = min(512, max_tokens - answer)
    if long < 1 or _too_much(3, long + answer, capacity):
        return
    prompts = [*engine.prompts(2, long), *engine.prompts(1, min(40, long))]
    engine.seconds(prompts, answer)


def prefill(engine: Any, tokens: int, repeats: int, capacity: Row) -> Row:
    """Tokens per second of one new prompt; a first one is not counted."""
    row: Row = {"measure": "prefill", "tokens": tokens, "unit": "tokens/s"}
    if reason := _too_much(1, tokens + 1, capacity):
        return {**row, "value": None, "left_out": reason}
    times = [engine.seconds(engine.prompts(1, tokens), 1) for _ in range(repeats + 1)][1:]
    return {**row, "value": tokens / statistics.median(times), "seconds": times}


def new_lengths(engine: Any, tokens: int, capacity: Row) -> Row:
    """Tokens per second of single prompts of lengths that the engine has not seen before."""
    row: Row = {"measure": "new_lengths", "tokens": tokens, "unit": "tokens/s"}
    if reason := _too_much(1, tokens + 1, capacity):
        return {**row, "value": None, "left_out": reason}
    lengths = [length for length in (tokens - step for step in _STEPS) if length > 0] or [tokens]
    times = [engine.seconds(engine.prompts(1, length), 1) for length in lengths]
    speeds = [length / taken for length, taken in zip(lengths, times, strict=True)]
    return {**row, "value": statistics.median(speeds), "seconds": times, "lengths": lengths}


def mixed(engine: Any, load: dict[str, Any]) -> Row:
    """Output tokens per second of requests that arrive at once, and the latencies of each.

    They need not fit: what waits and what is preempted is part of it.
    """
    choose = random.Random(1)
    sizes = [
        (choose.randint(*load["prompt"]), choose.randint(*load["answer"]))
        for _ in range(load["requests"])
    ]
    prompts = [engine.prompts(1, tokens)[0] for tokens, _ in sizes]
    times = engine.answer_all(prompts, [tokens for _, tokens in sizes])
    taken, output = max(of[-1] for of in times), sum(map(len, times))
    return {
        "measure": "mixed",
        "unit": "tokens/s",
        "value": output / taken,
        "seconds": [taken],
        "load": {**load, "prompt_tokens": sum(map(len, prompts)), "output_tokens": output},
        "ttft_ms": spread([of[0] for of in times]),
        "tpot_ms": spread([(of[-1] - of[0]) / (len(of) - 1) for of in times if len(of) > 1]),
    }


def batch_prefill(
    engine: Any, batch: int, context: int, new_tokens: int, capacity: Row
) -> tuple[Row, list[Prompt] | None]:
    """Tokens per second of a batch of new prompts, once; the prompts, which are then cached.

    `new_tokens`: what is to be measured with them next has to fit as well.
    """
    row: Row = {"measure": "prefill", "batch": batch, "tokens": context, "unit": "tokens/s"}
    if reason := _too_much(batch, context + new_tokens + 1, capacity):
        return {**row, "value": None, "left_out": reason}, None
    prompts = engine.prompts(batch, context)
    taken = engine.seconds(prompts, 1)
    return {**row, "value": batch * context / taken, "seconds": [taken]}, prompts


def tpot(
    engine: Any,
    batch: int,
    context: int,
    new_tokens: int,
    repeats: int,
    capacity: Row,
    prompts: list[Prompt] | None = None,
) -> Row:
    """Milliseconds of a decode step: what `new_tokens` more take, once the prompts are cached.

    `prompts` may be given where they are cached already.
    """
    row: Row = {
        "measure": "tpot",
        "batch": batch,
        "context": context,
        "decode_tokens": new_tokens,
        "unit": "ms",
    }
    if reason := _too_much(batch, context + new_tokens + 1, capacity):
        return {**row, "value": None, "left_out": reason}
    prompts = prompts or engine.prompts(batch, context)
    engine.seconds(prompts, new_tokens + 1)  # fills the prefix cache, compiles
    pairs = [
        (engine.seconds(prompts, 1), engine.seconds(prompts, new_tokens + 1))
        for _ in range(repeats)
    ]
    taken = statistics.median(many - one for one, many in pairs)
    return {**row, "value": taken / new_tokens * 1e3, "seconds": pairs}


def _too_much(batch: int, tokens: int, capacity: Row) -> str | None:
    """Requests that wait for each other's blocks would measure the scheduler."""
    needed = batch * -(-tokens // capacity["block_size"])
    if needed < capacity["blocks"]:  # one block is vLLM's own
        return None
    return f"{batch} x {tokens} tokens need {needed} blocks, the cache has {capacity['blocks']}"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for row in rows(job):
        append_rows(sys.argv[2], [row])


if __name__ == "__main__":
    main()
