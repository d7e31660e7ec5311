"""Figures of the documentation, computed again from the rows that they come from.

Who measures again changes the rows, sees which lines are missing, and writes these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import load_script
from tightkv import KVQuantConfig
from tightkv.integrations.vllm.step.batch_split import SHORT_PROMPT
from tightkv.integrations.vllm.step.ring_table import SAVED_SINKS
from tightkv.kernels.prefill import MIN_QUERIES
from tightkv.paged.cache import POOL_GROWTH
from tightkv.pages.layout import RING_SLACK, SIDES, PageLayout

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


# --- results and README ---------------------------------------------------------------------------
def quality(preset: str) -> Row:
    found = [row for row in rows("eval") if row["name"] == preset and row["quality"]]
    return found[-1]["quality"]


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v3", "k3v2", "k2v2"])
def test_presets(preset: str) -> None:
    layout = PageLayout(KVQuantConfig.preset(preset), 8, 128, torch.bfloat16)
    plain = 4 * 8 * 128

    def ratio(tokens: int) -> str:
        return f"{tokens * plain / layout.total_bytes(tokens):.2f}x"

    size = f"{layout.bytes_per_token / 8:g}"
    cells = [size, f"{layout.ratio:.2f}x", ratio(32768), ratio(8192)]
    expect("docs/results.md", f"| {preset} | {' | '.join(cells)} | {quality(preset)['kl']:.4f} |")


@pytest.mark.parametrize("preset", ["k8v4", "k4v4", "k3v3", "k2v2"])
def test_presets_in_the_readme(preset: str) -> None:
    layout = PageLayout(KVQuantConfig.preset(preset), 8, 128, torch.bfloat16)
    ratio = 32768 * 4 * 8 * 128 / layout.total_bytes(32768)
    (speed,) = (
        row["against_best_bf16"]
        for row in rows("gpu_decode") + rows("gpu_decode_8bit")
        if row["preset"] == preset and (row["shape"]["batch"], row["shape"]["tokens"]) == (8, 32731)
    )
    kls = [found[preset]["kl"] for found in by_model("default").values() if preset in found]
    kl = max(kls or [quality(preset)["kl"]])  # of the worst model; k8v4 is of one model
    cells = f"{layout.bytes_per_token / 8:g} | {ratio:.2f} | {kl:.4f} | {speed:.2f}"
    expect("README.md", f"| {preset} | {cells} |")


def by_model(how: str) -> dict[str, dict[str, Row]]:
    """Results of windows of 2,048 tokens: by model and preset, `how` default or calibrated."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("eval_feedback"):
        config = row["config"]
        if config is None or row["result"]["positions"] == 16383:
            continue
        if how == ("calibrated" if config["calibration"] else "default"):
            preset = f"k{config['key_bits']}v{config['value_bits']}"
            found.setdefault(row["model"]["name"], {})[preset] = row["result"]
    return found


def test_models_in_the_readme() -> None:
    """The worst first."""
    lines = []
    for how in ("default", "calibrated"):
        models = sorted(by_model(how).items(), key=lambda x: -x[1]["k4v4"]["kl"])
        assert len(models) == 3
        for name, found in models:
            results = [found[preset] for preset in ("k4v4", "k3v3", "k2v2")]
            cells = [f"{x['kl']:.4f} ({100 * x['perplexity_increase']:+.1f}%)" for x in results]
            lines.append(f"| {name}, {how} | {' | '.join(cells)} |")
    expect("README.md", "\n".join(lines))


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
    limit = layout.exact_limit
    sizes = [
        32 * layout.total_bytes(tokens, encode_partial_page=False, exact_limit=limit) / 2**20
        for tokens in (256, 1024, 4096)
    ]
    cells = [str(limit + 1), *(f"{size:.1f}" for size in sizes)]
    expect("docs/plan.md", f"| {preset} | {' | '.join(cells)} |")
    if preset == "k4v4":
        for page in ("README.md", "docs/index.md"):
            expect(page, f"until pages take less (k4v4: {limit + 1} tokens)")


def test_perplexity_and_needles() -> None:
    growth = [
        100 * quality(name)["perplexity_increase"] for name in ("k4v4", "k3v3", "k3v2", "k2v2")
    ]
    found = {
        row["name"]: sum(entry["found"] for entry in row["needles"])
        for row in rows("eval")
        if row["needles"]
    }
    first = next(row for row in rows("eval") if row["needles"])
    exact = sum(entry["found"] for entry in first["reference"]["needles"])
    asked = sum(entry["asked"] for entry in first["needles"])
    expect(
        "docs/results.md",
        "perplexity grows by {:.1f}, {:.1f}, {:.1f} and {:.1f}% from k4v4 on".format(*growth),
        f"Of {asked} needles in contexts of 512 to 8,000 tokens the uncompressed cache finds "
        f"{exact}, k4v4 {found['k4v4']}, k3v3 {found['k3v3']}, k2v2 {found['k2v2']}.",
    )


def test_decode_steps_on_a_gpu() -> None:
    def cells(preset: str, against: str) -> str:
        found = []
        for batch, context in SIZES.values():
            (row,) = (
                row
                for row in rows("gpu_decode")
                if row["preset"] == preset
                and row["shape"]["batch"] == batch
                and context - 64 < row["shape"]["tokens"] <= context
            )
            found.append(f"{row[against]:.2f}x")
        return " | ".join(found)

    limits = []
    for preset in ("k4v4", "k3v3", "k2v2"):
        layout = PageLayout(KVQuantConfig.preset(preset), 8, 128, torch.bfloat16)
        limits.append(32768 * layout.exact_bytes_per_token / layout.total_bytes(32768))
    expect(
        "docs/results.md",
        "the limits at 32k tokens are {:.2f}x, {:.2f}x and {:.2f}x".format(*limits),
        f"| sequences x tokens | {' | '.join(SIZES)} |",
        *(
            f"| {preset} against the best bf16 | {cells(preset, 'against_best_bf16')} |"
            for preset in ("k4v4", "k3v3", "k2v2")
        ),
        f"| k4v4 against FlashInfer fp8 | {cells('k4v4', 'against_fp8')} |",
    )


def test_decode_steps_of_twenty_shapes() -> None:
    script, found = load_script("decode_shapes"), rows("gpu_decode_20_shapes")
    assert len({row["commit"] for row in found}) == 1
    text = script.table(found)
    assert len(text.splitlines()) == 22
    steps = {(row["preset"], *row["shape"].values()): row for row in found}
    eight = [steps[("k8v4", *shape, 32, 8, 128, False)] for shape in ((8, 32731), (32, 8155))]
    expect(
        "docs/results.md",
        text,
        "k8v4 takes {:.1f} and {:.1f} us".format(*(1e3 * row["ms"]["step"] for row in eight)),
        "({:.2f}x and {:.2f}x)".format(*(row["against_best_bf16"] for row in eight)),
    )


def test_steps_that_complete_pages() -> None:
    lines = []
    for row in rows("gpu_decode_20_shapes"):
        shape, ms = row["shape"], row["ms"]
        batch, tokens, *heads = shape.values()
        if row["preset"] == "k4v4" and heads == [32, 8, 128, False]:
            step, one, every = (
                1e3 * ms[f"vllm_step_with_feedback{more}"]
                for more in ("", "_and_seal_one", "_and_seal")
            )
            cells = (f"{x:.1f} ({x / step:.2f}x)" for x in (one, every))
            lines.append(f"| {batch} x {tokens:,} | {step:.1f} | {' | '.join(cells)} |")
    assert len(lines) == 9
    expect("docs/results.md", "\n".join(lines))


def test_a_mixed_load_in_vllm() -> None:
    found = {(row["kv"], row["measure"]): row for row in rows("vllm_engine_mixed")}
    assert len({row["commit"] for row in found.values()}) == 1
    own = found["auto", "mixed"]
    tokens = sum(own["load"][kind] for kind in ("prompt_tokens", "output_tokens"))
    assert tokens > 2 * found["auto", "capacity"]["value"]
    lines = []
    for kv in ("auto", "fp8", "k4v4", "k2v2"):
        row = found[kv, "mixed"]
        assert row["load"] == own["load"]
        speed = f"{row['value']:,.0f} ({row['value'] / own['value']:.2f}x)"
        first, later = row["ttft_ms"], row["tpot_ms"]
        name = "auto (bf16)" if kv == "auto" else kv
        lines.append(
            f"| {name} | {speed} | {first['p50'] / 1e3:.1f} / {first['p99'] / 1e3:.1f} | "
            f"{later['p50']:.1f} / {later['p99']:.1f} |"
        )
    first = [
        found[kv, "new_lengths"]["value"] / found["auto", "new_lengths"]["value"]
        for kv in ("k4v4", "k2v2")
    ]
    expect(
        "docs/results.md",
        f"{own['load']['requests']} requests",
        "\n".join(lines),
        "prefilled at {:.2f} (k2v2: {:.2f}) of bf16's speed".format(*first),
    )


def test_tiles_that_were_replaced() -> None:
    found = {}
    for row in rows("gpu_decode_tiles"):
        shape, other = tuple(row["shape"].values())[:5], row["other"]["tile"]
        found[(*shape, row["preset"], other["blocks_of_32"])] = row

    def both(shape: tuple[int, ...], *presets: str, tokens: int = 2) -> list[str]:
        of = [found[(*shape, preset, tokens)] for preset in presets]
        return [
            f"{1e3 * row['other']['ms']['step']:.1f} / {1e3 * row['ms']['step']:.1f}" for row in of
        ]

    most, wide, all_bits = (8, 32731, 96, 8, 128), (32, 8155, 64, 4, 128), ("k4v4", "k3v3", "k2v2")
    named = "k4v4 {}, k3v3 {}, k2v2 {}".format
    expect(
        "docs/log.md",
        "at 256 x 1k: " + named(*both((256, 1019, 32, 8, 128), *all_bits)),
        "96/8 heads " + named(*both(most, *all_bits, tokens=1)),
        "64/4 heads " + ", ".join(both(wide, *all_bits, tokens=1)),
        "8 columns: " + both((8, 32731, 64, 8, 128), "k2v2")[0] + " (64/8 heads)",
        "head_dim 64: " + both((32, 8155, 24, 8, 64), "k4v4")[0],
        "64/4 heads " + named(*both(wide, *all_bits)),
        "96/8 heads k4v4 {}, k3v3 {}.".format(*both(most, "k4v4", "k3v3")),
    )


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

    @staticmethod
    def _key(kv: str, measure: str, size: str | None) -> tuple[Any, ...]:
        return kv, measure, *(ENGINE_SIZES[size] if size else (None, None))


def test_the_first_screen_of_the_readme() -> None:
    layout, engine = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128, torch.bfloat16), Engine()
    size, plain = (32 * count / 2**30 for count in (layout.total_bytes(2**17), 2**17 * 4096))
    tpot = [engine.ratio(kv, "tpot", "8 x 32k") for kv in ("k4v4", "fp8", "turboquant_4bit_nc")]
    models = [found["k4v4"] for found in by_model("default").values()]
    kl, growth = (max(x[name] for x in models) for name in ("kl", "perplexity_increase"))
    expect(
        "README.md",
        f"128k tokens of Llama-3.1-8B take {size:.1f} GiB instead of {plain:.0f} GiB. In vLLM, "
        f"{engine.ratio('k4v4', 'capacity'):.2f} times as many tokens fit with exact rings for 256",
        f"takes {tpot[0]:.2f} of bf16's time at 8 x 32k tokens (fp8: {tpot[1]:.2f}, vLLM's own "
        f"TurboQuant: {tpot[2]:.2f}).",
        f"KL at most {kl:.4f} nats/token and {100 * growth:+.2f}% perplexity on three models",
        f"Prefill runs at {engine.ratio('k4v4', 'prefill', '8 x 32k'):.2f} of bf16's speed",
    )


def test_vllm_in_the_results() -> None:
    engine = Engine()
    assert len(engine.commits) == 1
    prefill = [engine.ratio("k4v4", "prefill", size) for size in ENGINE_SIZES]
    lines = []
    for kv in (name for name in engine.caches if name != "auto"):
        known = (engine.has(kv, "tpot", size) for size in ENGINE_SIZES)
        cells = [
            f"{engine.ratio(kv, 'tpot', size):.2f}" if there else "-"
            for size, there in zip(ENGINE_SIZES, known, strict=True)
        ]
        lines.append(f"| {kv} | {' | '.join(cells)} |")
    assert len(lines) == 7
    expect(
        "docs/results.md",
        f"{engine.ratio('k4v4', 'capacity'):.2f} times the tokens fit",
        "{:.2f}, {:.2f}, {:.2f} and {:.2f} of bf16's speed".format(*prefill),
        f"| sequences x tokens | {' | '.join(ENGINE_SIZES)} |",
        *lines,
    )


def test_vllm_in_its_own_page() -> None:
    engine = Engine()

    def cell(kv: str, form: str, measure: str, size: str | None = None) -> str:
        return (
            format(engine.value(kv, measure, size), form) if engine.has(kv, measure, size) else "-"
        )

    def line(kv: str) -> str:
        times = " / ".join(cell(kv, ".2f", "tpot", size) for size in ENGINE_SIZES)
        prompts = " / ".join(cell(kv, ",.0f", "prefill", size) for size in list(ENGINE_SIZES)[:3])
        name = "auto (bf16)" if kv == "auto" else kv
        return f"| {name} | {cell(kv, ',.0f', 'capacity')} | {times} | {prompts} |"

    expect("docs/vllm.md", "\n".join(line(kv) for kv in engine.caches))
    expect("docs/export.md", f"takes {engine.value('k4v4', 'tpot', '32 x 8k'):.2f} ms")


def test_the_start_up_line_of_vllm_is_that_of_smollm2() -> None:
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 3, 64, torch.bfloat16)
    block = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128, torch.bfloat16)
    saved = SAVED_SINKS * layout.cfg.sinks * layout.exact_bytes_per_token
    rings = 8 * 30 * (layout.sequence_bytes() + saved) / 2**20
    expect(
        "docs/vllm.md",
        f"tightkv k4v4: {30 * layout.bytes_per_token:,.0f} bytes per token in 30 layers, "
        f"{layout.ratio:.2f} times the tokens of a 16-bit cache ({30 * 4 * 3 * 64:,} bytes); exact "
        f"rings for 8 sequences take {rings:.1f} MiB",
        f"holds {block.ratio:.2f} times as many tokens as vLLM's own",
    )


def test_limits_in_vllm() -> None:
    ring = PageLayout(KVQuantConfig(), 8, 128, torch.bfloat16).ring_tokens
    expect(
        "docs/vllm.md",
        f"**Long prompts** ({MIN_QUERIES} new tokens or more)",
        f"up to {SHORT_PROMPT} new tokens of a prompt",
        f"more than {RING_SLACK} speculative tokens",
    )
    expect("docs/eval.md", f"exact newest tokens of a config ({ring} by default)")


# --- CPUs ----------------------------------------------------------------------------------------
MACHINES = {"aarch64": "Neoverse-N1", "x86_64": "Sapphire Rapids"}


def cpu_rows() -> dict[tuple[str, str, int, str, int], tuple[float, float]]:
    """(machine, instruction set, threads, heads, tokens) -> ratios of the newest row.

    Of the step, and of attention alone.
    """
    found = {}
    for row in sorted(rows("cpu_decode"), key=lambda row: row["time"]):
        shape, times = row["shape"], row["ms"]
        attention = row.get("attention_ms", times)
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
    for row in rows("cpu_vnni"):
        key = (row["isa"], row["preset"], row["shape"]["query_heads"], row["shape"]["tokens"])
        slowest[key] = min(row["ratios"]["fastest sdpa"], slowest.get(key, math.inf))
    cells = (("k4v4", 32, 8192), ("k4v4", 32, 2048), ("k4v4", 9, 4096), ("k2v2", 32, 8192))
    for isa in ("vnni", "avx512_vnni", "avx512"):
        ratios = " | ".join(f"{slowest[(isa, *cell)]:.2f}x" for cell in cells)
        expect("docs/cpu.md", f"| `{isa}` | {ratios} |")


def test_the_results_have_the_worst_and_the_best_of_a_cpu() -> None:
    found = cpu_rows()

    def span(isa: str) -> str:
        steps = [step for (_, name, *_), (step, _) in found.items() if name == isa]
        return f"{min(steps):.2f}x to {max(steps):.2f}x"

    expect(
        "docs/results.md",
        f"{span('dotprod')} as fast as torch's attention on a 2-core ARM machine, {span('vnni')} "
        f"on 1 to 16 cores of a Sapphire Rapids, and {span('avx2')} there with AVX2 alone",
    )


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
        told = "" if count is None else f", at most {count} exact"
        yield f"tightkv k4v4{exact}", f"**TightCache k4v4**{told}"
    for pages, count in ((None, None), (4, 128), (2, 64)):
        told = ("", "") if count is None else (f" exact_pages={pages}", f", at most {count} exact")
        yield f"tightkv k2v2{told[0]}", f"**TightCache k2v2**{told[1]}"
    yield "tightkv k3v3", "**TightCache k3v3**"
    yield "hqq 4 axis=0", "QuantizedCache, hqq 4 bits, axis 0"
    for bits in (2, 4):
        yield f"quanto {bits}", f"QuantizedCache, quanto {bits} bits"
        yield f"hqq {bits}", f"QuantizedCache, hqq {bits} bits, axis 1"
        yield f"turbokv {bits}", f"turbokv {bits} bits"
        yield f"turboquant-hf {bits}", f"turboquant-hf {bits} bits"


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
    expect(
        "docs/comparison.md",
        f"Its KL is {kl['turboquant-hf 4'] / kl['tightkv k4v4']:.0f} times smaller at 4 bits and "
        f"{kl['turboquant-hf 2'] / kl['tightkv k2v2']:.0f} times smaller at 2 bits",
        f"its KL is {kl['turboquant-hf 4'] / kl['tightkv k4v4 exact_pages=2']:.0f} and "
        f"{kl['turboquant-hf 2'] / kl['tightkv k2v2 exact_pages=4']:.0f} times smaller",
        f"has {kl['quanto 4'] / kl['tightkv k2v2 exact_pages=2']:.2f} of the KL",
        f"has {kl['turboquant-hf 4'] / kl['tightkv k2v2']:.2f} of the KL",
        f"{min(speeds):.2f} to {max(speeds):.2f} of the uncompressed speed",
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


def test_decode_with_eight_bits() -> None:
    found = rows("gpu_decode_8bit")

    def ratios(preset: str) -> list[str]:
        own = [row for row in found if row["preset"] == preset]
        own = sorted(own, key=lambda row: _order(row["shape"]))
        return [f"{row['against_best_bf16']:.2f}x" for row in own]

    for preset in ("k8v4", "k8v8"):
        *first, last = ratios(preset)
        expect("docs/results.md", f"{preset} {', '.join(first)} and {last}")


def _order(shape: Row) -> int:
    sizes = [(8, 32731), (32, 8155), (1, 131035), (1, 32731)]
    return sizes.index((shape["batch"], shape["tokens"]))


def test_other_models() -> None:
    models: dict[str, dict[str, Row]] = {}
    for row in rows("eval_models"):
        if row["config"] is not None:
            bits = f"k{row['config']['key_bits']}v{row['config']['value_bits']}"
            models.setdefault(row["model"]["name"], {})[bits] = row["result"]
    assert len(models) == 2
    for name, found in models.items():
        results = [found[preset] for preset in ("k4v4", "k3v3", "k2v2")]
        cells = [f"{x['kl']:.4f} ({100 * x['perplexity_increase']:+.1f}%)" for x in results]
        expect("docs/results.md", f"| {name} | {' | '.join(cells)} |")


def test_feedback_and_calibrations() -> None:
    found: dict[str, dict[str, str]] = {}
    exact: dict[str, dict[str, str]] = {}
    for row in rows("eval_feedback"):
        if (config := row["config"]) is not None:
            long = ", 32k tokens" if row["result"]["positions"] == 16383 else ""
            how = "calibrated" if config["calibration"] else "default"
            cell = f"{row['result']['kl']:.4f} ({100 * row['result']['perplexity_increase']:+.1f}%)"
            bits = f"k{config['key_bits']}v{config['value_bits']}"
            name = f"{row['model']['name']}{long}, {how}"
            found.setdefault(name, {})[bits] = cell
            if not long:
                exact.setdefault(name, {})[bits] = f"{row['result']['kl']:.5f}"
    assert (len(found), len(exact)) == (8, 6)
    for document, table in (("docs/results.md", found), ("docs/calibrate.md", exact)):
        for name, cells in table.items():
            line = " | ".join(cells.get(preset, "-") for preset in ("k4v4", "k3v3", "k2v2"))
            expect(document, f"| {name} | {line} |")


def test_needles_with_a_calibration() -> None:
    found: dict[tuple[str, str], int] = {}
    asked: dict[tuple[str, str], int] = {}
    for row in rows("eval_needles"):
        if row["task"] == "needles":
            config = row["config"]
            cache = "exact" if config is None else "calibrated" if row["calibration"] else "k2v2"
            key = row["model"]["name"], cache
            found[key] = found.get(key, 0) + sum(x["found"] for x in row["result"])
            asked[key] = asked.get(key, 0) + sum(x["asked"] for x in row["result"])
    models = {name for name, _ in found}
    assert len(models) == 3
    for name in models:
        counts = [found[name, cache] for cache in ("exact", "k2v2", "calibrated")]
        (total,) = {asked[name, cache] for cache in ("exact", "k2v2", "calibrated")}
        cells = " | ".join(map(str, (total, *counts)))
        expect("docs/calibrate.md", f"| {name} | {cells} |")


def test_quality_in_vllm() -> None:
    found: dict[str, dict[str, str]] = {}
    for row in rows("eval_vllm"):
        cell = f"{row['kl']:.4f} ({100 * row['perplexity_increase']:+.1f}%)"
        preset, _, how = row["cache"].partition(" ")
        found.setdefault(f"{row['model']}, {how or 'default'}", {})[preset] = cell
    assert len(found) == 6
    for name, cells in found.items():
        line = " | ".join(cells[preset] for preset in ("k4v4", "k3v3", "k2v2"))
        expect("docs/results.md", f"| {name} | {line} |")
