"""tightkv bench engine and serve: their options, and their rows as tables."""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightkv.tools.cli.shared.options import add_options
from tightkv.tools.cli.shared.output import MissingPackageError, format_table, parse_bytes
from tightkv.tools.cli.shared.progress import Progress, Working

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]

# Lengths of a mixed load on a GPU and on a CPU.
_PROMPTS, _ANSWERS = ("2048-14336", "128-512"), ("200-1200", "16-64")


# --- options ---
def add_parsers(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
) -> list[argparse.ArgumentParser]:
    return [_add_engine(kinds), _add_serve(kinds)]


def _add_engine(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = kinds.add_parser("engine", help="KV caches side by side in vLLM, offline")
    parser.add_argument("model", nargs="?", help="model folder or hub id, as vLLM accepts it")
    add_options(
        parser,
        f"""
        --shape NAME  random weights instead: llama-3.1-8b, ...
        --kv NAME ...  auto (vLLM's own cache), fp8, another cache of vLLM's or a preset, repeatable
            (default: auto, k4v4, and fp8 on a GPU)
        --size BxN ...  batch and context of a decode measurement, as in 32x8k, or the bounds
            that contexts are drawn from, as in 32x6k-10k, repeatable
        --prefill N ...  prompt length of a prefill measurement, repeatable (default: the contexts
            of --size)
        --new-lengths  also measure the first prompt of a length, near each prefill
        --mixed N  also measure N requests that arrive at once
        --mixed-prompts LOW-HIGH  their lengths in tokens (default: {_PROMPTS[0]}, on a CPU
            {_PROMPTS[1]})
        --mixed-answers LOW-HIGH  their lengths in tokens (default: {_ANSWERS[0]}, on a CPU
            {_ANSWERS[1]})
        --decode-tokens N  default: 64, on a CPU 16
        --repeats=3 N  default: 3
        --dtype DTYPE  default: bfloat16, on a CPU float32
        --kv-memory SIZE  for the KV cache, as in 4GiB (default: what vLLM finds free, on a CPU
            1GiB)
        --engine-args={{}} JSON  further arguments of vllm.LLM
        --timeout=3600 S:float  for one engine (default: 3600)
        --log FILE  append the engines' output to a file
        """,
    )
    return parser


def _add_serve(
    kinds: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    parser = kinds.add_parser("serve", help="running OpenAI-compatible servers under load")
    parser.add_argument(
        "--url",
        action="append",
        required=True,
        metavar="NAME=URL",
        help="as in k4v4=http://127.0.0.1:8000, repeatable; ratios are to the first",
    )
    add_options(
        parser,
        """
        --model MODEL  name it is served under (default: the server's first)
        --requests=64 N  in total, to each server (default: 64)
        --concurrency=16 N  requests at a time (default: 16)
        --prompt-tokens=512 N  of each request (default: 512)
        --output-tokens=128 N  of each request (default: 128)
        --seconds=600 SECONDS:float  at most, for each server (default: 600)
        --seed SEED:int  of the prompts (default: a new one each run)
        """,
    )
    return parser


# --- measuring ---
def engine(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    from tightkv.tools.bench.engine import engine_rows
    from tightkv.tools.bench.engine_plan import SIZES, EnginePlan, MixedLoad
    from tightkv.tools.bench.loads import Load

    on_gpu = device.type == "cuda"
    sizes = tuple(map(Load.parse, args.size or ()))
    if not (sizes or args.prefill or args.mixed is not None):
        sizes = SIZES[device.type]
    mixed = None
    if args.mixed is not None:
        prompts = _lengths("--mixed-prompts", args.mixed_prompts or _PROMPTS[not on_gpu])
        answers = _lengths("--mixed-answers", args.mixed_answers or _ANSWERS[not on_gpu])
        mixed = MixedLoad(args.mixed, prompts, answers)
    kv_memory = args.kv_memory or (None if on_gpu else "1GiB")
    plan = EnginePlan(
        model=args.model,
        shape=args.shape,
        sizes=sizes,
        prefill=args.prefill or tuple(dict.fromkeys(load.context for load in sizes)),
        new_lengths=args.new_lengths,
        mixed=mixed,
        decode_tokens=_default(args.decode_tokens, 64 if on_gpu else 16),
        repeats=args.repeats,
        device=device.type,
        dtype=args.dtype,
        kv_memory=None if kv_memory is None else parse_bytes(kv_memory),
        engine_args=_engine_args(args.engine_args),
        timeout=args.timeout,
    )
    if find_spec("vllm") is None:
        raise MissingPackageError("tightkv bench engine", "vLLM", "vllm")
    caches = args.kv or (["auto", "fp8", "k4v4"] if on_gpu else ["auto", "k4v4"])
    with Working("starting") as work:
        yield from engine_rows(plan, caches, Path(args.log) if args.log else None, work.step)


def _engine_args(text: str) -> dict[str, Any]:
    """--engine-args, without what --kv sets for each cache."""
    given = _json_object("--engine-args", text)
    additional = given.get("additional_config", {})
    if not isinstance(additional, dict) or "tightkv" in additional:
        raise ValueError(
            f"--engine-args additional_config={additional!r}; it must be an object without "
            '"tightkv", which --kv sets'
        )
    if "kv_cache_dtype" in given:
        raise ValueError(
            f"--engine-args kv_cache_dtype={given['kv_cache_dtype']!r}; name the cache with --kv"
        )
    return given


def serve(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    from tightkv.tools.bench.openai_client import Server
    from tightkv.tools.bench.serve import Load, serve_rows

    load = Load(
        requests=args.requests,
        concurrency=args.concurrency,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        seconds=args.seconds,
        seed=random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed,
    )
    yield from serve_rows([Server.parse(url) for url in args.url], load, args.model, Progress)


def _default(given: int | None, value: int) -> int:
    return value if given is None else given


def _lengths(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None:
        raise ValueError(f"{option} {text!r}; give LOW-HIGH, as in 2048-14336")
    return int(match[1]), int(match[2])


def _json_object(option: str, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{option} {text!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{option} {text!r}; it must be a JSON object")
    return data


# --- showing ---
def went_wrong(row: Row) -> bool:
    """An engine that failed, or a server that did not answer every request in time."""
    return bool(row.get("error") or row.get("failed") or row.get("out_of_time"))


def label(row: Row) -> str:
    if row["bench"] == "serve":
        return str(row["server"])
    from tightkv.tools.bench.engine import what_is_measured

    return f"{row['kv']}, {'failed' if 'error' in row else what_is_measured(row)}"


def engine_text(rows: Sequence[Row]) -> str:
    """A column per cache: the figure, and its ratio to vLLM's own."""
    from tightkv.tools.bench.engine import what_is_measured

    good = [row for row in rows if "error" not in row]
    caches = list(dict.fromkeys(row["kv"] for row in good))
    found = {(what_is_measured(row), row["kv"]): row for row in good}
    names = list(dict.fromkeys(name for name, _ in found))
    table = [[name, *(_cell(found.get((name, kv))) for kv in caches)] for name in names]
    parts = [_heading(good[0])] if good else []
    parts += [format_table(("measured", *caches), table)] if good else []
    parts += [_single_steps([row for row in good if "step_ms" in row], caches)]
    parts += [_latencies([row for row in good if row["measure"] == "mixed"])]
    parts += [
        "\n".join(
            [f"{label(row)}: {row['left_out']}" for row in good if "left_out" in row]
            + [f"{row['kv']} failed: {row['error']}" for row in rows if "error" in row]
        )
    ]
    return "\n\n".join(part for part in parts if part)


def _single_steps(rows: Sequence[Row], caches: Sequence[str]) -> str:
    """Four lines per load: a whole step, its spread, the host's part, and completed pages."""
    from tightkv.tools.bench.loads import Load

    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        step, host, ratios = row["step_ms"], row["host_ms"], row["ratios"]
        to_auto = {name: ratios.get(f"{name} to auto") for name in ("step", "host")}
        cells = {
            "p50 / p90 / p99, ms": " / ".join(f"{step[p]:.2f}" for p in ("p50", "p90", "p99"))
            + _in_brackets(to_auto["step"]),
            "p99 / p50": _times(ratios["p99 to p50 of steps"]),
            "host, ms": f"{host['p50']:.2f}{_in_brackets(to_auto['host'])}" if host else "-",
            "completing pages / not": _times(ratios.get("steps that complete pages to others")),
        }
        for name, cell in cells.items():
            lines.setdefault((str(Load.of_row(row)), name), {})[row["kv"]] = cell
    if not lines:
        return ""
    header = ("single synchronized steps", "", *caches)
    return format_table(
        header, [[*key, *(of.get(kv, "-") for kv in caches)] for key, of in lines.items()]
    )


def _in_brackets(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f}x)"


def _latencies(mixed: Sequence[Row]) -> str:
    """What requests of a mixed load waited for, a line per cache."""
    if not mixed:
        return ""
    header = ("mixed requests", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99")
    lines = []
    for row in mixed:
        found = [row["ttft_ms"], row["tpot_ms"] or {"p50": 0.0, "p99": 0.0}]
        lines.append([row["kv"], *(f"{of[p]:,.1f}" for of in found for p in ("p50", "p99"))])
    return format_table(header, lines)


def _heading(row: Row) -> str:
    dtype = row["arguments"]["dtype"]
    where = row.get("gpu") or f"{row['cores']} {row['machine']} cores"
    text = f"{row['model']} in vLLM {row['vllm']}, {dtype} ({where}); x: times the figure of auto"
    return text + ("; auto keeps 32 bits per number" if dtype == "float32" else "")


def _cell(row: Row | None) -> str:
    if row is None or row["value"] is None:
        return "-"
    text = f"{row['value']:,.2f}" if row["unit"] == "ms" else f"{row['value']:,.0f}"
    return text + _in_brackets(row.get("ratios", {}).get("to auto"))


def serve_text(rows: Sequence[Row]) -> str:
    """A line per server."""
    header = (
        "server", "done", "tokens/s", "", "TTFT p50 ms", "", "p99", "TPOT p50 ms", "", "p99",
        "preemptions",
    )  # fmt: skip
    lines = []
    for row in rows:
        ratios = row["ratios"]
        ttft, tpot = (_latency(row, name) for name in ("ttft", "tpot"))
        done = f"{row['completed']}/{row['load']['requests']}"
        speed = [f"{row['output_tokens_per_s']:.1f}", _times(ratios.get("throughput"))]
        preempted = "-" if row["preemptions"] is None else row["preemptions"]
        lines.append([row["server"], done, *speed, *ttft, *tpot, preempted])
    text = format_table(header, lines)
    failed = [row for row in rows if row["failed"]]
    errors = [f"{row['server']}: {row['failed']} failed: {row['first_error']}" for row in failed]
    load = rows[0]["load"]
    heading = (
        f"{load['concurrency']} requests at a time, {load['prompt_tokens']} tokens in and "
        f"{load['output_tokens']} out; x: times the figure of {rows[0]['server']}"
    )
    return "\n\n".join([heading, text, *(["\n".join(errors)] if errors else [])])


def _latency(row: Row, name: str) -> list[str]:
    found = row[f"{name}_ms"]
    if found is None:
        return ["-", "-", "-"]
    return [f"{found['p50']:.1f}", _times(row["ratios"].get(name)), f"{found['p99']:.1f}"]


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"


TEXT = {"engine": engine_text, "serve": serve_text}
