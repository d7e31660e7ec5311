"""tightkv calibrate: measure a model once; every command and engine can use the result."""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tightkv.files.atomic import check_writable
from tightkv.fit.calibration import SUFFIX, Calibration, save_calibration
from tightkv.tools.cli.shared.loading import load_for, need_transformers, quiet_imports
from tightkv.tools.cli.shared.options import Commands, add_command
from tightkv.tools.cli.shared.output import emit, print_status
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.model_loading.source import check_source, model_name


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "calibrate",
        "Measure on text what errors of a model's keys and values cost, and write one "
        "small file: how to code each layer's keys, and for k4v4, k3v3 and k2v2 the bits of each "
        "layer that cost least at no more bytes. Use it with --calibration FILE in every command, "
        "or as the config field calibration.",
        f"""
        --text FILE ...  UTF-8 text, repeatable (default: prose that comes with Python)
        --tokens=4096 N  default: 4096
        -o, --out FILE  a {SUFFIX} file (default: MODEL{SUFFIX}, here)
        --name NAME  of the model in the file (default: its folder's or hub id)
        --device NAME
        --dtype NAME
        """,
        model=True,
    )


def run(args: argparse.Namespace) -> int:
    check_source(args.model)
    name = args.name or model_name(args.model)
    out = Path(args.out or f"{name.rpartition('/')[2]}{SUFFIX}")
    if out.suffix != SUFFIX:
        raise ValueError(f"--out {str(out)!r}; a calibration is a {SUFFIX} file")
    check_writable(out)
    found = _measure(args, name)
    failed = None
    try:
        save_calibration(found, out)
    except OSError as error:  # a disk that is full by now: what was measured must not be lost
        failed, out = error, Path(tempfile.mkdtemp(prefix="tightkv-")) / out.name
        save_calibration(found, out)
    print_status(f"wrote {out} ({out.stat().st_size:,} bytes)")
    emit(args, as_json(found, out), as_text(found, out))
    if failed is not None:
        raise ValueError(f"{failed}; the calibration is in {out}")
    return 0


def _measure(args: argparse.Namespace, name: str) -> Calibration:
    need_transformers("calibrate")
    with quiet_imports():
        from tightkv.tools.eval.layer_bits.calibrate import PREFILL, WINDOW, Calibrator
    from tightkv.tools.eval.forward import max_positions
    from tightkv.tools.eval.text import read_texts
    from tightkv.tools.eval.windows import cut_windows

    if args.tokens < 2 * PREFILL:
        raise ValueError(f"--tokens {args.tokens}; at least {2 * PREFILL} are needed")
    texts = read_texts(args.text)
    model, tokenizer = load_for("calibrate", args.model, dtype=args.dtype, device=args.device)
    window = min(WINDOW, args.tokens, max_positions(model) or WINDOW)
    windows = cut_windows(tokenizer, texts, window, max(1, args.tokens // window))
    begin = time.monotonic()
    prefill = min(PREFILL, window // 2)
    # File names alone: where a text lay is nobody's business.
    named = [replace(text, name=Path(text.name).name) for text in texts]
    found = Calibrator(model, windows, Working, prefill).run(name, named)
    print_status(f"done after {time.monotonic() - begin:.0f} s")
    return found


def as_json(found: Calibration, out: Path) -> dict[str, Any]:
    measured = found.measured
    return {
        "schema": 1,
        "file": str(out),
        "bytes": out.stat().st_size,
        "model": measured.model,
        "fingerprint": found.fingerprint,
        "texts": [{"name": name, "sha256": digest} for name, digest in measured.texts],
        "tokens": measured.tokens,
        "tightkv": measured.tightkv,
        "layer_bits": dict(found.layer_bits),
        "layers": [
            {"layer": n, "key_kl": dict(costs.key), "value_kl": dict(costs.value)}
            for n, costs in found.costs.items()
        ],
    }


def as_text(found: Calibration, out: Path) -> str:
    lines = [f"{found.measured.model}: metrics of {len(found.metrics)} layers"]
    for preset, bits in found.layer_bits.items():
        lines.append(f"{preset}: {bits.replace(',', ' ') or 'the same bits in all layers'}")
    lines.append(f"use it: --calibration {out}")
    return "\n".join(lines)
