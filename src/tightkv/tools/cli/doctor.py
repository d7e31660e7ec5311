"""tightkv doctor: the smallest cache that keeps a model within a KL budget on your text."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tightkv import __version__
from tightkv.config import KVQuantConfig
from tightkv.files.atomic import check_writable, whole_file
from tightkv.tools.cli.shared import config_flags
from tightkv.tools.cli.shared.loading import load_for, need_transformers, quiet_imports
from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit, format_table, or_dash, print_status
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.cli.shared.server_file import model_of
from tightkv.tools.model_loading.source import check_source

if TYPE_CHECKING:
    from tightkv.tools.eval.layer_bits.diagnosis import Diagnosis, LayerReport, Measured

_INTERRUPTED = 130
_SHOWN_LAYERS = 5
_UNIFORM = ("name", "bytes_per_token", "kl")


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "doctor",
        "Find the bits of each layer's keys and values that take the fewest bytes "
        "while the mean KL to the uncompressed cache, on your text, stays within a budget. With "
        "--preset, --config or a config flag, judge that config instead. With --calibration, what "
        "it says of the layers is not measured again. Exit code 1 if nothing keeps the budget. "
        "Ctrl-C prints what was found so far (exit code 130).",
        """
        --text FILE ...  UTF-8 text, repeatable
        --budget=0.01 BUDGET:float  nats per token (default: 0.01)
        --windows=2 N  default: 2
        --window=768 TOKENS:int  default: 768
        --out FILE  write the config as JSON, for every command
        --device NAME
        --dtype NAME
        """,
        model=True,
        config=True,
    )


def run(args: argparse.Namespace) -> int:
    if args.out:
        check_writable(args.out)
    args.model = model_of(args.model, [args.config] if args.config else [])
    check_source(args.model)
    given = config_flags.given_fields(args)
    calibration = given.pop("calibration", "")
    judged = bool(args.preset or args.config or given)
    found = _diagnose(args, config_flags.config_from_args(args) if judged else None, calibration)
    try:
        if found.chosen is not None and args.out:
            with whole_file(args.out) as temporary:
                temporary.write_text(found.chosen.cfg.to_json() + "\n", encoding="utf-8")
    finally:
        emit(args, as_json(found), as_text(found))
    return _INTERRUPTED if found.interrupted else int(found.chosen is None)


def _diagnose(args: argparse.Namespace, cfg: KVQuantConfig | None, calibration: str) -> Diagnosis:
    need_transformers("doctor")
    with quiet_imports():
        from tightkv.tools.eval.layer_bits.doctor import Doctor, default_candidates
    from tightkv.tools.eval.forward import max_positions
    from tightkv.tools.eval.tasks.quality import check_compresses
    from tightkv.tools.eval.text import read_texts
    from tightkv.tools.eval.windows import cut_windows

    candidates = default_candidates(calibration) if cfg is None else [cfg]
    for candidate in candidates:
        check_compresses(candidate, args.window)
    texts = read_texts(args.text)
    model, tokenizer = load_for("doctor", args.model, dtype=args.dtype, device=args.device)
    limit = max_positions(model)
    if limit is not None and args.window > limit:
        raise ValueError(f"--window is {args.window}; the model was made for {limit} tokens")
    windows = cut_windows(tokenizer, texts, args.window, args.windows)
    doctor = Doctor(model, windows, args.budget, bars=Working)
    start = time.monotonic()
    found = doctor.diagnose(candidates) if cfg is None else doctor.check(cfg)
    print_status(
        f"{'interrupted' if found.interrupted else 'done'} after {time.monotonic() - start:.0f} s"
    )
    return found


def as_json(found: Diagnosis) -> dict[str, Any]:
    chosen, uniform = found.chosen, found.uniform
    return {
        "schema": 1,
        "tightkv": __version__,
        "budget": found.budget,
        "interrupted": found.interrupted,
        "chosen": None if chosen is None else chosen.name,
        "kv_quant": None if chosen is None else chosen.cfg.to_dict(),
        "bytes_per_token_bf16": found.bytes_bf16,
        "uniform": uniform and {name: getattr(uniform, name) for name in _UNIFORM},
        "tried": [
            {name: value for name, value in vars(tried).items() if name != "cfg"}
            | {"layer_bits": tried.cfg.layer_bits}
            for tried in found.tried
        ],
        "layers": [asdict(layer) for layer in found.layers],
    }


def as_text(found: Diagnosis) -> str:
    tables = [_layers(found.layers)] if found.layers else []
    tables += [_tried(found.tried)] if found.tried else []
    return "\n\n".join([*tables, _verdict(found)])


def _layers(layers: Sequence[LayerReport]) -> str:
    """The most sensitive ones, and every one that has a warning."""
    worst = sorted(layers, key=lambda r: -r.kl)
    header = ("layer", "KL k4", "KL v4", "KL k2", "KL v2", "warnings")
    rows = []
    for r in worst[:_SHOWN_LAYERS] + [r for r in worst[_SHOWN_LAYERS:] if r.warnings]:
        kls = (f"{kl:.1e}" for bits in (4, 2) for kl in (r.key_kl[bits], r.value_kl[bits]))
        rows.append((r.layer, *kls, "; ".join(r.warnings)))
    title = f"Most sensitive of {len(layers)} layers (estimated KL with that side alone coded):"
    return f"{title}\n{format_table(header, rows)}"


def _tried(tried: Sequence[Measured]) -> str:
    header = "config", "bytes per token", "predicted KL", "measured KL", "top-1 kept", "verdict"
    rows = []
    for m in tried:
        kls = or_dash(m.predicted_kl, "{:.5f}"), f"{m.kl:.5f}"
        verdict = "within" if m.within else "over the budget"
        rows.append((m.name, f"{m.bytes_per_token:.0f}", *kls, f"{m.top1:.1%}", verdict))
    return format_table(header, rows)


def _verdict(found: Diagnosis) -> str:
    best, uniform = found.chosen, found.uniform
    if best is None and found.interrupted:
        return "Interrupted before a config was found that keeps the budget."
    if best is None:
        return f"No config tried keeps KL within {found.budget}: none is recommended."
    lines = [
        f"{best.name} keeps KL within {found.budget} at the fewest bytes tried: "
        f"{best.bytes_per_token:.0f} per token, {found.bytes_bf16:.0f} at 16 bits."
    ]
    if uniform is not None and uniform.name != best.name:
        lines.append(
            f"With the same bits in every layer: {uniform.name}, {uniform.bytes_per_token:.0f} "
            f"bytes per token (measured KL {uniform.kl:.5f})."
        )
    if found.interrupted:
        lines.append("The search was interrupted; a smaller one may exist.")
    return "\n".join([*lines, f"Flags: {flags(best)}"])


def flags(best: Measured) -> str:
    """The config as flags of any command: a preset, and what differs from it."""
    words = []
    for field, value in config_flags.shortest(best.cfg).items():
        flag = config_flags.flag_name(field)
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [flag, text]
    return shlex.join(words)
