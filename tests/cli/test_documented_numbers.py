"""Figures of the documentation, computed again from the rows that they come from.

Who measures again changes the rows, sees which lines are missing, and writes these.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import load_script
from tightkv import KVQuantConfig
from tightkv.integrations.vllm.step.batch_split import SHORT_PROMPT
from tightkv.integrations.vllm.step.ring_table import SAVED_SINKS, ring_size
from tightkv.kernels.prefill import MIN_QUERIES
from tightkv.paged.cache import POOL_GROWTH
from tightkv.pages.layout import RING_SLACK, SIDES, PageLayout, ring_tokens

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
# sequences x tokens: how tables name them, and what rows say
SIZES = {
    "8 x 32k": (8, 32768),
    "32 x 8k": (32, 8192),
    "1 x 128k": (1, 131072),
    "1 x 32k": (1, 32768),
}
ENGINE_SIZES = {
    "32 x 8k": (32, 8192),
    "8 x 32k": (8, 32768),
    "256 x 1k": (256, 1024),
    "1 x 2k": (1, 2048),
}


def rows(name: str) -> list[Row]:
    text = (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def document(name: str) -> str:
    """Its text with every run of spaces and line ends as one space."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def expect(name: str, *lines: str) -> None:
    text = document(name)
    missing = [line for line in lines if " ".join(line.split()) not in text]
    assert not missing, f"{name} does not say what the rows give:\n" + "\n".join(missing)


# --- presets and quality -------------------------------------------------------------------------
def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def speed(slow: float, fast: float) -> str:
    """How many times as fast."""
    return f"{slow / fast:.2f}x"


def layout_of(preset: str, kv_heads: int = 8, head_dim: int = 128) -> PageLayout:
    return PageLayout(KVQuantConfig.preset(preset), kv_heads, head_dim, torch.bfloat16)


def smaller(preset: str, tokens: int) -> str:
    layout = layout_of(preset)
    return f"{tokens * layout.exact_bytes_per_token / layout.total_bytes(tokens):.2f}x"


def plain_quality(preset: str) -> Row:
    """Of SmolLM2, whose keys were coded without error feedback: the rows before it."""
    found = [row for row in rows("eval") if row["name"] == preset and row["quality"]]
    return found[-1]["quality"]


def preset_of(config: Row) -> str:
    return f"k{config['key_bits']}v{config['value_bits']}"


def cell(result: Row) -> str:
    return f"{result['kl']:.4f} ({100 * result['perplexity_increase']:+.1f}%)"


def longer_windows() -> Iterator[str]:
    """Calibrated k2v2 with its window in 16 bits, and longer ones in 8."""
    found = [row for row in rows("eval_two_bits") if row["settings"]["windows"] == 4]
    found, sizes = found[1:], []  # the first has the file of before
    for row in found:
        cfg = KVQuantConfig.from_dict(row["config"] | {"calibration": "", "layer_bits": ""})
        layout = PageLayout(cfg, 3, 64, torch.bfloat16)
        sizes.append(layout.sequence_bytes(ring_tokens(cfg)))
        quality, tokens = row["quality"], cfg.page_size * cfg.exact_pages
        name = f"8 bits, {tokens} tokens"
        if cfg.window_bits == 16:
            name = f"16 bits, {tokens - cfg.page_size} to {tokens} tokens"
        if tokens == 192 and cfg.window_bits == 8:
            name += " (default)"
        size = f"{sizes[-1] / sizes[0]:.2f}"
        yield line(name, size, f"{quality['kl']:.4f}", f"{quality['kl_p999']:.3f}")


def test_longer_windows_of_two_bits() -> None:
    expect("docs/presets.md", *longer_windows())
    before, now = (
        row["quality"]["kl"] for row in rows("eval_two_bits") if row["settings"]["windows"] == 8
    )
    expect("docs/log.md", f"the same windows: {before:.5f} before, {now:.5f} now")


QUALITY_PRESETS = ("k4v4", "k3v3", "k2v2")


def by_model(how: str) -> dict[str, dict[str, Row]]:
    """Results of today's defaults by model and preset, the worst model first."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("eval_quality"):
        config = row["config"]
        if config is None or bool(config["calibration"]) != (how != "default"):
            continue
        assert config["window_bits"] == 8
        if preset_of(config) in QUALITY_PRESETS:
            found.setdefault(row["model"]["name"], {})[preset_of(config)] = row["result"]
    if how == "default":
        for row in rows("eval_gemma"):
            found.setdefault(row["model"]["name"], {})[row["name"]] = row["quality"]
    assert how != "default" or all(len(of) == 3 for of in found.values())
    return dict(sorted(found.items(), key=lambda item: -item[1]["k4v4"]["kl"]))


def with_16_bits() -> dict[tuple[str, str], Row]:
    """Results of the same protocol with the window in 16 bits, by model and preset."""
    return {
        (row["model"]["name"], preset_of(row["config"])): row["result"]
        for row in rows("eval_feedback")
        if row["config"] and not row["config"]["calibration"]
        if row["result"]["positions"] != 16383
    }


def is_plain(row: Row, preset: str) -> bool:
    config = row["config"]
    return bool(config) and preset_of(config) == preset and not config["calibration"]


def worst_kl(preset: str) -> str:
    found = [of[preset]["kl"] for of in by_model("default").values() if preset in of]
    if not found and preset == "k8v4":  # of one model
        found = [row["result"]["kl"] for row in rows("eval_quality") if is_plain(row, preset)]
    return f"{max(found):.4f}" if found else "-"


def equal_shape(row: Row, *heads: int) -> tuple[int, int] | None:
    """Sequences and tokens, where all are equally long and of these heads."""
    shape = row["shape"]
    own = tuple(shape[name] for name in ("query_heads", "kv_heads", "head_dim"))
    differ = shape.get("ragged") or shape.get("shortest")
    return None if differ or own != heads else (shape["batch"], shape["tokens"])


def decode_speed(preset: str) -> str:
    for row in rows("gpu_decode_20_shapes"):
        if row["preset"] == preset and equal_shape(row, 32, 8, 128) == (8, 32731):
            return f"{row['against_best_bf16']:.2f}x"
    return "-"


def engine_speed(preset: str) -> str:
    engine = Engine()
    return engine.faster(preset, "8 x 32k") if preset in engine.caches else "-"


def measured(preset: str) -> tuple[str, str, str]:
    return worst_kl(preset), decode_speed(preset), engine_speed(preset)


def preset_line(preset: str) -> str:
    layout = layout_of(preset)
    sizes = (f"{layout.bytes_per_token / 8:g}", f"{layout.ratio:.2f}x")
    return line(preset, *sizes, smaller(preset, 32768), smaller(preset, 8192), *measured(preset))


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v3", "k3v2", "k2v2"])
def test_presets(preset: str) -> None:
    expect("docs/results.md", preset_line(preset))


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v3", "k2v2"])
def test_presets_in_the_readme(preset: str) -> None:
    size = f"{layout_of(preset).bytes_per_token / 8:g}"
    expect("README.md", line(preset, size, smaller(preset, 32768), *measured(preset)))


def quality_table() -> str:
    lines = []
    for how, count in (("default", 4), ("calibrated", 3)):
        models = by_model(how)
        assert len(models) == count
        for name, found in models.items():
            positions = sorted({result["positions"] for result in found.values()})
            scored = " to ".join(f"{count:,}" for count in positions)
            cells = (cell(found[p]) if p in found else "-" for p in QUALITY_PRESETS)
            lines.append(line(name, how, scored, *cells))
    return "\n".join(lines)


def quality_error() -> str:
    """How far the two texts of a cell are from their mean."""
    spread: dict[bool, float] = {}
    for how in ("default", "calibrated"):
        for name, found in by_model(how).items():
            for result in found.values():
                far = max(abs(x["kl"] / result["kl"] - 1) for x in result["by_text"])
                gemma = "gemma" in name
                spread[gemma] = max(far, spread.get(gemma, 0.0))
    return (
        f"the KL of each of the two texts differs from the mean of a cell by at most "
        f"{100 * spread[False]:.0f}% (Gemma 3: {100 * spread[True]:.0f}%)."
    )


def noise_floor() -> str:
    return (
        f"k8v8, whose codes are nearly exact, has a KL of {plain_quality('k8v8')['kl']:.5f} on "
        f"SmolLM2. Changes of perplexity below a few tenths of a percent have either sign and say "
        f"little."
    )


def needles() -> str:
    found, asked = needle_counts()
    name = "SmolLM2-135M-Instruct"
    counts = [found[name, cache] for cache in ("exact", "k2v2", "calibrated")]
    return (
        f"of {asked[name, 'exact']} facts hidden in contexts of 768 to 2,048 tokens SmolLM2 finds "
        f"{counts[0]} with the uncompressed cache, {counts[1]} with k2v2 and {counts[2]} with a "
        f"calibrated k2v2 ([other models](calibrate.md#measured))."
    )


def worst_in_vllm() -> list[str]:
    found = rows("eval_vllm") + rows("eval_vllm_gemma")
    return [
        f"{max(row['kl'] for row in found if row['cache'] == preset):.4f}"
        for preset in QUALITY_PRESETS
    ]


def in_vllm() -> str:
    return (
        f"on shorter prompts, the worst of these models has {', '.join(worst_in_vllm())} with "
        f"k4v4, k3v3 and k2v2 ([table](measurements.md#quality-in-vllm))."
    )


def long_context() -> str:
    found = long_results()["default"]
    kls = ", ".join(f"{found[preset]['kl']:.4f}" for preset in QUALITY_PRESETS)
    return (
        f"Qwen2.5-Coder-1.5B has {kls} in bf16, whose own rounding is a part of this "
        f"([table](measurements.md#one-window-of-32768-tokens))."
    )


def test_quality() -> None:
    expect(
        "docs/results.md",
        quality_table(),
        quality_error(),
        noise_floor(),
        needles(),
        in_vllm(),
        long_context(),
    )


def long_results() -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows("eval_feedback"):
        if row["config"] is not None and row["result"]["positions"] == 16383:
            how = "calibrated" if row["config"]["calibration"] else "default"
            found.setdefault(how, {})[preset_of(row["config"])] = row["result"]
    return found


def long_table() -> str:
    return "\n".join(
        line(f"Qwen2.5-Coder-1.5B-Instruct, {how}", *(cell(of[p]) for p in QUALITY_PRESETS))
        for how, of in long_results().items()
    )


def vllm_quality_table() -> str:
    found: dict[str, dict[str, str]] = {}
    for row in rows("eval_vllm") + rows("eval_vllm_gemma"):
        preset, _, how = row["cache"].partition(" ")
        found.setdefault(f"{row['model']}, {how or 'default'}", {})[preset] = cell(row)
    assert len(found) == 7
    return "\n".join(line(name, *(of[p] for p in QUALITY_PRESETS)) for name, of in found.items())


def plain_models_table() -> str:
    found: dict[str, dict[str, str]] = {}
    for row in rows("eval_models"):
        if row["config"] is not None:
            of = found.setdefault(row["model"]["name"], {})
            of[preset_of(row["config"])] = cell(row["result"])
    assert len(found) == 2
    return "\n".join(line(name, *(of[p] for p in QUALITY_PRESETS)) for name, of in found.items())


def test_quality_with_a_window_of_8_bits() -> None:
    """Against 16 bits on the same texts and positions."""
    name = "Qwen2.5-Coder-0.5B-Instruct"
    now, before = by_model("default")[name], with_16_bits()
    calibrated = f"{by_model('calibrated')[name]['k2v2']['kl']:.4f}"
    both = [
        ", ".join(f"{of[preset]['kl']:.4f}" for preset in QUALITY_PRESETS)
        for of in (now, {preset: before[name, preset] for preset in QUALITY_PRESETS})
    ]
    expect("docs/results.md", f"the 0.5B model has {both[0]}, and with 16 bits {both[1]}")
    plain = f"{now['k2v2']['kl']:.4f}"
    expect("docs/calibrate.md", f"{calibrated} instead of {plain} without a calibration")


def other_texts() -> dict[str, Row]:
    return {
        row["name"].replace(" calibration=auto", " calibrated"): row["quality"]
        for row in rows("eval_texts")
    }


def other_texts_table() -> str:
    lines = []
    for name in ("k4v4", "k4v4 calibrated", "k2v2", "k2v2 calibrated"):
        found = other_texts()[name]
        by_text = {x["text"]: x["kl"] for x in found["by_text"]}
        kls = (by_text[f"{text}.txt"] for text in ("jargon", "history.de", "history.ja"))
        lines.append(line(name, *(f"{kl:.4f}" for kl in kls), f"{found['kl_p999']:.2f}"))
    return "\n".join(lines)


def test_quality_of_other_texts() -> None:
    expect("docs/results.md", other_texts_table())
    worst = max(x["kl"] for x in other_texts()["k4v4"]["by_text"])
    expect("README.md", f"(SmolLM2 on Japanese text: {worst:.4f})")


def test_quality_in_the_measurements() -> None:
    expect("docs/measurements.md", long_table(), vllm_quality_table(), plain_models_table())


def test_the_plots_are_those_of_the_rows() -> None:
    """`python benchmarks/plots.py` draws them again."""
    plots = load_script("plots")
    for name, draw in plots.DRAWINGS.items():
        assert (plots.PLOTS / name).read_text(encoding="utf-8") == draw(), name
        assert f"docs/plots/{name}" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_drawings_of_a_page() -> None:
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128, torch.bfloat16)
    spans = [(plane.offset, plane.size) for plane in layout.planes.values()]
    spans.append((layout.mean_offset, layout.record_bytes - layout.mean_offset))
    offsets = [*(offset for offset, _ in spans), layout.record_bytes]
    assert list(layout.planes) == [(side, name) for name in ("codes", "scale") for side in SIDES]
    expect("docs/layout.md", "offset " + " ".join(map(str, offsets)))
    expect(
        "docs/drawings/page.svg",
        *(f">{offset}<" for offset in offsets),
        *(f">{size:,} bytes<" for _, size in spans),
        f"8 x {layout.record_bytes:,} = {layout.page_bytes:,} bytes",
        f"first {layout.cfg.sinks} tokens",
        f"ring: the newest {layout.ring_tokens} tokens",
        f"{layout.record_bytes:,} bytes / {layout.page_size} tokens = "
        f"{layout.bytes_per_token / 8:g} bytes per token per head. A 16-bit cache takes "
        f"{layout.exact_bytes_per_token / 8:g}.",
    )
    expect("docs/how-it-works.md", f"the newest {layout.ring_tokens}")


@pytest.mark.parametrize("preset", ["k8v8", "k8v4", "k4v4", "k3v3", "k3v2", "k2v2"])
def test_short_sequences(preset: str) -> None:
    layout = PageLayout(KVQuantConfig.preset(preset), 8, 128, torch.bfloat16)

    def size(tokens: int) -> int:
        return layout.total_bytes(tokens, encode_partial_page=False)

    exact, lengths = layout.exact_bytes_per_token, (256, 1024, 4096)
    even = next(n for n in range(1, 1000) if size(n) < n * exact)
    cells = [str(even), *(f"{32 * size(tokens) / 2**20:.1f}" for tokens in lengths)]
    expect("docs/plan.md", f"| {preset} | {' | '.join(cells)} |")
    if preset == "k4v4":
        shares = [f"{size(tokens) / tokens / exact:.2f}" for tokens in lengths]
        text = f"256 tokens of k4v4 take {shares[0]} of bf16, 1,024"
        expect("docs/presets.md", f"{text} tokens {shares[1]} and 4,096 tokens {shares[2]}")
        expect("README.md", f"{text} take {shares[1]}")
        expect("CHANGELOG.md", f"{text} take {shares[1]}")


def test_the_exact_window() -> None:
    """Attention reads it from the ring, which has room for more."""
    windows = []
    for preset in ("k4v4", "k2v2"):
        layout = layout_of(preset)
        most = layout.cfg.exact_pages * layout.page_size
        assert layout.ring_tokens == 224 and most == 192
        windows.append(f"{most - layout.page_size} to {most}")
    for page in ("docs/how-it-works.md", "docs/presets.md"):
        expect(page, "the newest 192", f"the newest {windows[0]}", f"k2v2: {windows[1]}")


# --- speed on a GPU ------------------------------------------------------------------------------
def flashinfer_table() -> str:
    """An earlier run of four shapes, with FlashInfer."""

    def cells(name: str, preset: str, against: str) -> list[str]:
        found = []
        for batch, context in SIZES.values():
            (row,) = (
                row
                for row in rows(name)
                if row["preset"] == preset
                and row["shape"]["batch"] == batch
                and context - 64 < row["shape"]["tokens"] <= context
            )
            found.append(f"{row[against]:.2f}x")
        return found

    lines = [
        line(f"{preset}, best bf16 of the run", *cells("gpu_decode", preset, "against_best_bf16"))
        for preset in QUALITY_PRESETS
    ]
    lines.insert(1, line("k4v4, FlashInfer's fp8", *cells("gpu_decode", "k4v4", "against_fp8")))
    lines += [
        line(
            f"{preset}, best bf16 of torch and Triton",
            *cells("gpu_decode_8bit", preset, "against_best_bf16"),
        )
        for preset in ("k8v4", "k8v8")
    ]
    return "\n".join([line("cache, compared with", *SIZES), line(*["---"] * 5), *lines])


def byte_limits() -> str:
    limits = [smaller(preset, 32768) for preset in QUALITY_PRESETS]
    return f"{limits[0]}, {limits[1]} and {limits[2]}"


def test_decode_steps_with_flashinfer() -> None:
    expect("docs/measurements.md", flashinfer_table())
    expect("docs/results.md", f"which is {byte_limits()} at 32k tokens")


def twenty_shapes() -> str:
    found = rows("gpu_decode_20_shapes")
    assert len({row["commit"] for row in found}) == 1
    text: str = load_script("decode_shapes").table(found)
    assert len(text.splitlines()) == 22
    return text


def eight_bit_steps() -> str:
    found = [row for row in rows("gpu_decode_20_shapes") if row["preset"] == "k8v4"]
    cells = [
        f"{1e3 * row['ms']['step']:.1f} us ({row['against_best_bf16']:.2f}x) at "
        f"{row['shape']['batch']} x {row['shape']['tokens']:,}"
        for row in found
    ]
    assert len(cells) == 2
    return " and ".join(cells)


def test_decode_steps_of_twenty_shapes() -> None:
    expect("docs/results.md", twenty_shapes(), f"measured at two shapes: {eight_bit_steps()}.")
    k4v4 = [row for row in rows("gpu_decode_20_shapes") if row["preset"] == "k4v4"]
    speeds = [row["against_best_bf16"] for row in k4v4]
    least, most = min(speeds), max(speeds)
    expect("README.md", f"measured at {len(k4v4)} shapes: {least:.2f}x to {most:.2f}x.")


def sealing_steps() -> dict[tuple[int, int], tuple[float, float, float]]:
    """(sequences, tokens) -> us of a step that completes no page, one, and one of each sequence."""
    found = {}
    for row in rows("gpu_decode_rivals"):
        size = equal_shape(row, 32, 8, 128)
        if row["preset"] == "k4v4" and size is not None:
            step, one, every = (
                1e3 * row["ms"][f"vllm_step_with_feedback{more}"]
                for more in ("", "_and_seal_one", "_and_seal")
            )
            found[size] = step, one, every
    assert len(found) == 9
    return found


def sealing_table() -> str:
    return "\n".join(
        line(
            f"{batch} x {tokens:,}",
            f"{step:.1f}",
            *(f"{x:.1f} ({x / step:.2f}x)" for x in (one, every)),
        )
        for (batch, tokens), (step, one, every) in sealing_steps().items()
    )


def test_steps_that_complete_pages() -> None:
    expect("docs/measurements.md", sealing_table())


def rivals_of_4_bits() -> str:
    """How much longer the fastest takes, in the run in which they took part."""
    found = [row for row in rows("gpu_decode_rivals") if row["preset"] == "k4v4"]
    slower = [row["against_4bit"] for row in found]
    assert len(slower) == 20
    return f"took {min(slower):.1f} to {max(slower):.1f} times as long as k4v4"


def test_rivals_of_4_bits() -> None:
    expect("docs/results.md", rivals_of_4_bits())


def mixed_load() -> tuple[str, str, str]:
    """The number of requests, the table, and the speed of prompts of new lengths."""
    found = {(row["kv"], row["measure"]): row for row in rows("vllm_engine_mixed")}
    assert len({row["commit"] for row in found.values()}) == 1
    own = found["auto", "mixed"]
    tokens = sum(own["load"][kind] for kind in ("prompt_tokens", "output_tokens"))
    assert tokens > 2 * found["auto", "capacity"]["value"]
    lines = []
    for kv in ("auto", "fp8", "k4v4", "k2v2"):
        row = found[kv, "mixed"]
        assert row["load"] == own["load"]
        first, later = row["ttft_ms"], row["tpot_ms"]
        lines.append(
            line(
                "auto (bf16)" if kv == "auto" else kv,
                f"{row['value']:,.0f} ({speed(row['value'], own['value'])})",
                f"{first['p50'] / 1e3:.1f} / {first['p99'] / 1e3:.1f}",
                f"{later['p50']:.1f} / {later['p99']:.1f}",
            )
        )
    new = [
        speed(found[kv, "new_lengths"]["value"], found["auto", "new_lengths"]["value"])
        for kv in ("k4v4", "k2v2")
    ]
    return str(own["load"]["requests"]), "\n".join(lines), f"{new[0]} (k2v2: {new[1]})"


def test_a_mixed_load_in_vllm() -> None:
    requests, table, new = mixed_load()
    expect("docs/results.md", f"{requests} requests", table, f"prefilled at {new} of bf16's speed")


def tiles_table() -> str:
    """Steps with another tile and with the one that is taken, in one run; the slowest first."""
    lines = []
    for row in sorted(rows("gpu_decode_tiles"), key=lambda row: -row["ms"]["step"]):
        batch, tokens, query_heads, kv_heads, head_dim, *_ = row["shape"].values()
        other = row["other"]
        tile = ", ".join(
            f"{name} {value} / {row['tile'][name]}"
            for name, value in other["tile"].items()
            if value != row["tile"][name]
        )
        times = (f"{1e3 * ms:.1f}" for ms in (other["ms"]["step"], row["ms"]["step"]))
        heads = f"{query_heads}/{kv_heads} of {head_dim}"
        lines.append(line(row["preset"], heads, f"{batch} x {tokens:,}", tile, *times))
    return "\n".join(lines)


def test_tiles_that_were_replaced() -> None:
    expect("docs/measurements.md", tiles_table())


def wide_table() -> str:
    """Steps of two versions, and with pairs of warps; each pair of one run."""
    lines = []
    for row in (row for row in rows("gpu_decode_wide") if "shape" in row):
        batch, tokens, query_heads, kv_heads, head_dim, *_ = row["shape"].values()
        times = (f"{1e3 * of['ms']['step']:.1f}" for of in (row["other"], row))
        heads, size = f"{query_heads}/{kv_heads} of {head_dim}", f"{batch} x {tokens:,}"
        if row["bench"] in ("decode, two versions", "decode, pairs of warps"):
            lines.append(line(row["preset"], heads, size, *times))
    assert len(lines) == 22
    return "\n".join(lines)


def wide_parts() -> str:
    found = [row for row in rows("gpu_decode_wide") if "without" in row]
    both: dict[str, list[str]] = {}
    for row in found:
        both.setdefault(row["without"], []).append(f"{1e3 * row['ms']['step']:.1f}")
    return "\n".join(line(part, *times) for part, times in both.items())


def wide_instructions() -> str:
    found = [row for row in rows("gpu_decode_wide") if row["bench"] == "instructions"]
    return "\n".join(line(row["loop"], row["warps_per_sm"], row["cycles"]) for row in found)


def test_wide_groups() -> None:
    table = wide_table().splitlines()
    tables = "\n".join(table[:18]), "\n".join(table[18:]), wide_parts(), wide_instructions()
    expect("docs/measurements.md", *tables)


class Engine:
    """Figures of the engines of vLLM 0.32 on a GPU, by cache, measure and size."""

    def __init__(self) -> None:
        found = [
            row
            for row in rows("vllm_engine")
            if row["device"] == "cuda"
            and row["vllm"] == "0.32.0"
            and row["model"] == "llama-3.1-8b"
        ]
        self.commits = {row["commit"] for row in found}
        self.caches = list(dict.fromkeys(row["kv"] for row in found))
        self._values = {
            (
                row["kv"],
                row["measure"],
                row.get("batch"),
                row.get("context") or row.get("tokens"),
            ): float(row["value"])
            for row in found
        }

    def has(self, kv: str, measure: str, size: str | None = None) -> bool:
        return self._key(kv, measure, size) in self._values

    def value(self, kv: str, measure: str, size: str | None = None) -> float:
        return self._values[self._key(kv, measure, size)]

    def ratio(self, kv: str, measure: str, size: str | None = None) -> float:
        return self.value(kv, measure, size) / self.value("auto", measure, size)

    def faster(self, kv: str, size: str) -> str:
        """Time per output token: how many times as fast as bf16."""
        return f"{1 / self.ratio(kv, 'tpot', size):.2f}x"

    @staticmethod
    def _key(kv: str, measure: str, size: str | None) -> tuple[Any, ...]:
        return kv, measure, *(ENGINE_SIZES[size] if size else (None, None))


def mixed_load_of_today() -> dict[str, Row]:
    """The newest run by cache, with the window in 8 bits."""
    return {row["kv"]: row for row in rows("vllm_engine_loads") if row["measure"] == "mixed"}


def test_the_first_screen_of_the_readme() -> None:
    layout, engine = layout_of("k4v4"), Engine()
    size, plain = (32 * count / 2**30 for count in (layout.total_bytes(2**17), 2**17 * 4096))
    tpot = [engine.faster(kv, "8 x 32k") for kv in ("k4v4", "fp8", "turboquant_4bit_nc")]
    models = [found["k4v4"] for found in by_model("default").values()]
    kl, growth = (max(x[name] for x in models) for name in ("kl", "perplexity_increase"))
    ours, bf16 = (mixed_load_of_today()[kv] for kv in ("k4v4", "auto"))
    expect(
        "README.md",
        f"128k tokens of Llama-3.1-8B take {size:.1f} GiB instead of {plain:.0f} GiB. In vLLM, "
        f"{engine.ratio('k4v4', 'capacity'):.2f} times as many tokens fit, besides room for the "
        "newest tokens of 256 sequences",
        f"decodes {tpot[0]} as fast as with bf16 at 8 x 32k tokens (fp8: {tpot[1]}, vLLM's own "
        f"TurboQuant: {tpot[2]}) and {engine.faster('k4v4', '1 x 2k')} at 1 x 2k.",
        f"{speed(ours['value'], bf16['value'])} the output tokens per second",
        f"TPOT of {ours['tpot_ms']['p99']:.1f} ms instead of {bf16['tpot_ms']['p99']:.1f} ms",
        f"KL of at most {kl:.4f} nats/token and {100 * growth:+.2f}% perplexity on four models",
        f"In vLLM, on shorter prompts, the worst is {worst_in_vllm()[-1]} with k2v2.",
    )


def test_the_readme_on_lengths_that_differ_and_on_prefill() -> None:
    served: dict[str, float] = {}
    prompts: dict[str, list[float]] = {}  # of each run
    for row in rows("vllm_engine_loads"):
        share = row.get("ratios", {}).get("to auto")
        if row["kv"] != "k4v4" or share is None:
            continue
        if row["measure"] == "prefill":
            prompts.setdefault("batch" if "batch" in row else str(row["tokens"]), []).append(share)
        elif "ragged" in row:
            served[f"{row['batch']}"] = 1 / share

    def span(tokens: str) -> str:
        least, most = (f"{x:.2f}x" for x in (min(prompts[tokens]), max(prompts[tokens])))
        return least if least == most else f"{least} to {most}"

    expect(
        "README.md",
        f"decode {served['128']:.2f}x (128 of 1k to 3k tokens) and {served['256']:.2f}x (256 of "
        "0.5k to 1.5k) as fast",
        f"prefilled at {span('1024')} of bf16's speed with 1k tokens, {span('2048')} with 2k and "
        f"{span('8192')} with 8k; batches of prompts at {span('batch')}",
    )
    expect(
        "docs/results.md",
        f"prefilled at {span('1024')} of bf16's speed, one of 2,048 at {span('2048')} and one of "
        f"8,192 at {span('8192')}",
        f"Batches of prompts are prefilled at {span('batch')}",
    )


def engine_table() -> str:
    engine = Engine()
    assert len(engine.commits) == 1 and len(engine.caches) == 8

    def time(kv: str, size: str) -> str:
        if not engine.has(kv, "tpot", size):
            return "-"
        value = f"{engine.value(kv, 'tpot', size):.2f}"
        return value if kv == "auto" else f"{value} ({engine.faster(kv, size)})"

    def prefill(kv: str, size: str) -> str:
        there = engine.has(kv, "prefill", size)
        return f"{engine.ratio(kv, 'prefill', size):.2f}" if there else "-"

    lines = []
    for kv in engine.caches:
        tokens = f"{engine.value(kv, 'capacity'):,.0f}"
        if kv != "auto":
            tokens += f" ({engine.ratio(kv, 'capacity'):.2f}x)"
        name = "auto (bf16)" if kv == "auto" else kv
        prefills = " / ".join(prefill(kv, size) for size in ENGINE_SIZES)
        times = (time(kv, size) for size in ENGINE_SIZES)
        lines.append(line(name, tokens, *times, prefills))
    return "\n".join(lines)


def test_vllm_engines() -> None:
    expect(
        "docs/results.md",
        line("cache", "tokens that fit", *ENGINE_SIZES, "prefill"),
        engine_table(),
    )
    expect("docs/export.md", f"takes {Engine().value('k4v4', 'tpot', '32 x 8k'):.2f} ms")


def test_loads_of_any_lengths_in_vllm() -> None:
    """Rows with single steps fill the tables of benchmarks/engine_loads.py."""
    found, loads = rows("vllm_engine_loads"), load_script("engine_loads")
    for of in loads.loads(found).values():
        assert len({row["commit"] for row in of.values()}) == 1
    assert any("ragged" in row for row in found)
    expect("docs/results.md", *(loads.table(title, found) for title in loads.TABLES))
    ours, own = (mixed_load_of_today()[kv] for kv in ("k4v4", "auto"))
    expect(
        "docs/results.md",
        f"{own['value']:,.0f} tokens/s with bf16 and {ours['value']:,.0f} with k4v4 "
        f"({speed(ours['value'], own['value'])}), p99 of TPOT {own['tpot_ms']['p99']:.1f} and "
        f"{ours['tpot_ms']['p99']:.1f} ms",
    )


def loads_by_hand() -> list[Row]:
    """Two loads of the same tokens in two caches, in vLLM."""
    made = []
    for kv, share in (("auto", 1.0), ("k4v4", 0.5)):
        for ragged in (None, [1024, 3072]):
            row = {"measure": "tpot", "kv": kv, "device": "cuda", "batch": 128, "context": 2048}
            row |= {} if ragged is None else {"ragged": ragged}
            times = {"p50": 20 * share, "p90": 21 * share, "p99": 22 * share}
            row |= {"value": 16 * share, "step_ms": times, "host_ms": {"p50": 4.0}, "ratios": {}}
            made.append(row)
    made[2]["ratios"] = {"steps that complete pages to others": 1.27}
    return made


def test_tables_of_loads() -> None:
    script, made = load_script("engine_loads"), loads_by_hand()
    assert script.table("TPOT as served, ms", made).splitlines()[2:] == [
        "| 128 x 2,048 | 16.00 | 8.00 (0.50) |",
        "| 128 x 1,024 to 3,072 | 16.00 | 8.00 (0.50) |",
    ]
    tables = {title: script.table(title, made).splitlines() for title in script.TABLES}
    steps = tables["single steps, p50 / p90 / p99, ms"]
    assert steps[3].endswith("| 20.00 / 21.00 / 22.00 | 10.00 / 10.50 / 11.00 (0.50) |")
    assert tables["host time per step, ms"][2].endswith("| 4.00 | 4.00 (1.00) |")
    assert tables["completing pages / not"][2:] == [
        "| 128 x 2,048 | - | 1.27x |",
        "| 128 x 1,024 to 3,072 | - | - |",
    ]
    assert script.table("TPOT as served, ms", made[2:]) == ""  # nothing to compare with


def test_the_plot_shows_ragged_loads_beside_equal_ones() -> None:
    plots, made = load_script("plots"), loads_by_hand()
    found = plots.engine_speeds(made)
    assert [plots.label_of(load) for load in found] == ["128 x 2k", "128 x 1-3k"]
    assert all(speeds == {"k4v4": 2.0} for speeds in found.values())
    assert {load.ragged for load in plots.drawn_engines()} == {False, True}


def test_the_start_up_line_of_vllm_is_that_of_smollm2() -> None:
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 3, 64, torch.bfloat16)
    block = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128, torch.bfloat16)
    saved = SAVED_SINKS * layout.cfg.sinks * layout.exact_bytes_per_token
    ring = ring_size(layout.cfg, 0)
    rings = 8 * 30 * (layout.sequence_bytes(ring) + saved) / 2**20
    expect(
        "docs/vllm.md",
        f"tightkv k4v4: {30 * layout.bytes_per_token:,.0f} bytes per token in 30 layers, "
        f"{layout.ratio:.2f} times the tokens of a 16-bit cache ({30 * 4 * 3 * 64:,} bytes); exact "
        f"rings for 8 sequences take {rings:.1f} MiB",
        f"holds {block.ratio:.2f} times the tokens of vLLM's own",
    )


def test_limits_in_vllm() -> None:
    ring = PageLayout(KVQuantConfig(), 8, 128, torch.bfloat16).ring_tokens
    expect(
        "docs/vllm.md",
        f"**Long prompts** ({MIN_QUERIES} new tokens or more)",
        f"up to {SHORT_PROMPT} new tokens of a prompt",
        f"more than {RING_SLACK} speculative tokens",
    )
    expect("docs/eval.md", f"fit the ring of a config ({ring} tokens by default)")


# --- CPUs ----------------------------------------------------------------------------------------
MACHINES = {"aarch64": "Neoverse-N1", "x86_64": "Sapphire Rapids"}


def cpu_rows() -> dict[tuple[str, str, int, str, int], tuple[float, float]]:
    """(machine, instruction set, threads, heads, tokens) -> ratios of the newest row.

    Of the step, and of attention alone.
    """
    found = {}
    for row in sorted(rows("cpu_decode"), key=lambda row: row["time"]):
        shape, times = row["shape"], row["ms"]
        attention: dict[str, float] = row.get("attention_ms", times)
        # Until 2026-11-16 attention and append were timed apart, and torch had no append.
        ours = times["tightkv"] + times.get("append", 0.0)
        torchs = [name for name in times if name.startswith("sdpa")]
        heads = f"{shape['query_heads']}/{shape['kv_heads']} of {shape['head_dim']}"
        key = (MACHINES[row["machine"]], row["isa"], row["threads"], heads, shape["tokens"])
        found[key] = (
            min(times[name] for name in torchs) / ours,
            min(attention[name] for name in torchs) / attention["tightkv"],
        )
    return found


def test_every_row_of_a_cpu_is_in_the_table() -> None:
    """A line for each instruction set and shape, a column for each number of threads."""
    found = cpu_rows()
    for machine, isa, heads, tokens in {(m, i, h, n) for m, i, _, h, n in found}:
        cells = []
        for threads in (1, 2, 8, 16):
            ratios = found.get((machine, isa, threads, heads, tokens))
            cells.append(f"{ratios[0]:.2f}x ({ratios[1]:.2f}x)" if ratios else "")
        line = f"| {machine}, `{isa}` | {heads} | {tokens:,} | {' | '.join(cells)} |"
        expect("docs/cpu.md", line)


def test_the_slowest_runs_with_and_without_vbmi() -> None:
    slowest: dict[tuple[Any, ...], float] = {}
    machines = {"Intel(R) Xeon(R) Processor": "Sapphire Rapids"}  # the other says its frequency
    for row in rows("cpu_vnni"):
        machine = machines.get(row["cpu"], "Cascade Lake")
        shape = row["shape"]
        key = (machine, row["isa"], row["preset"], shape["query_heads"], shape["tokens"])
        slowest[key] = min(row["ratios"]["fastest sdpa"], slowest.get(key, math.inf))
    cells = (("k4v4", 32, 8192), ("k4v4", 32, 2048), ("k4v4", 9, 4096), ("k2v2", 32, 8192))
    for machine, isa in sorted({key[:2] for key in slowest}):
        keys = [(machine, isa, *cell) for cell in cells]
        ratios = " | ".join(f"{slowest[key]:.2f}x" for key in keys)
        expect("docs/cpu.md", f"| {machine}, `{isa}` | {ratios} |")


def cpu_words() -> str:
    found = cpu_rows()

    def span(isa: str) -> str:
        steps = [step for (_, name, *_), (step, _) in found.items() if name == isa]
        return f"{min(steps):.2f}x to {max(steps):.2f}x"

    return (
        f"{span('dotprod')} as fast as torch's attention on a 2-core ARM machine, {span('vnni')} "
        f"on 1 to 16 cores of a Sapphire Rapids, and {span('avx2')} there with AVX2 alone"
    )


def test_the_results_have_the_worst_and_the_best_of_a_cpu() -> None:
    expect("docs/results.md", cpu_words())


def test_speculation() -> None:
    found = {(row["cache"], row["drafts"], row["batch"]): row for row in rows("speculation")}
    for batch in (1, 8):
        cells = []
        for cache in ("auto", "k4v4"):
            drafted = found[cache, 3, batch]
            gain = drafted["ratios"]["to no speculation"]
            cells += [
                f"{found[cache, 0, batch]['tpot_ms']:.2f}",
                f"{drafted['tpot_ms']:.2f} ({gain:.2f}x)",
            ]
        expect("docs/vllm.md", f"| {batch} | {' | '.join(cells)} |")


def test_agents_that_come_back() -> None:
    found = {(row["cache"], row["round"]): row for row in rows("agent_replay")}
    for name, cache in (("bf16", "auto"), ("fp8", "fp8"), ("k4v4", "k4v4")):
        late, first = found[cache, "late"], found[cache, 1]
        assert late["requests"] == 2 * late["agents"], "a round was cut short"
        times = (late["ttft_ms"], late["ttft_ms_p90"], first["ttft_ms"])
        cells = [f"{100 * late['hit_rate']:.1f}%", *(f"{ms:.1f}" for ms in times)]
        expect("docs/vllm.md", f"| {name} | {' | '.join(cells)} |")
    sizes = ("agents", "context", "system", "question", "rounds", "gpu_gib", "host_gib", "layers")
    assert {tuple(row[name] for name in sizes) for row in found.values()} == {
        (24, 12288, 2048, 256, 4, 1, 4, 12)
    }


FAULTS = {
    "is missing, short or cannot be read": (
        *("cut", "delete", "delete_folder", "half_written", "no_file"),
        *("late_cut", "late_delete", "late_error"),
    ),
    "is longer, is read slowly, or the store's index is gone": (
        "extend",
        "drop_index",
        "late_delay",
    ),
    "has other bytes": ("flip", "zero", "late_flip"),
    "is that of another block, or its layers are": (
        *("exchange_blocks", "exchange_prompts", "other_prompt", "other_layers"),
    ),
    "is of another seed, preset, version, model or number of ranks": tuple(
        f"foreign_{name}" for name in ("seed", "preset", "version", "weights", "ranks")
    ),
    "and all others are of such an engine": tuple(
        f"store_of_other_{name}" for name in ("seed", "preset", "version", "weights", "ranks")
    ),
    "is left by a writer that was killed, or by an engine before": (
        *("killed_engine", "killed_writer", "restart"),
    ),
}


def test_faults_in_stores() -> None:
    names = ("faults", "answers", "right", "missed", "refused", "wrong")
    tables: dict[str, dict[str, Counter[str]]] = {}
    for row in rows("faults"):
        assert not row["problems"]
        of_store = tables.setdefault(row["store"], {})
        of_store.setdefault(row["fault"], Counter()).update({name: row[name] for name in names})

    def total(store: str, faults: Iterable[str]) -> Counter[str]:
        return sum((tables[store].get(fault, Counter()) for fault in faults), Counter[str]())

    for line, kinds in FAULTS.items():
        checked, vllm = (total(f"files, {tier}", kinds) for tier in ("checked", "vllm"))
        counts = [checked[name] for name in ("faults", "answers", "right", "missed", "wrong")]
        cells = [f"{count:,}" for count in (*counts, vllm["answers"], vllm["wrong"])]
        expect("docs/vllm.md", f"| {line} | {' | '.join(cells)} |")
    faults = {kind for kinds in FAULTS.values() for kind in kinds}
    for tier in ("checked", "vllm"):
        assert tables[f"files, {tier}"].keys() - faults <= {"none"}
    checked, saved = (total(x, tables[x]) for x in ("files, checked", "TightCache.save"))
    assert checked["wrong"] == saved["wrong"] == 0
    expect(
        "docs/vllm.md",
        f"{checked['faults']:,} faults and {checked['answers']:,} answers, none of them wrong",
        f"{saved['faults']:,} faults in files of `TightCache.save`: {saved['refused']:,} refused",
    )
    expect("docs/log.md", f"{checked['faults']:,} faults", f"{saved['faults']:,} faults")


# --- exported models ------------------------------------------------------------------------------
def step_cells(row: Row, names: tuple[str, ...], digits: int) -> str:
    ms, ratios = row["ms"], row["ratios"]
    others = [
        f"{ms[name]:.{digits}f} ({ratios[name]:.2f}x)" if name in ms else "" for name in names
    ]
    return " | ".join([f"{ms['k4v4']:.{digits}f}", *others])


def test_packages_on_a_cpu() -> None:
    names, found = ("fp32", "bf16"), rows("export_cpu")
    lines = [f"| {row['context']:,} tokens | {step_cells(row, names, 1)} |" for row in found]
    (memory,) = rows("export_memory")
    sizes = [f"{memory['cache_bytes'][name] / 2**20:.1f}" for name in ("k4v4", *names)]
    lines.append(f"| caches for 8,192 tokens, MiB | {' | '.join(sizes)} |")
    expect("docs/export.md", *lines)


def test_exported_models_on_a_gpu() -> None:
    (found,) = rows("export_gpu")
    ours, bf16 = found["ms"]["k4v4"], found["ms"]["bf16"]
    lines = [
        f"| {name} | {ours[key]:.2f} | {bf16[key]:.2f} ({bf16[key] / ours[key]:.2f}x) |"
        for name, key in (("called", "called"), ("CUDA graph", "graph"))
    ]
    size = {name: count / 2**30 for name, count in found["cache_bytes"].items()}
    lines.append(f"| caches, GiB | {size['k4v4']:.2f} | {size['bf16']:.2f} |")
    lines.append(f"vLLM's step with k4v4 for the same batch takes {found['vllm_k4v4_ms']:.2f} ms")
    expect("docs/export.md", *lines)


def test_bytes_of_exported_caches() -> None:
    (memory,) = rows("export_memory")
    mib = {name: size / 2**20 for name, size in memory["parts"].items()}
    whole, share = sum(mib.values()), memory["of_bf16"]
    expect(
        "docs/export.md",
        f"Of k4v4's {whole:.1f} MiB, which are {share:.3f} of bf16's, {mib['pages']:.1f} are "
        f"pages, {mib['ring']:.1f} the exact tokens of the rings, and {mib['feedback']:.1f} the",
    )
    ring = 30 * layout_of("k4v4", 3, 64).ring_tokens * 3 * (5 * 64 // 2 + 4) / 2**20  # of 8 bits
    now, bf16 = whole - mib["ring"] + ring, memory["cache_bytes"]["bf16"] / 2**20
    expect(
        "docs/export.md",
        f"With today's rings, of {ring:.1f} MiB, the caches take {now:.1f} MiB, {now / bf16:.3f} "
        "of bf16's (computed)",
    )
    expect("docs/results.md", f"in {share:.2f} of the bytes of a bf16 cache")


def test_executorch() -> None:
    """Milliseconds per token, and how many times ours that is."""
    names = ("fp32", "bf16", "int8")
    found = rows("export_executorch")
    model = [row for row in found if row["bench"] == "executorch"]
    (kernel,) = [row for row in found if row["bench"] == "executorch kernel"]
    lines = [f"| {row['context']:,} tokens | {step_cells(row, names, 1)} |" for row in model]
    lines.append(f"| 16/2 heads of 256, 4,096 tokens | {step_cells(kernel, names, 2)} |")
    size = model[-1]["cache_bytes"] | rows("export_memory")[0]["cache_bytes"]
    sizes = [f"{size[name] / 2**20:.1f}" for name in ("k4v4", *names)]
    lines.append(f"| caches for 8,192 tokens, MiB | {' | '.join(sizes)} |")
    expect("docs/export.md", *lines)
    at_2k = next(row["ratios"] for row in model if row["context"] == 2048)
    at_8k = next(row["ratios"] for row in model if row["context"] == 8192)
    expect(
        "docs/results.md",
        f"{at_2k['fp32']:.2f}x as fast at 2,048 tokens and {at_8k['fp32']:.2f}x at 8,192 as with "
        f"ExecuTorch's own float32 cache, {at_2k['int8']:.2f}x and {at_8k['int8']:.2f}x as with "
        f"its int8 cache, in {size['k4v4'] / size['bf16']:.2f} of the bytes of a bf16 cache",
    )


def test_how_slow_plain_torch_is() -> None:
    found = [row["ratios"] for row in rows("cpu_decode")]
    slow = [ratios["reference"] for ratios in found if "reference" in ratios]
    expect(
        "docs/kernels.md",
        f"decodes {min(slow):.0f} to {max(slow):.0f} times slower than the native",
    )


# --- the comparison and the log ------------------------------------------------------------------
def comparison_names() -> Iterator[tuple[str, str]]:
    """The name of a row -> its name in the table."""
    for exact, count in (("", None), (" exact_pages=2", 128)):
        told = "" if count is None else f", window of {count}"
        yield f"tightkv k4v4{exact}", f"**TightCache k4v4**{told}"
    for pages, count in ((None, None), (4, 128), (2, 64)):
        told = ("", "") if count is None else (f" exact_pages={pages}", f", window of {count}")
        yield f"tightkv k2v2{told[0]}", f"**TightCache k2v2**{told[1]}"
    yield "tightkv k3v3", "**TightCache k3v3**"
    yield "hqq 4 axis=0", "QuantizedCache, hqq 4 bits, axis 0"
    for bits in (2, 4):
        yield f"quanto {bits}", f"QuantizedCache, quanto {bits} bits"
        yield f"hqq {bits}", f"QuantizedCache, hqq {bits} bits, axis 1"
        yield f"kivi-style {bits}", f"as KIVI, {bits} bits"
        yield f"turbokv {bits}", f"turbokv {bits} bits"


@pytest.mark.parametrize(("name", "title"), list(comparison_names()))
def test_comparison(name: str, title: str) -> None:
    (row,) = (row for row in rows("comparison") if row["cache"] == name)
    growth = 100 * (row["perplexity"] / row["reference_perplexity"] - 1)
    (plain,) = (row for row in rows("comparison") if row["cache"] == "dynamic")
    sizes = [
        "fails" if isinstance(size, str) else f"{size / plain['bytes'][tokens]:.2f}"
        for tokens, size in row["bytes"].items()
    ]
    expect(
        "docs/comparison.md",
        f"| {title} | {row['kl']:.4f} | {row['top1']:.3f} | {growth:+.1f}% | {' | '.join(sizes)} | "
        f"{row['decode']['ratio']:.2f} |",
    )


def test_comparison_has_every_row() -> None:
    named = {name for name, _ in comparison_names()}
    assert {row["cache"] for row in rows("comparison")} == {*named, "dynamic"}


def test_comparison_in_words() -> None:
    found = {row["cache"]: row for row in rows("comparison")}
    kl = {name: row["kl"] for name, row in found.items()}
    speeds = [row["decode"]["ratio"] for name, row in found.items() if name.startswith("tightkv")]
    share = {
        name: row["bytes"]["1024"] / found["dynamic"]["bytes"]["1024"]
        for name, row in found.items()
        if not isinstance(row["bytes"]["1024"], str)
    }
    ours = {name for name in share if name.startswith("tightkv")}
    rivals = share.keys() - ours - {"dynamic"}
    least = min(share[name] for name in ours)
    for other in rivals:  # whoever takes as many bytes as some config of ours gives worse answers
        assert share[other] < least or any(
            share[own] <= share[other] * 1.02 and kl[own] < kl[other] for own in ours
        ), other
    best = {bits: min(kl[x] for x in kl if x in rivals and bits in x) for bits in ("4", "2")}
    expect(
        "docs/comparison.md",
        f"Its KL is {best['4'] / kl['tightkv k4v4']:.0f} times smaller at 4 bits and "
        f"{best['2'] / kl['tightkv k2v2']:.0f} times smaller at 2 bits",
        f"its KL is {best['4'] / kl['tightkv k4v4 exact_pages=2']:.0f} and "
        f"{best['2'] / kl['tightkv k2v2 exact_pages=4']:.0f} times smaller",
        f"has {kl['tightkv k2v2'] / kl['quanto 4']:.2f} of the KL of quanto at 4 bits in "
        f"{share['tightkv k2v2'] / share['quanto 4']:.2f} of its bytes",
        f"{min(speeds):.2f} to {max(speeds):.2f} of the uncompressed speed",
    )


def test_comparison_with_turboquant_hf() -> None:
    found = {row["cache"]: row for row in rows("comparison_turboquant_hf")}
    kl = {name: f"{row['kl']:.4f}" for name, row in found.items()}
    plain = found["dynamic"]["bytes"]["1024"]
    theirs = [found[f"turboquant-hf {bits}"] for bits in (4, 2)]
    held = " and ".join(f"{row['bytes']['1024'] / plain:.2f}" for row in theirs)
    (speed,) = {f"{row['decode']['ratio']:.2f}" for row in theirs}
    expect(
        "docs/comparison.md",
        f"{kl['turboquant-hf 4']} at 4 bits (k4v4: {kl['tightkv k4v4']})",
        f"{kl['turboquant-hf 2']} at 2 bits (k2v2: {kl['tightkv k2v2']})",
        f"it held {held} of the bytes at 1,024 tokens",
        f"it decoded at {speed} of the uncompressed speed",
    )


def test_whole_models() -> None:
    for row in rows("gpu_model"):
        size = next(n for n, s in SIZES.items() if s == (row["batch"], row["context"]))
        ratios, most = (
            row["ratios"],
            [row[side]["largest_batch"] for side in ("bf16", "compressed")],
        )
        expect(
            "docs/measurements.md",
            f"| {size} | {row['bf16']['ms']:.1f} | {row['compressed']['ms']:.1f} | "
            f"{ratios['tokens/s']:.2f}x | {ratios['cache bytes']:.2f} | {most[0]} -> {most[1]} |",
        )


def test_quality_of_the_presets_by_eval() -> None:
    for row in rows("eval"):
        if row["quality"]:
            found, greedy = row["quality"], ", ".join(map(str, row["greedy"]["lengths"]))
            growth = 100 * found["perplexity_increase"]
            shown = f"{growth:+.1f}%" if growth >= 0.995 else f"{growth:+.2f}%"
            expect("docs/measurements.md", f"| {100 * found['top1']:.1f}% | {shown} | {greedy} |")


def test_pools_grow_as_the_log_says() -> None:
    expect("docs/log.md", f"Pools grow by a {POOL_GROWTH}th now")


def needle_counts() -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    """Found and asked, by model and cache."""
    found: dict[tuple[str, str], int] = {}
    asked: dict[tuple[str, str], int] = {}
    for row in rows("eval_needles"):
        if row["task"] == "needles":
            config = row["config"]
            cache = "exact" if config is None else "calibrated" if row["calibration"] else "k2v2"
            key = row["model"]["name"], cache
            found[key] = found.get(key, 0) + sum(x["found"] for x in row["result"])
            asked[key] = asked.get(key, 0) + sum(x["asked"] for x in row["result"])
    return found, asked


def test_needles_with_a_calibration() -> None:
    found, asked = needle_counts()
    draws: dict[str, list[str]] = {"exact": [], "calibrated": []}
    for row in rows("eval_needles"):
        if row["task"] == "needles" and row["model"]["name"].startswith("SmolLM2"):
            cache = "exact" if row["config"] is None else "calibrated" if row["calibration"] else ""
            if cache:
                draws[cache].append(str(sum(x["found"] for x in row["result"])))
    own, ours = (f"{', '.join(of[:-1])} and {of[-1]}" for of in draws.values())
    expect("docs/calibrate.md", f"finds {ours}, the uncompressed one {own}.")
    models = {name for name, _ in found}
    assert len(models) == 3
    for name in models:
        counts = [found[name, cache] for cache in ("exact", "k2v2", "calibrated")]
        (total,) = {asked[name, cache] for cache in ("exact", "k2v2", "calibrated")}
        expect("docs/calibrate.md", line(name, total, *counts))
