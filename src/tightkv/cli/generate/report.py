"""The text that tightkv generate ends with."""

from __future__ import annotations

import shutil
from typing import Any

from tightkv.cli.shared.output import format_table, human_bytes

_OTHER_COLUMNS = 62  # of the table; the answer has what the terminal leaves
_LEAST_ANSWER = 44


def single_text(data: dict[str, Any], streamed: bool) -> str:
    """Speed and bytes; the answers too unless they were streamed."""
    run = data["runs"][0]
    lines = [] if streamed else _answers(run)
    return "\n".join([*lines, "", _speed(run), *_bytes(run, data["model"]["dtype"])])


def compare_text(data: dict[str, Any]) -> str:
    tight = data["runs"][1]
    sizes = _bytes(tight, data["model"]["dtype"])
    return "\n".join(["", *_divergence(data["compare"], tight), "", *sizes, "", _table(data)])


def _answers(run: dict[str, Any]) -> list[str]:
    answers = run["answers"]
    if len(answers) == 1:
        return [answers[0]["text"]]
    return [f"[{i}] {answer['text']}" for i, answer in enumerate(answers, start=1)]


def _speed(run: dict[str, Any]) -> str:
    timing, answers = run["timing"], run["answers"]
    prompt = sum(answer["prompt_tokens"] for answer in answers)
    new = sum(answer["new_tokens"] for answer in answers)
    return (
        f"{prompt} prompt tokens at {_rate(timing['prefill_tokens_per_second'])} tokens/s, "
        f"{new} new tokens at {_rate(timing['decode_tokens_per_second'])} tokens/s"
    )


def _bytes(run: dict[str, Any], dtype: str) -> list[str]:
    kv = run["kv"]
    ratio = kv["ratio"]
    verdict = f"{ratio:.2f}x smaller" if ratio >= 1 else f"{1 / ratio:.2f}x larger"
    verdict = "the same size" if verdict.startswith("1.00x") else verdict
    held, plain = human_bytes(kv["bytes"]), human_bytes(kv["bf16_bytes"])
    lines = [f"KV cache ({run['cache']}): {held} now, bf16 {plain}: {verdict}"]
    if ratio < 1 and kv["break_even_tokens"] is not None:
        lines.append(
            f"  Sequences of fewer than {kv['break_even_tokens']} tokens are kept exact, at 16 "
            "bits: their pages, newest tokens and sinks would take more."
        )
    lines.append(
        f"In the long run {kv['bytes_per_token']:.0f} bytes per token, bf16 "
        f"{kv['bf16_bytes_per_token']:.0f}: {kv['long_ratio']:.2f}x"
    )
    if kv["exact_layers"]:
        lines.append(f"{kv['exact_layers']} of these layers are not compressed, but {dtype}.")
    if kv["other_layers"]:
        lines.append(
            f"{kv['other_layers']} layers (sliding-window or linear attention) stay as they are "
            "and are not counted."
        )
    return lines


def _divergence(compare: dict[str, Any], tight: dict[str, Any]) -> list[str]:
    if compare["equal"]:
        return [f"The texts are equal: {compare['scored_tokens'] + 1} tokens."]
    width = max(len("uncompressed"), len(tight["cache"])) + 1
    return [
        f"The texts diverge at token {compare['divergence_token']}, after {compare['before']!r}:",
        f"  {'uncompressed:':{width}} {compare['uncompressed']!r}",
        f"  {tight['cache'] + ':':{width}} {compare['compressed']!r}",
    ]


def _table(data: dict[str, Any]) -> str:
    header = ("cache", "KV bytes", "vs bf16", "tokens/s", "KL", "answer")
    kl = data["compare"]["mean_kl"]
    rows = []
    for run, divergence in zip(data["runs"], (None, kl), strict=True):
        rows.append(
            (
                run["cache"],
                human_bytes(run["kv"]["bytes"]),
                f"{run['kv']['ratio']:.2f}x",
                _rate(run["timing"]["decode_tokens_per_second"]),
                "-" if divergence is None else f"{divergence:.5f}",
                _shorten(run["answers"][0]["text"]),
            )
        )
    return format_table(header, rows)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    width = max(_LEAST_ANSWER, shutil.get_terminal_size().columns - _OTHER_COLUMNS)
    return line if len(line) <= width else line[: width - 3] + "..."
