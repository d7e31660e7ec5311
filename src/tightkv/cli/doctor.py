"""tightkv doctor: the smallest cache that keeps a model within a KL budget on your text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightkv.cli.config_flags import add_config_flags, config_from_args, given_fields
from tightkv.cli.output import MissingPackageError, add_output_options, emit, format_table
from tightkv.cli.server_file import model_of
from tightkv.config import PRESETS, KVQuantConfig
from tightkv.files import whole_file
from tightkv.integrations.model_source import BUNDLED_NAME, check_source

if TYPE_CHECKING:
    from tightkv.eval.doctor import Diagnosis


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        description="Measure each layer of a model on your text, and find the config with the "
        "fewest bytes whose mean KL to the uncompressed cache stays within a budget. With "
        "--preset, --config or a config flag, judge that config instead. Exit code 1 if nothing "
        "keeps the budget.",
    )
    parser.add_argument(
        "model", nargs="?", help=f"model folder or hub id (default: the bundled {BUNDLED_NAME})"
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE", help="UTF-8 text, repeatable"
    )
    parser.add_argument("--budget", type=float, default=0.01, help="nats a token (default: 0.01)")
    parser.add_argument("--windows", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--window", type=int, default=1024, metavar="TOKENS", help="default: 1024")
    parser.add_argument(
        "--probe", default="k2v2", choices=PRESETS, help="preset that layers are probed with"
    )
    parser.add_argument("--out", metavar="FILE", help="write the config as JSON, for every command")
    parser.add_argument("--device", metavar="NAME")
    parser.add_argument("--dtype", metavar="NAME")
    add_config_flags(parser)
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.out and not Path(args.out).resolve().parent.is_dir():
        raise FileNotFoundError(f"the folder of {args.out!r} does not exist")
    args.model = model_of(args.model, [args.config] if args.config else [])
    check_source(args.model)
    judged = bool(args.preset or args.config or given_fields(args))
    cfg = config_from_args(args) if judged else None
    found = _diagnose(args, cfg)
    if found.chosen is not None and args.out:
        with whole_file(args.out) as temporary:
            temporary.write_text(found.chosen.cfg.to_json() + "\n", encoding="utf-8")
    emit(args, _as_json(found), _as_text(found))
    return 0 if found.chosen is not None else 1


def _diagnose(args: argparse.Namespace, cfg: KVQuantConfig | None) -> Diagnosis:
    try:
        from tightkv.eval.doctor import Doctor, default_candidates
        from tightkv.eval.text import default_texts, read_text
        from tightkv.eval.windows import cut_windows
        from tightkv.integrations.transformers.models import load_model
    except ImportError:
        raise MissingPackageError("tightkv doctor", "transformers", "hf") from None
    texts = [read_text(path) for path in args.text] or default_texts()
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device)
    windows = cut_windows(tokenizer, texts, args.window, args.windows)

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    doctor = Doctor(model, windows, args.budget, progress=progress)
    probe = KVQuantConfig.preset(args.probe)
    if cfg is not None:
        return doctor.check(cfg, probe)
    return doctor.diagnose(probe, default_candidates())


def _as_json(found: Diagnosis) -> dict[str, Any]:
    chosen = found.chosen
    return {
        "budget": found.budget,
        "chosen": None if chosen is None else chosen.name,
        "kv_quant": None if chosen is None else chosen.cfg.to_dict(),
        "tried": [
            {
                "name": m.name,
                "kl": m.kl,
                "top1": m.top1,
                "bytes_per_token": m.bytes_per_token,
                "within": m.within,
            }
            for m in found.tried
        ],
        "layers": [
            {
                "layer": r.layer,
                "kl": r.kl,
                "mean_share": r.mean_share,
                "outlier_head": r.outlier_head,
                "key_bias": r.key_bias,
                "warnings": list(r.warnings),
            }
            for r in found.layers
        ],
    }


def _as_text(found: Diagnosis) -> str:
    layers = format_table(
        ("layer", "KL alone", "key mean", "largest head", "key bias", "warnings"),
        [
            (
                r.layer,
                f"{r.kl:.5f}",
                f"{100 * r.mean_share:.0f}%",
                f"{r.outlier_head:.1f}x",
                "-" if r.key_bias is None else f"{r.key_bias:.1f}",
                "; ".join(r.warnings),
            )
            for r in found.layers
        ],
    )
    tried = format_table(
        ("config", "bytes a token", "KL", "top-1 kept", "verdict"),
        [
            (
                m.name,
                f"{m.bytes_per_token:.0f}",
                f"{m.kl:.5f}",
                f"{100 * m.top1:.1f}%",
                "within" if m.within else "over the budget",
            )
            for m in found.tried
        ],
    )
    if found.chosen is None:
        last = f"No config tried keeps KL within {found.budget}: none is recommended."
    else:
        last = f"{found.chosen.name} keeps KL within {found.budget} at the fewest bytes tried."
    return f"{layers}\n\n{tried}\n\n{last}"
