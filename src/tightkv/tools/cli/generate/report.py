"""The text that tightkv generate ends with."""

from __future__ import annotations

import shutil
from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes

_OTHER_COLUMNS = 62  # of the table; the answer has what the terminal leaves
_LEAST_ANSWER = 48


def single_text(data: dict[str, Any], streamed: bool) -> str:
    """Speed and bytes; the answers too unless they were streamed."""
    run = data["runs"][0]
    lines = [] if streamed else _answers(run)
    return "\n".join([*lines, "", _speed(run), *_bytes(run, data["model"]["dtype"])])


def compare_text(data: dict[str, Any]) -> str:
    tight, dtype = data["runs"][1], data["model"]["dtype"]
    parts = [
        _divergence(data["compare"], tight),
        _needle(data),
        _prompt(data),
        _bytes(tight, dtype) + _wide(data["runs"][0], dtype),
        [_table(data)],
    ]
    return "\n".join(line for lines in parts if lines for line in ("", *lines))


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


def _needle(data: dict[str, Any]) -> list[str]:
    """What both caches answered to the question for the hidden fact."""
    needle = data["needle"]
    if needle is None:
        return []
    width = max(len(run["cache"]) for run in data["runs"]) + 1
    lines = [
        f"In the text, at {needle['depth']:.0%} of its length: {needle['fact']!r}",
        f"  {needle['question']}",
    ]
    for run, answer in zip(data["runs"], needle["answers"], strict=True):
        verdict = "found" if answer["found"] else "not found"
        lines.append(f"  {run['cache'] + ':':{width}} {answer['text']!r} ({verdict})")
    return lines


def _prompt(data: dict[str, Any]) -> list[str]:
    shared, run = data["compare"]["shared_tokens"], data["runs"][0]
    total = run["answers"][0]["prompt_tokens"]
    if not shared:
        return []
    return [
        f"The first {shared} of {total} prompt tokens were read once, and their exact keys and "
        f"values given to both caches. The last {total - shared}, and the answers, read each cache."
    ]


def _wide(plain: dict[str, Any], dtype: str) -> list[str]:
    if dtype != "float32":
        return []
    held = human_bytes(plain["kv"]["bytes"])
    return [f"The model runs in float32 here, so its uncompressed cache takes {held}, twice bf16."]


def _table(data: dict[str, Any]) -> str:
    header = ["cache", "KV bytes", "vs bf16", "tokens/s", "KL", "answer"]
    kl, needle = data["compare"]["mean_kl"], data["needle"]
    rows = []
    for run, divergence in zip(data["runs"], (None, kl), strict=True):
        rows.append(
            [
                run["cache"],
                human_bytes(run["kv"]["bytes"]),
                f"{run['kv']['ratio']:.2f}x",
                _rate(run["timing"]["decode_tokens_per_second"]),
                "-" if divergence is None else f"{divergence:.5f}",
                _shorten(run["answers"][0]["text"]),
            ]
        )
    if needle is not None:
        header.insert(5, "needle")
        for row, answer in zip(rows, needle["answers"], strict=True):
            row.insert(5, "found" if answer["found"] else "not found")
    return format_table(header, rows)


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    width = max(_LEAST_ANSWER, shutil.get_terminal_size().columns - _OTHER_COLUMNS)
    return line if len(line) <= width else line[: width - 3] + "..."
