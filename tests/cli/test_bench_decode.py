"""tightkv bench decode: shapes of any heads, and ragged lengths."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import json_schemas
from scripts import load_script
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.kernels.backend import Takes
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench import gpu
from tightkv.tools.bench.inputs import Shape, fill
from tightkv.tools.bench.loads import draw_lengths
from tightkv.tools.bench.rivals import reason
from tightkv.tools.cli.bench import show
from tightkv.tools.cli.entry import main

CPU = torch.device("cpu")


def test_drawn_lengths_hold_as_many_tokens_as_equal_ones() -> None:
    assert Shape(3, 500).lengths == [500, 500, 500]
    drawn = Shape(32, 10240, shortest=6144)
    assert drawn.lengths == draw_lengths(32, 6144, 10240) and not drawn.equal
    assert drawn.bf16_bytes == Shape(32, 8192).bf16_bytes and Shape(32, 8192).equal
    assert all(6144 <= length <= 10240 for length in drawn.lengths)


def test_sequences_grow_by_a_token_per_consecutive_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all layers alike, so that pages are sealed where they end, from tokens in the ring."""
    cfg = KVQuantConfig.preset("k4v4", page_size=32, exact_pages=1, window_bits=16)
    layout = PageLayout(cfg, 1, 64, torch.float32)
    shape = Shape(3, 300, query_heads=2, kv_heads=1, head_dim=64, shortest=200)
    layers = [fill(layout, shape, reference, CPU, seed) for seed in range(2)]
    views: list[CacheView] = []
    lengths: list[list[int]] = []

    class Noting:
        TAKES = Takes()

        @staticmethod
        def append(codec: Codec, view: CacheView, *args: Any, **options: Any) -> None:
            reference.append(codec, view, *args, **options)
            views.append(view)
            lengths.append(view.lengths.tolist())

        attend = staticmethod(reference.attend)

    def replayed(calls: Sequence[Callable[[], None]], repeats: int, between: Any) -> list[float]:
        for _ in range(repeats):
            between()
            for call in calls:
                call()
        return [0.1] * repeats

    monkeypatch.setattr(gpu, "graph_times", replayed)
    random = torch.randn
    monkeypatch.setattr(gpu, "random_bf16", lambda device, *size: random(*size))
    assert gpu._consecutive_times(Noting, layers, shape) == [0.1] * 64
    assert len(lengths) == 2 * 64 and lengths[::2] == lengths[1::2]
    assert lengths[0] == [n - 31 for n in shape.lengths]
    assert lengths[-1] == [n + 32 for n in shape.lengths]
    last = views[-1]
    assert last.ring_read_from.tolist() == [(n + 31) // 32 * 32 for n in shape.lengths]
    assert last.feedback is not None and last.same_length is None and last.plans is not None
    assert not last.seals_later


def test_pages_of_all_layers_are_sealed_after_the_step_that_completes_them() -> None:
    """In order, as many per step as in vLLM."""
    cfg = KVQuantConfig.preset("k4v4", page_size=32, exact_pages=3)
    layout = PageLayout(cfg, 1, 64, torch.float32)
    shape = Shape(40, 200, query_heads=2, kv_heads=1, head_dim=64)
    layers = gpu._fed_back([fill(layout, shape, reference, CPU, 0)])
    late = gpu._late_seals(reference, layers, 32)
    assert late is not None
    launch, chosen, values = late
    counts, seen = [], []
    for value in values:
        chosen.copy_(value)
        launch()
        counts.append(int(chosen[0, 0]))
        seen += chosen[1 : 1 + counts[-1]].tolist()
    # At 224 tokens all complete a page, in the 24th step; two per step are sealed from then on.
    assert counts == [0] * 24 + [2] * 8
    table = layers[0].view.block_table
    assert seen == [[row, 192, int(table[row, 6]), 192] for row in range(16)]


@pytest.mark.parametrize(
    "options,message",
    [
        ({"query_heads": 12}, "query_heads=12; it must be a multiple of kv_heads=8"),
        ({"head_dim": 0}, "head_dim=0; it must be at least 1"),
        ({"shortest": 2049}, "shortest=2049; it must be from 1 to tokens=2048"),
        ({"shortest": -1}, "shortest=-1; it must be from 1 to"),
    ],
)
def test_shapes_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(1, 2048, **options)


def test_a_layer_of_ragged_sequences_attends_to_their_own_tokens() -> None:
    """As a layer that has one of them alone, but for which random tokens it holds."""
    cfg = KVQuantConfig.preset("k8v8", page_size=64, exact_pages=1, window_bits=16)
    layout = PageLayout(cfg, 1, 64, torch.float32)
    shape = Shape(3, 1300, query_heads=2, kv_heads=1, head_dim=64, shortest=1024)
    view = (layer := fill(layout, shape, reference, CPU, seed=0)).view
    assert view.lengths.tolist() == shape.lengths and view.same_length is None
    assert view.ring_read_from.tolist() == [(n - 1) // 64 * 64 for n in shape.lengths]
    query = torch.zeros(3, 2, 64)
    _, lse = reference.attend(
        layer.codec, query, view, torch.arange(4, dtype=torch.int32), AttendOptions(max_queries=1)
    )
    torch.testing.assert_close(lse, torch.tensor(shape.lengths).float().log()[:, None].expand(3, 2))


def test_heads_and_lengths_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Shape] = []

    def rows(cfg: KVQuantConfig, shapes: list[Shape], repeats: int) -> list[dict[str, object]]:
        seen.extend(shapes)
        shape = asdict(Shape(2, 1, 1, 1, 1))
        return [{"bench": "decode", "shape": shape, "preset": cfg.name, "kernels": "cpu"}]

    monkeypatch.setattr("tightkv.tools.bench.cpu.decode_rows", rows)
    heads = ["--heads", "12", "--kv-heads", "2", "--head-dim", "96"]
    arguments = ["bench", "decode", "--device", "cpu", *heads]
    assert main([*arguments, "--batch", "2", "--tokens", "300"]) == 0
    assert seen == [Shape(2, 300, 12, 2, 96)]
    seen.clear()
    assert main(arguments) == 0
    assert seen and all((s.query_heads, s.kv_heads, s.head_dim) == (12, 2, 96) for s in seen)


def test_rows_of_gpus_follow_their_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times from nowhere: calls run once, rivals take 3 ms or fail."""

    def once(calls: Sequence[Callable[[], object]], repeats: int = 2, *_: Any) -> list[float]:
        for call in calls:
            call()
        return [2.0] * repeats

    def fails(shape: Shape, device: torch.device) -> list[float]:
        raise RuntimeError("no kernel image")

    listed = {"a bf16": lambda *_: [3.0], "c fp8": fails}
    monkeypatch.setattr(gpu, "graph_times", lambda calls, repeats, between: [2.0] * repeats)
    monkeypatch.setattr(gpu, "graph_ms", lambda calls: once(calls)[0])
    shape = Shape(2, 300, query_heads=2, kv_heads=1, head_dim=64)
    (row,) = gpu.decode_rows([shape], ["k4v4"], ["reference"], CPU, listed)
    json_schemas.check("bench", json.dumps({"schema": 1, "rows": [{**row, "gpu": "G"}]}))
    assert row["against_best_bf16"] == row["consecutive_against_best_bf16"] == 1.5
    assert row["against_fp8"] is None and row["others_ms"] == {"a bf16": 3.0}
    assert row["others_failed"] == {"c fp8": "RuntimeError: no kernel image"}
    assert row["consecutive_others_ms"]["a bf16"]["p50"] == 3.0


def test_rows_of_a_prefill_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times from nowhere: calls run once, and torch takes 3 ms."""

    def once(calls: Sequence[Callable[[], object]], repeats: int = 0) -> float:
        for call in calls:
            call()
        return 2.0

    script = load_script("prefill_kernels")
    monkeypatch.setattr(script, "graph_ms", once)
    monkeypatch.setattr(script, "sdpa_extend", lambda *_: {"sdpa flash": 3.0})
    (row,) = script.store_rows([150], ["k4v4"], CPU)
    assert (row["tokens"], row["ms"], row["bf16_write_ms"], row["more_us"]) == (150, 2.0, 2.0, 0.0)
    rows = list(script.extend_rows(32, [0, 300], ["k4v4"], CPU))
    assert [(row["chunk"], row["prefix"]) for row in rows] == [(32, 0), (32, 300)]
    assert {row["against_best_bf16"] for row in rows} == {1.5}


def test_options_of_gpus_are_refused_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--shortest", "9", "--batch", "2", "--tokens", "2048"]
    assert main(["bench", "decode", *options]) == 2
    assert "--shortest is for GPUs" in capsys.readouterr().err


def test_a_ragged_row_says_so() -> None:
    row = {"bench": "decode", "preset": "k4v4", "kernels": "cuda", "shape": asdict(Shape(4, 8192))}
    assert show.label(row) == "k4v4 cuda, 4 x 8192 tokens, 32/8 heads of 128"
    row["shape"] = asdict(Shape(4, 8192, shortest=500))
    assert show.label(row) == "k4v4 cuda, 4 x 500 to 8192 tokens, 32/8 heads of 128"


def test_the_table_of_shapes() -> None:
    def row(preset: str, shape: Shape, step: float, others: dict[str, float]) -> dict[str, object]:
        return {
            "shape": asdict(shape),
            "preset": preset,
            "kernels": "triton" if shape.head_dim == 512 else "cuda",
            "ms": {"step": step},
            "others_ms": others,
            "against_best_bf16": min(ms for name, ms in others.items() if "fp8" not in name) / step,
        }

    mixed, large = Shape(4, 8155, shortest=1025), Shape(8, 32731, 32, 4, 512)
    others = {"sdpa flash": 0.3, "vllm fa3 bf16": 0.25, "vllm fa3 fp8": 0.2}
    rows = [
        *(row(preset, mixed, 0.1, others) for preset in ("k4v4", "k2v2")),
        *(row(preset, large, 0.5, {"triton bf16": 0.4}) for preset in ("k4v4", "k2v2")),
    ]
    script = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "decode_shapes.py"))
    head, _, *lines = script["table"](rows).splitlines()
    assert "best fp8" in head
    assert "4 bits" not in head  # no rival took part
    assert lines == [
        "| 32/4 of 512 | 8 x 32,731 | 400.0 (triton bf16) | - "
        "| 500.0 (0.80x, triton) | 500.0 (0.80x, triton) |",
        "| 32/8 of 128 | 4 x 1,025 to 8,155 | 250.0 (vllm fa3 bf16) | 200.0 (vllm fa3 fp8) "
        "| 100.0 (2.50x) | 100.0 (2.50x) |",
    ]


@pytest.mark.gpu
def test_the_plain_triton_kernel_takes_ragged_lengths() -> None:
    from tightkv.tools.bench.bf16_kernel import bf16_decode

    lengths = torch.tensor([5000, 1, 1024], dtype=torch.int32, device="cuda")
    query, key, value = (
        torch.randn(3, *size, dtype=torch.bfloat16, device="cuda")
        for size in ((12, 128), (2, 5000, 128), (2, 5000, 128))
    )
    found = bf16_decode(query, key, value, lengths)
    for b, n in enumerate(lengths.tolist()):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[b].view(2, 6, 128).float(), key[b, :, :n].float(), value[b, :, :n].float()
        )
        torch.testing.assert_close(found[b].float(), expected.flatten(0, 1), atol=2e-2, rtol=2e-2)


def test_why_a_rival_failed_names_no_folder() -> None:
    error = RuntimeError("run, /a/b/flash.cpp:8, needs sm_80/sm_86/sm_90\nand more")
    assert reason(error) == "RuntimeError: run, flash.cpp:8, needs sm_80/sm_86/sm_90"
    assert reason(ValueError()) == "ValueError: "
