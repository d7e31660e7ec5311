"""tightkv bench: speed against uncompressed caches, as ratios within one run."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.files.atomic import check_appendable
from tightkv.tools.cli.bench import show
from tightkv.tools.cli.shared import output
from tightkv.tools.cli.shared.options import add_options, check_least
from tightkv.tools.cli.shared.progress import Working

if TYPE_CHECKING:
    import torch

    from tightkv.tools.bench.inputs import Shape

Row = dict[str, Any]

# Lengths of a mixed load on a GPU and on a CPU.
_PROMPTS, _ANSWERS = ("2048-14336", "128-512"), ("200-1200", "16-64")
# What is measured, in words, and its options.
_KINDS = {
    "decode": f"""one new token over a long cache
    --tokens N ...  context length, repeatable
    --batch=1 N  with --tokens
    --heads N  default: 32
    --kv-heads N  default: 8
    --head-dim N  default: 128
    --shortest N  with --tokens: lengths from N to these, in any phase of a page, on a GPU
    --kernels NAME ...  repeatable (default: the best)
    --repeats=15 REPEATS:int  rounds, on a CPU (default: 15)
    --threads N  on a CPU
    --device {{cpu,cuda}}  default: cuda if there is one
    --preset {{{",".join(PRESETS)}}} ...  repeatable""",
    "engine": f"""KV caches side by side in vLLM, offline
    --shape NAME  random weights instead: llama-3.1-8b, ...
    --kv NAME ...  auto (vLLM's own cache), fp8, another cache of vLLM's, a preset, or options of
        tightkv as JSON, repeatable (default: auto, k4v4, and fp8 on a GPU)
    --size BxN ...  batch and context of a decode measurement, as in 32x8k, or the bounds that
        contexts are drawn from, as in 32x6k-10k, repeatable
    --prefill N ...  prompt length of a prefill measurement, repeatable (default: the contexts of
        --size)
    --new-lengths  also measure the first prompt of a length, near each prefill
    --mixed N  also measure N requests that arrive at once
    --mixed-prompts LOW-HIGH  their lengths in tokens (default: {_PROMPTS[0]}, on a CPU
        {_PROMPTS[1]})
    --mixed-answers LOW-HIGH  their lengths in tokens (default: {_ANSWERS[0]}, on a CPU
        {_ANSWERS[1]})
    --decode-tokens N  default: 64, on a CPU 16
    --repeats=3 N  default: 3
    --dtype DTYPE  default: bfloat16, on a CPU float32
    --kv-memory SIZE  for the KV cache, as in 4GiB (default: what vLLM finds free, on a CPU 1GiB)
    --engine-args={{}} JSON  further arguments of vllm.LLM
    --timeout=3600 S:float  for one engine (default: 3600)
    --log FILE  append the engines' output to a file
    """,
}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        description="Speed on this machine. Ratios of medians of one run are "
        "printed; the times are in the rows that --json prints and --out appends to a file.",
    )
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, text in _KINDS.items():
        about, options = text.split("\n", 1)
        kind = kinds.add_parser(name, help=about)
        if name == "engine":
            about = "model folder or hub id, as vLLM accepts it"
            kind.add_argument("model", nargs="?", help=about)
        add_options(kind, options)
        add_options(kind, "--out FILE  append the rows to a JSON-lines file")
        output.add_output_options(kind)


def run(args: argparse.Namespace) -> int:
    import torch

    from tightkv.tools.rows import append_rows

    for path in filter(None, (args.out, getattr(args, "log", None))):
        check_appendable(path)
    asked = getattr(args, "device", None)
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    rows: list[Row] = []
    try:
        measure = _engine if args.bench == "engine" else _decode
        for row in measure(args, device):
            rows.append(row)
            output.print_status(f"measured {show.label(row)}{show.figures(row)}")
            if args.out:
                append_rows(args.out, [row])
    finally:
        if rows:  # also those before an error
            output.emit(args, {"schema": 1, "rows": rows}, show.as_text(rows))
    return int(any("error" in row for row in rows))


# --- one layer ---
def _decode(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """By preset."""
    presets = args.preset or ["k4v4"]
    with Working("measuring decode"):
        if device.type == "cpu":
            yield from _on_a_cpu(args, presets)
            return
        from tightkv.tools.bench import gpu

        shapes, kernels = _shapes(args, gpu.DECODE_SHAPES), args.kernels or ["auto"]
        yield from gpu.decode_rows(shapes, presets, kernels, device)


def _on_a_cpu(args: argparse.Namespace, presets: Sequence[str]) -> Iterator[Row]:
    import torch

    from tightkv.tools.bench import cpu

    if args.kernels not in ([], ["cpu"]):
        raise ValueError(f"--kernels {args.kernels}; on a CPU cpu is measured, and the reference")
    if args.shortest:
        raise ValueError("--shortest is for GPUs; leave it out, or use --device cuda")
    check_least(args, repeats=1, threads=1)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    shapes = _shapes(args, cpu.SHAPES)
    for preset in presets:
        yield from cpu.decode_rows(KVQuantConfig.preset(preset), shapes, args.repeats)


def _shapes(args: argparse.Namespace, usual: Sequence[Shape]) -> list[Shape]:
    from tightkv.tools.bench.inputs import Shape

    given = {"query_heads": args.heads, "kv_heads": args.kv_heads}
    given |= {"head_dim": args.head_dim, "shortest": args.shortest}
    changes: dict[str, Any] = {name: n for name, n in given.items() if n is not None}
    shapes = [Shape(args.batch, tokens) for tokens in args.tokens or []] or usual
    return [replace(shape, **changes) for shape in shapes]


# --- engines ---
def _engine(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
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
    usual_tokens = 64 if on_gpu else 16
    given = {
        **{x.name: getattr(args, x.name) for x in fields(EnginePlan) if hasattr(args, x.name)},
        "sizes": sizes,
        "prefill": args.prefill or tuple(dict.fromkeys(load.context for load in sizes)),
        "mixed": mixed,
        "decode_tokens": usual_tokens if args.decode_tokens is None else args.decode_tokens,
        "device": device.type,
        "kv_memory": None if kv_memory is None else output.parse_bytes(kv_memory),
        "engine_args": _engine_args(args.engine_args),
    }
    plan = EnginePlan(**given)
    if find_spec("vllm") is None:
        raise output.MissingPackageError("tightkv bench engine", "vLLM", "vllm")
    caches = args.kv or (["auto", "fp8", "k4v4"] if on_gpu else ["auto", "k4v4"])
    with Working("starting") as work:
        yield from engine_rows(plan, caches, Path(args.log) if args.log else None, work.step)


def _lengths(option: str, text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None:
        raise ValueError(f"{option} {text!r}; give LOW-HIGH, as in 2048-14336")
    return int(match[1]), int(match[2])


def _engine_args(text: str) -> dict[str, Any]:
    """--engine-args, without what --kv sets for each cache."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--engine-args {text!r} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"--engine-args {text!r}; it must be a JSON object")
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
