"""tightkv doctor: the smallest cache that keeps a model within a KL budget on your text."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from tightkv.config import KVQuantConfig
from tightkv.files.atomic import check_writable, whole_file
from tightkv.tools.cli.shared.config_flags import add_config_flags, config_from_args, given_fields
from tightkv.tools.cli.shared.loading import load_for
from tightkv.tools.cli.shared.output import (
    MissingPackageError,
    add_output_options,
    emit,
    print_status,
)
from tightkv.tools.cli.shared.progress import Progress, Working
from tightkv.tools.cli.shared.server_file import model_of
from tightkv.tools.model_loading.source import BUNDLED_NAME, check_source

if TYPE_CHECKING:
    from tightkv.tools.eval.layer_bits.diagnosis import Diagnosis

_INTERRUPTED = 130


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Find the bits of each layer's keys and values that take the fewest bytes "
        "while the mean KL to the uncompressed cache, on your text, stays within a budget. With "
        "--preset, --config or a config flag, judge that config instead. With --calibration, what "
        "it says of the layers is not measured again. Exit code 1 if nothing keeps the budget. "
        "Ctrl-C prints what was found so far (exit code 130).",
    )
    parser.add_argument(
        "model", nargs="?", help=f"model folder or hub id (default: the bundled {BUNDLED_NAME})"
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE", help="UTF-8 text, repeatable"
    )
    parser.add_argument("--budget", type=float, default=0.01, help="nats per token (default: 0.01)")
    parser.add_argument("--windows", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--window", type=int, default=768, metavar="TOKENS", help="default: 768")
    parser.add_argument("--out", metavar="FILE", help="write the config as JSON, for every command")
    parser.add_argument("--device", metavar="NAME")
    parser.add_argument("--dtype", metavar="NAME")
    add_config_flags(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.out:
        check_writable(args.out)
    args.model = model_of(args.model, [args.config] if args.config else [])
    check_source(args.model)
    given = given_fields(args)
    calibration = given.pop("calibration", "")
    judged = bool(args.preset or args.config or given)
    cfg = config_from_args(args) if judged else None
    found = _diagnose(args, cfg, calibration)

    from tightkv.tools.cli.doctor.report import as_json, as_text

    try:
        if found.chosen is not None and args.out:
            with whole_file(args.out) as temporary:
                temporary.write_text(found.chosen.cfg.to_json() + "\n", encoding="utf-8")
    finally:
        emit(args, as_json(found), as_text(found))
    if found.interrupted:
        return _INTERRUPTED
    return 0 if found.chosen is not None else 1


def _diagnose(args: argparse.Namespace, cfg: KVQuantConfig | None, calibration: str) -> Diagnosis:
    try:
        from tightkv.tools.eval.layer_bits.doctor import Doctor, default_candidates
        from tightkv.tools.eval.tasks.quality import check_compresses
        from tightkv.tools.eval.text import default_texts, read_text
        from tightkv.tools.eval.windows import cut_windows
    except ImportError:
        raise MissingPackageError("tightkv doctor", "transformers", "hf") from None
    candidates = default_candidates(calibration) if cfg is None else [cfg]
    for candidate in candidates:
        check_compresses(candidate, args.window)
    texts = [read_text(path) for path in args.text] or default_texts()
    model, tokenizer = load_for("doctor", args.model, dtype=args.dtype, device=args.device)
    windows = cut_windows(tokenizer, texts, args.window, args.windows)
    doctor = Doctor(model, windows, args.budget, bars=Progress)
    with Working("timing a short pass"):
        duration = _duration(doctor, cfg)
    print_status(f"{windows.ids.numel()} tokens; this takes about {duration}")
    start = time.monotonic()
    found = doctor.diagnose(candidates) if cfg is None else doctor.check(cfg)
    print_status(
        f"{'interrupted' if found.interrupted else 'done'} after {time.monotonic() - start:.0f} s"
    )
    return found


def _duration(doctor: Any, cfg: KVQuantConfig | None) -> str:
    seconds = doctor.expected_seconds() if cfg is None else doctor.expected_seconds(configs=1)
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} minutes"
