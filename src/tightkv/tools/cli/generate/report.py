"""The text that tightkv generate ends with."""

from typing import Any

from tightkv.tools.cli.shared.output import format_table, human_bytes, or_dash


def single_text(data: dict[str, Any], streamed: bool) -> str:
    """Speed and bytes; the answers too unless they were streamed."""
    run = data["runs"][0]
    timing, answers = run["timing"], run["answers"]
    lines = [] if streamed else [answer["text"] for answer in answers]
    if len(lines) > 1:
        lines = [f"[{i}] {text}" for i, text in enumerate(lines, start=1)]
    prompt, new = (sum(each[f"{kind}_tokens"] for each in answers) for kind in ("prompt", "new"))
    fast = [
        or_dash(timing[f"{what}_tokens_per_second"], "{:.1f}") for what in ("prefill", "decode")
    ]
    speed = f"{prompt} prompt tokens at {fast[0]} tokens/s, {new} new tokens at {fast[1]} tokens/s"
    return "\n".join([*lines, "", speed, *_bytes(run, data["model"]["dtype"])])


def compare_text(data: dict[str, Any]) -> str:
    (plain, tight), dtype = data["runs"], data["model"]["dtype"]
    size = _bytes(tight, dtype)
    if dtype == "float32":
        held = human_bytes(plain["kv"]["bytes"])
        size.append(
            f"The model runs in float32 here, so its uncompressed cache takes {held}, twice bf16."
        )
    parts = [_divergence(data["compare"], tight)]
    if data["needle"] is not None:
        parts.append(_needle(data["needle"], data["runs"]))
    if shared := data["compare"]["shared_tokens"]:
        total = plain["answers"][0]["prompt_tokens"]
        line = (
            f"The first {shared} of {total} prompt tokens were read once, and their exact keys "
            f"and values given to both caches. The last {total - shared}, and the answers, "
            "read each cache."
        )
        parts.append([line])
    parts += [size, [_table(data)]]
    return "\n".join(line for lines in parts for line in ("", *lines))


def _bytes(run: dict[str, Any], dtype: str) -> list[str]:
    kv = run["kv"]
    ratio = kv["ratio"]
    verdict = f"{ratio:.2f}x smaller" if ratio >= 1 else f"{1 / ratio:.2f}x larger"
    verdict = "the same size" if verdict.startswith("1.00x") else verdict
    held, plain = human_bytes(kv["bytes"]), human_bytes(kv["bf16_bytes"])
    lines = [f"KV cache ({run['cache']}): {held} now, bf16 {plain}: {verdict}"]
    if ratio < 1 and kv["break_even_tokens"] is not None:
        lines.append(
            f"  Sequences of fewer than {kv['break_even_tokens']} tokens take more than in bf16: "
            "their first and newest tokens are kept beside pages."
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


def _needle(needle: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """What both caches answered to the question for the hidden fact."""
    width = max(len(run["cache"]) for run in runs) + 1
    lines = [
        f"In the text, at {needle['depth']:.0%} of its length: {needle['fact']!r}",
        f"  {needle['question']}",
    ]
    for run, answer in zip(runs, needle["answers"], strict=True):
        verdict = "found" if answer["found"] else "not found"
        lines.append(f"  {run['cache'] + ':':{width}} {answer['text']!r} ({verdict})")
    return lines


def _table(data: dict[str, Any]) -> str:
    rows = []
    for run, kl in zip(data["runs"], (None, data["compare"]["mean_kl"]), strict=True):
        size = human_bytes(run["kv"]["bytes"]), f"{run['kv']['ratio']:.2f}x"
        speed = or_dash(run["timing"]["decode_tokens_per_second"], "{:.1f}")
        rows.append([run["cache"], *size, speed, or_dash(kl, "{:.5f}")])
    return format_table(("cache", "KV bytes", "vs bf16", "tokens/s", "KL"), rows)
