"""tightkv eval: what each config does to a model's answers, through the cache itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from tightkv.cli.output import MissingPackageError, add_output_options, check_plot, emit
from tightkv.cli.server_file import model_of
from tightkv.config import PRESETS
from tightkv.eval.configs import parse_configs
from tightkv.integrations.model_source import BUNDLED_NAME, DTYPE_NAMES, check_source

TASKS = ("quality", "needles", "greedy")
# option -> (default, with --quick, least)
SIZES = {
    "window": (2048, 512, 3),
    "windows": (8, 2, 1),
    "prefill": (256, 128, 1),
    "chunk": (16, 16, 1),
    "batch": (8, 8, 1),
    "needles": (5, 5, 1),
    "prompts": (4, 2, 1),
    "prompt_tokens": (512, 384, 2),
    "new_tokens": (64, 32, 1),
}
CONTEXTS, QUICK_CONTEXTS = (512, 1024, 2048), (512,)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "eval",
        description="Perplexity, KL, needles and greedy continuations of a model with each "
        "config, against its uncompressed cache. Everything goes through the real cache.",
    )
    parser.add_argument(
        "model", nargs="?", help=f"model folder or hub id (default: the bundled {BUNDLED_NAME})"
    )
    parser.add_argument(
        "--presets", nargs="+", default=[], metavar="NAME", help=f"any of {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="FILE", help="JSON; may be repeated"
    )
    parser.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8, may be repeated (default: prose that comes with Python)",
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all three"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: a first look")
    _add_sizes(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the needles (default: 0)")
    parser.add_argument(
        "--device", help="cpu, cuda, cuda:N or auto (default: cuda if there is one)"
    )
    parser.add_argument("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 where it is fast")
    parser.add_argument("--out", metavar="FILE", help="append one JSON row a config (.jsonl)")
    add_output_options(parser, plot="draw quality against bits")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sizes")
    about = {
        "window": "tokens of a window",
        "windows": "windows, spread evenly over the texts",
        "prefill": "first tokens of a window, not scored",
        "chunk": "tokens a forward pass after that",
        "batch": "windows at a time",
        "needles": "facts hidden in a context",
        "prompts": "prompts to continue greedily",
        "prompt_tokens": "tokens of such a prompt",
        "new_tokens": "tokens to continue it by",
    }
    for name, help_text in about.items():
        default = f"default: {SIZES[name][0]}; with --quick: {SIZES[name][1]}"
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=int, metavar="N", help=f"{help_text} ({default})")
    group.add_argument(
        "--contexts",
        nargs="+",
        type=int,
        metavar="N",
        help="tokens of the contexts with needles (default: "
        f"{' '.join(map(str, CONTEXTS))}; with --quick: {' '.join(map(str, QUICK_CONTEXTS))})",
    )


def run(args: argparse.Namespace) -> int:
    # Everything that can be refused is refused before torch and transformers are imported.
    _fill_sizes(args)
    names = [name for words in args.presets for name in _split(words)]
    configs = parse_configs([*names, *args.config] or ["k4v4"])
    for text in args.text:
        if not Path(text).is_file():
            raise FileNotFoundError(f"text file {text!r} does not exist")
    if args.plot:
        check_plot(args.plot)
    if args.out and not Path(args.out).parent.is_dir():
        raise FileNotFoundError(f"the folder of the output file {args.out!r} does not exist")
    args.model = model_of(args.model, args.config)
    check_source(args.model)
    try:
        import transformers  # noqa: F401
    except ImportError:
        raise MissingPackageError("tightkv eval", "transformers", "hf") from None
    from tightkv.cli import eval_report
    from tightkv.cli.eval_run import evaluate
    from tightkv.provenance import append_rows

    data = evaluate(args, configs)
    if args.out:
        append_rows(args.out, eval_report.file_rows(data))
    emit(args, data, eval_report.as_text(data))
    if args.plot:
        eval_report.draw(args.plot, data)
    return 0


def _split(words: str) -> list[str]:
    """'k4v4,k3v3' -> two presets; JSON has commas of its own."""
    return [words] if words.lstrip().startswith("{") else [w for w in words.split(",") if w]


def _fill_sizes(args: argparse.Namespace) -> None:
    for name, (default, quick, least) in SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else default)
        if getattr(args, name) < least:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(args, name)}; it must be at least {least}")
    if args.contexts is None:
        args.contexts = list(QUICK_CONTEXTS if args.quick else CONTEXTS)
    if min(args.contexts) < 1:
        raise ValueError(f"--contexts {min(args.contexts)}; a context must be at least 1 token")
    args.contexts = sorted(set(args.contexts))
    args.tasks = [task for task in TASKS if task in args.tasks]
    if args.prefill > args.window - 2:
        raise ValueError(
            f"--prefill {args.prefill} leaves nothing to score of a window of {args.window} tokens"
        )
