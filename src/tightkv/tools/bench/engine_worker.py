"""One vLLM engine in a process of its own: its capacity, prefill and decode speed, as rows.

Each engine finds the device as empty as the one before.
"""

import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tightkv.tools.bench.engine_plan import EnginePlan, MixedLoad, engine_arguments, options_of
from tightkv.tools.bench.loads import Load
from tightkv.tools.bench.timing import milliseconds
from tightkv.tools.rows import provenance

Row = dict[str, Any]
Prompt = list[int]

_STEPS = (37, 118, 251)  # by which new lengths are shorter
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def run(plan: EnginePlan, kv: str, model: str, pipe: Connection, said: Path) -> None:
    """The process: imports vLLM, waits for its turn, then sends rows; output goes to a file."""
    with said.open("wb") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
    for name, value in {**_SETTINGS, **offline}.items():
        os.environ.setdefault(name, value)
    import vllm

    ours = options_of(kv) is not None
    if ours:
        from tightkv.integrations.vllm import register

        register()  # vLLM finds the plugin itself only where tightkv is installed
    arguments = engine_arguments(plan, kv, model)
    pipe.recv()
    started = time.perf_counter()
    engine = Engine(vllm.LLM(**arguments))
    facts = {
        "bench": "engine",
        "kv": kv,
        "model": plan.name,
        "vllm": vllm.__version__,
        "start_s": round(time.perf_counter() - started, 2),
        "arguments": {name: value for name, value in arguments.items() if name != "model"},
        "attention": engine.attention,
        "async_scheduling": engine.asynchronous,
        **provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }
    if ours and engine.attention and not any("tightkv" in x for x in engine.attention):
        raise RuntimeError(f"no layer took {kv}: attention is {engine.attention}")
    pipe.send({"measure": "capacity", **engine.capacity, **facts})
    warm_up(engine, arguments["max_model_len"])
    for row in rows(engine, plan):
        pipe.send({**row, **facts})


def rows(engine: Any, plan: EnginePlan) -> Iterator[Row]:
    for tokens in plan.prefill:
        yield prefill(engine, tokens, plan.repeats)
        if plan.new_lengths:
            yield new_lengths(engine, tokens)
    for load in plan.sizes:
        prompts = None
        if plan.on_gpu:  # minutes on a CPU
            row, prompts = batch_prefill(engine, load, plan.decode_tokens)
            yield row
        yield tpot(engine, load, plan.decode_tokens, plan.repeats, prompts)
    if plan.mixed is not None:
        yield mixed(engine, plan.mixed)


@dataclass(frozen=True)
class Step:
    """A decode step with the device idle before it and after it."""

    seconds: float
    host_seconds: float | None
    """Until all is launched; None where the host waits for the results in the same step."""
    lengths: Sequence[int]  # tokens of each sequence, with those that it computes


class Engine:
    """vllm.LLM, as far as it is needed here."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._config = llm.llm_engine.vllm_config
        self._random = random.Random(0)

    @property
    def attention(self) -> dict[str, int]:
        """How many layers have which attention; nothing where they are in other processes."""
        layers = self._config.compilation_config.static_forward_context.values()
        kinds = [type(layer.impl) for layer in layers if hasattr(layer, "impl")]
        return dict(Counter(f"{kind.__module__}.{kind.__name__}" for kind in kinds))

    @property
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

    @property
    def asynchronous(self) -> bool:
        """Whether the next step is scheduled and launched while the device is at one."""
        return bool(getattr(self._config.scheduler_config, "async_scheduling", False))

    def prompts(self, lengths: Sequence[int]) -> list[Prompt]:
        """Random tokens, never the same again, so that no prefix is in the cache."""
        words = range(3, self._config.model_config.get_vocab_size())
        return [self._random.choices(words, k=tokens) for tokens in lengths]

    def seconds(self, prompts: Sequence[Prompt], new_tokens: int) -> float:
        """How long it takes to answer all prompts, each with `new_tokens` tokens."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(given, _exactly(new_tokens), use_tqdm=False)
        taken = time.perf_counter() - start
        counts = {len(output.outputs[0].token_ids) for output in outputs}
        if counts != {new_tokens}:
            raise RuntimeError(f"asked for {new_tokens} tokens, got {sorted(counts)}")
        return taken

    def steps(self, prompts: Sequence[Prompt], new_tokens: int) -> list[Step]:
        """Single steps with a synchronization around each, those in which all sequences decode.

        Nothing where the engine or its device is in another process.
        """
        core = self._llm.llm_engine
        inside = getattr(core.engine_core, "engine_core", None)
        if inside is None or self._config.parallel_config.world_size > 1:
            return []
        on_gpu = torch.cuda.is_available()
        synchronize = torch.cuda.synchronize if on_gpu else lambda: None
        scheduler, schedule = inside.scheduler, inside.scheduler.schedule
        scheduled: list[tuple[Sequence[int], Sequence[int]]] = []  # new tokens, all tokens

        def noted(*args: Any, **options: Any) -> Any:
            output = schedule(*args, **options)
            new = output.num_scheduled_tokens
            lengths = [scheduler.requests[name].num_computed_tokens for name in new]
            scheduled.append((list(new.values()), lengths))
            return output

        found = []
        scheduler.schedule = noted
        try:
            self._add(prompts, [new_tokens] * len(prompts), "FINAL_ONLY")  # as LLM.generate
            while core.has_unfinished_requests():
                scheduled.clear()
                synchronize()
                start = time.perf_counter()
                core.step()
                launched = time.perf_counter()
                synchronize()
                end = time.perf_counter()
                for new, lengths in scheduled:
                    if len(new) == len(prompts) and set(new) == {1}:
                        host = launched - start if on_gpu and self.asynchronous else None
                        found.append(Step(end - start, host, lengths))
        finally:
            scheduler.schedule = schedule
        return found

    def answer_all(self, prompts: Sequence[Prompt], answers: Sequence[int]) -> list[list[float]]:
        """Seconds from now to each token of each answer; all requests arrive now."""
        core = self._llm.llm_engine
        start = time.perf_counter()
        self._add(prompts, answers, "DELTA")  # as for a stream
        times: list[list[float]] = [[] for _ in prompts]
        while core.has_unfinished_requests():
            for output in core.step():
                # vLLM may add to the id
                of = times[int(output.request_id.split("-")[1])]
                of += [time.perf_counter() - start] * len(output.outputs[0].token_ids)
        counts = [len(of) for of in times]
        if counts != list(answers):
            raise RuntimeError(f"asked for {list(answers)} tokens, got {counts}")
        return times

    def _add(self, prompts: Sequence[Prompt], answers: Sequence[int], kind: str) -> None:
        for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
            given = {"prompt_token_ids": prompt}
            self._llm.llm_engine.add_request(f"all-{number}", given, _exactly(tokens, kind))


def _exactly(tokens: int, kind: str = "CUMULATIVE") -> Any:
    """vLLM's parameters of an answer of so many tokens, and which outputs there are of it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind[kind],
    )  # fmt: skip


def warm_up(engine: Any, max_tokens: int) -> None:
    """A small batch that is not counted: what the first requests load and compile, in any engine.

    Two prompts of 512 tokens and a short one, as far as they fit.
    """
    answer = 4
    long = min(512, max_tokens - answer)
    if long >= 1 and not _left_out(engine, Load.equal(3, long + answer)):
        engine.seconds(engine.prompts([long, long, min(40, long)]), answer)


def prefill(engine: Any, tokens: int, repeats: int) -> Row:
    """Tokens per second of one new prompt; a first one is not counted."""
    row: Row = {"measure": "prefill", "tokens": tokens, "unit": "tokens/s"}
    if left_out := _left_out(engine, Load.equal(1, tokens + 1)):
        return {**row, **left_out}
    times = [engine.seconds(engine.prompts([tokens]), 1) for _ in range(repeats + 1)][1:]
    return {**row, "value": tokens / statistics.median(times), "seconds": times}


def new_lengths(engine: Any, tokens: int) -> Row:
    """Tokens per second of single prompts of lengths that the engine has not seen before."""
    row: Row = {"measure": "new_lengths", "tokens": tokens, "unit": "tokens/s"}
    if left_out := _left_out(engine, Load.equal(1, tokens + 1)):
        return {**row, **left_out}
    lengths = [length for length in (tokens - step for step in _STEPS) if length > 0] or [tokens]
    times = [engine.seconds(engine.prompts([length]), 1) for length in lengths]
    speeds = [length / taken for length, taken in zip(lengths, times, strict=True)]
    return {**row, "value": statistics.median(speeds), "seconds": times, "lengths": lengths}


def mixed(engine: Any, load: MixedLoad) -> Row:
    """Output tokens per second of requests that arrive at once, and the latencies of each.

    They need not fit: what waits and what is preempted is part of it.
    """
    choose = random.Random(1)
    sizes = [
        (choose.randint(*load.prompt), choose.randint(*load.answer)) for _ in range(load.requests)
    ]
    prompts = engine.prompts([tokens for tokens, _ in sizes])
    times = engine.answer_all(prompts, [tokens for _, tokens in sizes])
    taken, output = max(of[-1] for of in times), sum(map(len, times))
    return {
        "measure": "mixed",
        "unit": "tokens/s",
        "value": output / taken,
        "seconds": [taken],
        "load": {**asdict(load), "prompt_tokens": sum(map(len, prompts)), "output_tokens": output},
        "ttft_ms": milliseconds([of[0] for of in times]),
        "tpot_ms": milliseconds([(of[-1] - of[0]) / (len(of) - 1) for of in times if len(of) > 1]),
    }


def batch_prefill(engine: Any, load: Load, new_tokens: int) -> tuple[Row, list[Prompt] | None]:
    """Tokens per second of a batch of new prompts, once; the prompts, which are then cached.

    `new_tokens`: what is to be measured with them next has to fit as well.
    """
    row: Row = {"measure": "prefill", "batch": load.batch, "tokens": load.context, **load.fields}
    row["unit"] = "tokens/s"
    if left_out := _left_out(engine, load.longer(new_tokens + 1)):
        return {**row, **left_out}, None
    prompts = engine.prompts(load.lengths)
    taken = engine.seconds(prompts, 1)
    return {**row, "value": sum(load.lengths) / taken, "seconds": [taken]}, prompts


def tpot(
    engine: Any, load: Load, new_tokens: int, repeats: int, prompts: list[Prompt] | None = None
) -> Row:
    """Milliseconds of a decode step: what `new_tokens` more take, once the prompts are cached.

    This is as served, where the host works ahead; single synchronized steps are measured after it.
    `prompts` may be given where they are cached already.
    """
    row: Row = {"measure": "tpot", "batch": load.batch, "context": load.context, **load.fields}
    row |= {"decode_tokens": new_tokens, "unit": "ms"}
    if left_out := _left_out(engine, load.longer(new_tokens + 1)):
        return {**row, **left_out}
    prompts = prompts or engine.prompts(load.lengths)
    engine.seconds(prompts, new_tokens + 1)  # fills the prefix cache, compiles
    pairs = [
        (engine.seconds(prompts, 1), engine.seconds(prompts, new_tokens + 1))
        for _ in range(repeats)
    ]
    taken = statistics.median(many - one for one, many in pairs)
    row |= {"value": taken / new_tokens * 1e3, "seconds": pairs}
    steps = [step for _ in range(repeats) for step in engine.steps(prompts, new_tokens + 1)]
    return {**row, **single_steps(steps, engine.capacity["block_size"])}


def single_steps(steps: Sequence[Step], page: int) -> Row:
    """What synchronized steps took, in all and those that complete pages apart from the others."""
    if not steps:
        return {}
    by_end: dict[bool, list[float]] = {True: [], False: []}
    for step in steps:
        by_end[any(length % page == 0 for length in step.lengths)].append(step.seconds)
    whole = milliseconds([step.seconds for step in steps])
    completing, others = milliseconds(by_end[True]), milliseconds(by_end[False])
    assert whole is not None
    ratios = {"p99 to p50 of steps": whole["p99"] / whole["p50"]}
    if completing and others:
        ratios["steps that complete pages to others"] = completing["p50"] / others["p50"]
    return {
        "steps": len(steps),
        "steps_completing": len(by_end[True]),
        "step_ms": whole,
        "host_ms": milliseconds([s.host_seconds for s in steps if s.host_seconds is not None]),
        "completing_ms": completing,
        "not_completing_ms": others,
        "ratios": ratios,
    }


def _left_out(engine: Any, load: Load) -> Row:
    """Of a row: requests that wait for each other's blocks would measure the scheduler."""
    size, blocks = engine.capacity["block_size"], engine.capacity["blocks"]
    needed = sum(-(-tokens // size) for tokens in load.lengths)
    if needed < blocks:  # one block is vLLM's own
        return {}
    reason = f"{load} tokens need {needed} blocks, the cache has {blocks}"
    return {"value": None, "left_out": reason}
