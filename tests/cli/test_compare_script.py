"""benchmarks/compare_caches.py: its measurements on a tiny model, with the caches CI has."""

from __future__ import annotations

import importlib.util
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from models import prompt, tiny
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.tools.eval.tasks.quality import Schedule, measure_quality
from tightkv.tools.eval.windows import Windows

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compare_caches.py"
ROWS = SCRIPT.parent / "results" / "comparison.jsonl"
DOC = SCRIPT.parents[1] / "docs" / "comparison.md"
CONTEXTS = (32, 300)
TOKENS = 450  # of a window: shorter ones are not compressed


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("compare_caches", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _known(script: Any) -> dict[str, Any]:
    return {name: script.contenders()[name] for name in ("dynamic", "tightkv k4v4", "tightkv k2v2")}


@pytest.fixture(scope="module")
def reference(script: Any) -> Any:
    windows = Windows(prompt(2, TOKENS), ("a", "b"))
    return script.Reference(tiny(), windows, Schedule(prefill=200, chunk=16, batch=1))


@pytest.fixture(scope="module")
def rows(script: Any, reference: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    caches = _known(script)
    out = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    script.measure_all(reference, {"dynamic": caches["dynamic"]}, out, {"model": "m"}, CONTEXTS)
    first = out.read_text()
    script.measure_all(reference, caches, out, {"model": "m"}, CONTEXTS)
    assert out.read_text().startswith(first)
    found = script.read_rows(out)
    assert [row["cache"] for row in found] == list(caches)  # none is measured twice
    return {row["cache"]: row for row in found}


def test_another_model_is_measured_too_beside_rows_of_other_scripts(
    script: Any, reference: Any, tmp_path: Path
) -> None:
    out, plain = tmp_path / "rows.jsonl", {"dynamic": _known(script)["dynamic"]}
    out.write_text('{"kind": "vllm-quality", "cache": "dynamic"}\n')
    for model in ("one", "other", "one"):
        script.measure_all(reference, plain, out, {"model": model}, CONTEXTS)
    assert [row["model"] for row in script.read_rows(out)] == ["one", "other"]
    (row,) = script.read_rows(out, model="other")
    assert len(script.table([row]).splitlines()) == 3


def test_the_uncompressed_cache_agrees_with_itself(rows: dict[str, Any]) -> None:
    row = rows["dynamic"]
    assert row["kl"] == 0 and row["top1"] == 1 and row["positions"] == 2 * (TOKENS - 201)
    assert row["perplexity"] == row["reference_perplexity"]
    # layers, K and V, heads, head_dim, 2 bytes
    assert row["bytes"] == {str(n): 4 * 2 * 2 * 32 * 2 * n for n in CONTEXTS}
    # metrics of the queries and their factors: layers, heads, 32 x 32, 4 bytes, both
    shared = 2 * 4 * 2 * 32 * 32 * 4
    assert shared <= rows["tightkv k4v4"]["bytes_of_all_caches"] < 1.1 * shared
    assert row["bytes_of_all_caches"] == 0


def test_quality_is_what_tightkv_eval_measures(
    script: Any, reference: Any, rows: dict[str, Any]
) -> None:
    names = ("tightkv k4v4", "tightkv k2v2")
    made = script.contenders()
    caches = {name: partial(made[name][1], reference.model) for name in names}
    wanted = measure_quality(reference.model, reference.windows, caches, reference.schedule)
    assert 0 < 4 * rows[names[0]]["kl"] < rows[names[1]]["kl"]
    for name in names:
        assert rows[name]["kl"] == pytest.approx(wanted[name].summary.kl, rel=1e-3)
        for field in ("top1", "perplexity", "reference_perplexity"):
            assert rows[name][field] == pytest.approx(
                getattr(wanted[name].summary, field), rel=1e-4
            )


def test_each_cache_is_read_with_its_own_attention(script: Any, reference: Any) -> None:
    runs = {name: script.open_run(reference.model, own[1]) for name, own in _known(script).items()}
    assert {name: run.attention for name, run in runs.items()} == {
        "dynamic": "sdpa",
        "tightkv k4v4": "tightkv",
        "tightkv k2v2": "tightkv",
    }


def test_speed_is_of_single_tokens_at_the_end(reference: Any, rows: dict[str, Any]) -> None:
    assert reference.run.cache.get_seq_length() == TOKENS - 1  # the timed tokens are taken back
    for row in rows.values():
        speed = row["decode"]
        assert speed["context"] == TOKENS - 1
        assert len(speed["seconds"]) == len(speed["seconds_uncompressed"]) == 20
        assert speed["tokens_s"] > 0 and speed["ratio"] > 0


def test_bytes_are_those_the_cache_reports(script: Any, reference: Any) -> None:
    """The walk over all tensors finds pages, rings and sinks, and no more than tables besides.

    And what caches of a model share: the metrics of its queries.
    """
    run = script.open_run(reference.model, script.contenders()["tightkv k4v4"][1])
    run.feed(prompt(1, 600), last_only=True)
    run.feed(prompt(1, 1))
    claimed, walked = cache_size(run.cache.layers).bytes, script.bytes_held(run.cache)
    shared = script.bytes_held([layer.metric for layer in run.cache.tight_layers])
    assert claimed <= walked - shared < 1.1 * claimed


def test_bytes_of_wrapped_and_shared_tensors_count_once(script: Any) -> None:
    class Slotted:
        __slots__ = ("inside", "unset")
        inside: dict[str, Any]

    item, tensor = Slotted(), torch.zeros(6, dtype=torch.int16)
    item.inside = {"a": [tensor, tensor.view(2, 3)], "b": (torch.zeros(5), torch.nn.Linear(3, 3))}
    assert script.bytes_held([item, item]) == 12 + 20
    assert script.bytes_held([item, torch.zeros(2)], beside=[tensor]) == 20 + 8


def test_the_table_has_a_line_a_cache(script: Any, rows: dict[str, Any]) -> None:
    lines = script.table(list(rows.values())).splitlines()
    assert len(lines) == 2 + 3
    decode = f"{rows['dynamic']['decode']['ratio']:.2f}"
    assert lines[2].split() == ["dynamic", "0.0000", "1.000", "+0.00%", "1.00", "1.00", decode]


@pytest.mark.parametrize("bits", [4, 2])
def test_groups_of_the_kivi_style_cache(script: Any, reference: Any, bits: int) -> None:
    """Coded values are within half a step, exact ones are the newest; bytes are those of codes."""
    layer, generator = script._KiviLayer(bits), torch.Generator().manual_seed(0)
    keys, values = (torch.randn(2, 3, 300, 64, generator=generator) for _ in range(2))
    whole = layer.update(keys[:, :, :299], values[:, :, :299])
    assert whole[0].equal(keys[:, :, :299])  # a prompt attends to exact tokens
    found = layer.update(keys[:, :, 299:], values[:, :, 299:])
    assert layer.get_seq_length() == 300 and layer.recent[0].shape[2] == 300 - 160
    groups = [
        tensor.unflatten(dim, (-1, 32)).transpose(dim + 1, -1)
        for tensor, dim in ((keys[:, :, :160], 2), (values[:, :, :160], 3))
    ]
    for own, exact, group, dim in zip(found, (keys, values), groups, (2, 3), strict=True):
        assert own[:, :, 160:].equal(exact[:, :, 160:])
        error = (own - exact)[:, :, :160].unflatten(dim, (-1, 32)).transpose(dim + 1, -1).abs()
        step = (group.amax(-1) - group.amin(-1)) / (2**bits - 1)
        assert (error.amax(-1) < 0.51 * step + 0.01).all()
        assert error.amax() > 0.2 * step.amax()
    per_token = 2 * (64 * bits / 8 + 2 * 2 * 64 / 32)
    made = script.contenders()[f"kivi-style {bits}"][1]
    size = script.bytes_per_token(reference.model, made)
    assert size == 4 * 2 * per_token / 2  # layers, heads; head_dim 32


def test_bytes_of_a_further_token(script: Any, reference: Any) -> None:
    made = script.contenders()
    plain = script.bytes_per_token(reference.model, made["dynamic"][1])
    assert plain == 4 * 2 * 2 * 32 * 2
    own = script.bytes_per_token(reference.model, made["tightkv k4v4"][1])
    assert 0.25 * plain < own < 0.32 * plain


def test_the_page_shows_the_stored_rows() -> None:
    page = DOC.read_text(encoding="utf-8")
    for line in ROWS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["cache"] != "dynamic":
            assert f"| {row['kl']:.4f} | {row['top1']:.3f} |" in page, row["cache"]
            assert f"{row['decode']['ratio']:.2f} |" in page, row["cache"]
            assert row["version"] in page


def test_a_cache_that_cannot_take_a_context_is_said_to_fail(
    script: Any, reference: Any, rows: dict[str, Any]
) -> None:
    class Short(script.DynamicLayer):
        def update(self, keys: torch.Tensor, *rest: Any, **options: Any) -> Any:
            if keys.shape[2] > 100:
                raise RuntimeError("too long")
            return super().update(keys, *rest, **options)

    held, _ = script.bytes_by_context(
        reference.model, lambda model: script.Cache(layer_class_to_replicate=Short), CONTEXTS
    )
    assert held == {**rows["dynamic"]["bytes"], "300": "too long"}
    cells = script.table([rows["dynamic"], {**rows["dynamic"], "cache": "x", "bytes": held}])
    assert cells.splitlines()[-1].split()[4:6] == ["1.00", "fails"]
