"""What `tightkv doctor` prints."""

from __future__ import annotations

from typing import Any

from tightkv import __version__
from tightkv.config import PRESETS, KVQuantConfig
from tightkv.tools.cli.shared.config_flags import flag_name
from tightkv.tools.cli.shared.output import format_table
from tightkv.tools.eval.layer_bits.diagnosis import Diagnosis, LayerReport, Measured

_SHOWN_LAYERS = 5


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
        "uniform": None
        if uniform is None
        else {
            "name": uniform.name,
            "bytes_per_token": uniform.bytes_per_token,
            "kl": uniform.kl,
            "measured": uniform.measured,
        },
        "tried": [
            {
                "name": m.name,
                "layer_bits": m.cfg.layer_bits,
                "predicted_kl": m.predicted_kl,
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
                "key_kl": {str(bits): kl for bits, kl in r.key_kl.items()},
                "value_kl": {str(bits): kl for bits, kl in r.value_kl.items()},
                "mean_share": r.mean_share,
                "outlier_head": r.outlier_head,
                "key_bias": r.key_bias,
                "warnings": list(r.warnings),
            }
            for r in found.layers
        ],
    }


def as_text(found: Diagnosis) -> str:
    parts = []
    if found.layers:
        parts.append(_layers(found.layers))
    if found.tried:
        parts.append(_tried(found.tried))
    parts.append(_verdict(found))
    return "\n\n".join(parts)


def _layers(layers: list[LayerReport]) -> str:
    """The most sensitive ones, and every one that has a warning."""
    worst = sorted(layers, key=lambda r: -r.kl)
    shown = [r for i, r in enumerate(worst) if i < _SHOWN_LAYERS or r.warnings]
    table = format_table(
        ("layer", "KL k4", "KL v4", "KL k2", "KL v2", "key mean", "key bias", "warnings"),
        [
            (
                r.layer,
                *(f"{kl:.1e}" for b in (4, 2) for kl in (r.key_kl[b], r.value_kl[b])),
                "-" if r.mean_share is None else f"{100 * r.mean_share:.0f}%",
                "-" if r.key_bias is None else f"{r.key_bias:.1f}",
                "; ".join(r.warnings),
            )
            for r in shown
        ],
    )
    title = f"Most sensitive of {len(layers)} layers (estimated KL with that side alone coded):"
    return f"{title}\n{table}"


def _tried(tried: list[Measured]) -> str:
    return format_table(
        ("config", "bytes per token", "predicted KL", "measured KL", "top-1 kept", "verdict"),
        [
            (
                m.name,
                f"{m.bytes_per_token:.0f}",
                "-" if m.predicted_kl is None else f"{m.predicted_kl:.5f}",
                f"{m.kl:.5f}",
                f"{100 * m.top1:.1f}%",
                "within" if m.within else "over the budget",
            )
            for m in tried
        ],
    )


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
            f"bytes per token ({'measured' if uniform.measured else 'expected'} KL "
            f"{uniform.kl:.5f})."
        )
    if found.interrupted:
        lines.append("The search was interrupted; a smaller one may exist.")
    return "\n".join([*lines, f"Flags: {flags(best)}"])


def flags(best: Measured) -> str:
    """The config as flags of any command: a preset, and what differs from it."""
    name = best.cfg.replace(layer_bits="").name
    preset = KVQuantConfig.preset(name) if name in PRESETS else KVQuantConfig()
    words = [f"--preset {name}"] if name in PRESETS else []
    plain = preset.to_dict()
    for field, value in best.cfg.to_dict().items():
        if value != plain[field]:
            flag = flag_name(field)
            words.append(flag.replace("--", "--no-", 1) if value is False else f"{flag} {value}")
    return " ".join(words)
