"""tightkv bench: speed against uncompressed caches, as ratios within one run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.files.atomic import check_appendable
from tightkv.tools.cli.bench import vllm
from tightkv.tools.cli.shared.options import add_options
from tightkv.tools.cli.shared.output import (
    add_output_options,
    check_plot,
    emit,
    format_table,
    print_status,
    save_plot,
)
from tightkv.tools.cli.shared.progress import Working

if TYPE_CHECKING:
    import torch

    from tightkv.tools.bench.inputs import Shape

Row = dict[str, Any]
Measure = Callable[[argparse.Namespace, "torch.device"], Iterator[Row]]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench",
        description="Speed on this machine, or of servers. Ratios of medians of one run are "
        "printed; the times are in the rows that --json prints and --out appends to a file.",
    )
    kinds = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    decode = kinds.add_parser("decode", help="one new token over a long cache")
    add_options(
        decode,
        """
        --tokens N ...  context length, repeatable
        --batch=1 N  with --tokens
        --heads N  default: 32
        --kv-heads N  default: 8
        --head-dim N  default: 128
        --ragged  a mix of lengths from 1024 to --tokens, on a GPU
        --shortest N  with --tokens: lengths from N to these, in any phase of a page, on a GPU
        --kernels NAME ...  repeatable (default: the best)
        --against WORD ...  measure only rivals whose name has this word, on a GPU; repeatable
            (default: all)
        --repeats=15 REPEATS:int  rounds, on a CPU (default: 15)
        --threads N  on a CPU
        """,
    )
    store = kinds.add_parser("store", help="appending many tokens at once, on a GPU")
    add_options(store, "--tokens N ...  repeatable")
    extend = kinds.add_parser("extend", help="a chunk of queries over a long cache, on a GPU")
    add_options(extend, "--chunk=2048 N  default: 2048\n--prefix N ...  repeatable")
    model = kinds.add_parser("model", help="decoding with a Llama-3.1-8B-shaped model, on a GPU")
    add_options(model, "--size BxN ...  sequences x context, repeatable")
    for kind in (decode, store, extend, model):
        add_options(kind, "--device {cpu,cuda}  default: cuda if there is one")
        add_options(kind, f"--preset {{{','.join(PRESETS)}}} ...  repeatable")
    engines = vllm.add_parsers(kinds)
    for kind in (decode, store, extend, model, *engines):
        add_options(kind, "--out FILE  append the rows to a JSON-lines file")
        add_output_options(kind, plot="draw the ratios")


def run(args: argparse.Namespace) -> int:
    import torch

    from tightkv.tools.rows import append_rows

    if args.plot:
        check_plot(args.plot)
    for path in filter(None, (args.out, getattr(args, "log", None))):
        check_appendable(path)
    asked = getattr(args, "device", None)
    device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device; use --device cpu")
    rows: list[Row] = []
    try:
        for row in _MEASURE[args.bench](args, device):
            rows.append(row)
            print_status(f"measured {_label(row)}{_figures(row)}")
            if args.out:
                append_rows(args.out, [row])
    finally:
        if rows:  # also those before an error
            emit(args, {"schema": 1, "rows": rows}, _as_text(rows))
    if args.plot:
        _draw(rows, args.plot)
    return int(any(map(vllm.went_wrong, rows)))


# --- measuring ---
def _decode(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    if device.type == "cpu":
        yield from _decode_cpu(args)
        return
    from tightkv.tools.bench import gpu

    shapes = _shapes(args, gpu.DECODE_SHAPES)
    kernels, against = args.kernels or ["auto"], args.against or ()
    yield from gpu.decode_rows(shapes, _presets(args), kernels, device, against)


def _decode_cpu(args: argparse.Namespace) -> Iterator[Row]:
    import torch

    from tightkv.tools.bench import cpu

    if args.kernels not in ([], ["cpu"]):
        raise ValueError(f"--kernels {args.kernels}; on a CPU cpu is measured, and the reference")
    for option in ("ragged", "shortest", "against"):
        if getattr(args, option):
            raise ValueError(f"--{option} is for GPUs; leave it out, or use --device cuda")
    for name in ("repeats", "threads"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)}; it must be at least 1")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    for preset in _presets(args):
        shapes = _shapes(args, cpu.SHAPES)
        yield from cpu.decode_rows(KVQuantConfig.preset(preset), shapes, args.repeats)


def _store(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    _needs_gpu(args.bench, device)
    from tightkv.tools.bench import gpu

    for preset in _presets(args):
        yield from gpu.store_rows(args.tokens or [2048, 8192], preset, device)


def _extend(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    _needs_gpu(args.bench, device)
    from tightkv.tools.bench import gpu

    for preset in _presets(args):
        yield from gpu.extend_rows(args.chunk, args.prefix or [0, 8192, 32768], preset, device)


def _model(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    _needs_gpu(args.bench, device)
    from tightkv.tools.bench.model import model_rows

    sizes = [_size(text) for text in args.size or ("1x8192", "8x32768", "32x8192", "1x131072")]
    yield from model_rows(sizes, _presets(args), device)


def _size(text: str) -> tuple[int, int]:
    batch, _, tokens = text.partition("x")
    if not (batch.isdigit() and tokens.isdigit() and int(batch) and int(tokens) > 64):
        raise ValueError(f"--size {text}; write sequences x context, as 8x32768 (more than 64)")
    return int(batch), int(tokens)


def _working(measure: Measure) -> Measure:
    """The same, with progress."""

    def shown(args: argparse.Namespace, device: torch.device) -> Iterator[Row]:
        with Working(f"measuring {args.bench}"):
            yield from measure(args, device)

    return shown


_MEASURE: dict[str, Measure] = {
    "model": _working(_model),
    "decode": _working(_decode),
    "store": _working(_store),
    "extend": _working(_extend),
    "engine": vllm.engine,
    "serve": vllm.serve,
}


def _needs_gpu(what: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"tightkv bench {what} measures GPUs; on a CPU there is bench decode")


def _presets(args: argparse.Namespace) -> list[str]:
    return args.preset or ["k4v4"]


def _shapes(args: argparse.Namespace, usual: Sequence[Shape]) -> list[Shape]:
    from tightkv.tools.bench.inputs import Shape

    given = {"query_heads": args.heads, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    changes: dict[str, Any] = {name: n for name, n in given.items() if n is not None}
    changes |= {"ragged": True} if args.ragged else {}
    changes |= {"shortest": args.shortest} if args.shortest is not None else {}
    shapes = [Shape(args.batch, tokens) for tokens in args.tokens or []] or usual
    return [replace(shape, **changes) for shape in shapes]


# --- showing ---
def _label(row: Row) -> str:
    """What a row is about, without what it found."""
    if row["bench"] in vllm.TEXT:
        return vllm.label(row)
    if row["bench"] == "model":
        return f"{row['preset']}, {row['batch']} x {row['context']} tokens"
    if "shape" not in row:
        sizes = [f"{name} {row[name]}" for name in ("tokens", "chunk", "prefix") if name in row]
        return f"{row['preset']}, {', '.join(sizes)}"
    s = row["shape"]
    heads = f"{s['query_heads']}/{s['kv_heads']} heads of {s['head_dim']}"
    shortest = s.get("shortest") or (1024 if s.get("ragged") else None)
    tokens = f"{shortest} to {s['tokens']}" if shortest else s["tokens"]
    return f"{row['preset']} {row['kernels']}, {s['batch']} x {tokens} tokens, {heads}"


def _figures(row: Row) -> str:
    """What it found, for those who do not wait for the end."""
    value = row.get("value")
    found = [] if value is None else [f"{value:.4g}"]
    found += [f"{name.replace('_', ' ')} {ratio:.3g}" for name, ratio in _ratios(row).items()]
    return f": {', '.join(found)}" if found else ""


def _ratios(row: Row) -> dict[str, float]:
    """Numbers without a unit: how many times faster than others, and shares."""
    if "ratios" in row:
        found: dict[str, float] = row["ratios"]
        return found
    against = ("against_best_bf16", "against_fp8", "against_4bit")
    names = (*against, *(f"consecutive_{name}" for name in against), "share_of_copy_bandwidth")
    found = {name: row[name] for name in names if row.get(name) is not None}
    if "consecutive_ms" in row:
        found["p99_to_p50"] = row["consecutive_ms"]["p99"] / row["consecutive_ms"]["p50"]
    if row["bench"] == "store":
        found["of a bf16 write's time"] = row["ms"] / row["bf16_write_ms"]
    return found


def _as_text(rows: Sequence[Row]) -> str:
    if rows[0]["bench"] in vllm.TEXT:
        return vllm.TEXT[rows[0]["bench"]](rows)
    names = list(dict.fromkeys(name for row in rows for name in _ratios(row)))
    cells = []
    for row in rows:
        found = _ratios(row)
        cells.append([_label(row), *(f"{found[n]:.2f}" if n in found else "-" for n in names)])
    where = ", ".join(str(rows[0][key]) for key in ("gpu", "cpu", "isa") if key in rows[0])
    table = format_table(("measured", *(name.replace("_", " ") for name in names)), cells)
    return f"Times faster than another, and shares ({where})\n\n{table}"


def _draw(rows: Sequence[Row], path: str) -> None:
    rows = [row for row in rows if _ratios(row)]
    if not rows:
        raise ValueError("--plot: no ratios to draw, because only one cache was measured")
    name = next(n for n in ("fastest sdpa", *_ratios(rows[0])) if n in _ratios(rows[0]))
    rows = [row for row in rows if name in _ratios(row)]
    with save_plot(path, height=1.5 + 0.5 * len(rows)) as figure:
        axes = figure.add_subplot()
        axes.barh([_label(row) for row in rows], [_ratios(row)[name] for row in rows])
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.invert_yaxis()
        axes.set_xlabel(f"{rows[0]['bench']}: {name.replace('_', ' ')}")
