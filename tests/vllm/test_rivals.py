"""Rivals of a decode step: what they compute, and what a failing one leaves behind."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from functools import partial

import pytest
import rival_flashinfer
import rival_kernels
import rival_vllm
import torch
from rival_pages import NewCache, paged_batch
from torch import Tensor

from scripts import load_script
from tightkv.tools.bench import rivals
from tightkv.tools.bench.inputs import Shape

CUDA = torch.device("cuda")
TURBOQUANT = partial(rival_vllm.turboquant, preset="turboquant_4bit_nc")


def relative_error(new_cache: NewCache, shape: Shape, page: int, device: torch.device) -> float:
    """Of the outputs, against exact attention over the tokens that were written."""
    batch = paged_batch(shape, page, device)
    generator = torch.Generator().manual_seed(0)

    def random(tokens: int, heads: int) -> Tensor:
        found = torch.randn(tokens, heads, shape.head_dim, generator=generator)
        return found.to(device, torch.bfloat16)

    query = random(shape.batch, shape.query_heads)
    key, value = (random(len(batch.slots), shape.kv_heads) for _ in range(2))
    cache = new_cache(shape, batch)
    assert cache.write is not None
    cache.write(key, value, batch.slots)
    last = batch.lengths.cumsum(0) - 1
    cache.write(key[last], value[last], batch.newest)  # the step's own write: nothing changes
    expected = []
    for one, k, v in zip(
        query, *(x.split(batch.lengths.tolist()) for x in (key, value)), strict=True
    ):
        grouped = one.view(shape.kv_heads, -1, shape.head_dim)
        expected.append(
            torch.nn.functional.scaled_dot_product_attention(
                grouped.float(), k.transpose(0, 1).float(), v.transpose(0, 1).float()
            ).flatten(0, 1)
        )
    exact, found = torch.stack(expected), cache.attend(query).float()
    return float((found - exact).norm() / exact.norm())


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """vLLM for CPUs has no Triton: give its kernels the interpreter while they are imported."""
    if torch.cuda.is_available():
        pytest.skip("the kernels themselves run here")
    import triton
    import triton.language
    import vllm.triton_utils as utils

    names = {"triton": triton, "tl": triton.language, "HAS_TRITON": True}
    before = {name: getattr(utils, name) for name in names}
    ops = "vllm.v1.attention.ops."
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith(ops)}
    for name, found in names.items():
        setattr(utils, name, found)
    for name in ("int4_per_token_head", "triton_turboquant_decode", "triton_turboquant_store"):
        importlib.import_module(ops + name)
    yield
    for name in [name for name in sys.modules if name.startswith(ops)]:
        del sys.modules[name]
    sys.modules.update(kept)
    for name, found in before.items():
        setattr(utils, name, found)


@pytest.mark.vllm
@pytest.mark.parametrize("new_cache", [rival_vllm.int4_per_token_head, TURBOQUANT])
def test_triton_kernels_of_vllm_attend_to_what_was_written(
    interpreted: None, new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.turboquant import centroids

    def quickly(dim: int, bits: int) -> Tensor:
        """In place of vLLM's solver, which takes seconds: a little worse."""
        middles = (torch.arange(2**bits) + 0.5) / 2**bits
        return torch.special.ndtri(middles) / dim**0.5

    monkeypatch.setattr(centroids, "get_centroids", quickly)
    monkeypatch.setattr(rival_vllm, "_TURBOQUANT_SPLITS", 2)
    shape = Shape(2, 21, query_heads=2, kv_heads=1, head_dim=64)
    error = relative_error(new_cache, shape, rival_vllm.PAGE, torch.device("cpu"))
    assert 0.03 < error < 0.25  # of codes of 4 bits; other tokens would make it 1.4


# name, cache, tokens per page, the largest error
ON_A_GPU = [
    ("nvfp4", rival_flashinfer.nvfp4, rival_flashinfer.PAGE, 0.25),
    ("fa3 bf16", partial(rival_vllm.flash_attention, dtype=torch.bfloat16), 16, 0.01),
    ("fa3 fp8", partial(rival_vllm.flash_attention, dtype=torch.float8_e4m3fn), 16, 0.1),
    ("int4", rival_vllm.int4_per_token_head, rival_vllm.PAGE, 0.2),
    ("turboquant", TURBOQUANT, rival_vllm.PAGE, 0.2),
]


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
@pytest.mark.parametrize(
    "new_cache,page,most", [x[1:] for x in ON_A_GPU], ids=[x[0] for x in ON_A_GPU]
)
def test_rivals_attend_to_ragged_sequences(
    new_cache: NewCache, page: int, most: float, heads: tuple[int, int]
) -> None:
    if page == rival_flashinfer.PAGE:
        pytest.importorskip("flashinfer")
    shape = Shape(5, 2000, *heads, head_dim=128, shortest=1024)
    assert relative_error(new_cache, shape, page, CUDA) < most


# --- without a GPU ---
def test_pages_of_a_batch_hold_each_token_once() -> None:
    shape = Shape(3, 1090, shortest=1024)
    batch = paged_batch(shape, 16, torch.device("cpu"))
    assert batch.lengths.tolist() == shape.lengths
    assert batch.pages == sum(-(-n // 16) for n in shape.lengths)
    assert len(set(batch.slots.tolist())) == sum(shape.lengths) == len(batch.slots)
    at = 0
    for b, n in enumerate(shape.lengths):
        slots = batch.slots[at : at + n].tolist()
        table = batch.block_table[b].tolist()
        assert slots == [table[t // 16] * 16 + t % 16 for t in range(n)]
        assert batch.newest[b] == slots[-1]
        at += n


def test_a_failing_rival_leaves_a_note() -> None:
    def fails(shape: Shape, device: torch.device) -> list[float]:
        raise RuntimeError("no kernel image\nand more")

    listed = {
        "a bf16": lambda shape, device: [2.0, 3.0, 1.0],
        "b bf16": lambda shape, device: [1.5],
        "c fp8": fails,
    }
    found = rivals.measure_rivals(Shape(1, 1), torch.device("cpu"), listed)
    assert found["others_ms"] == {"a bf16": 2.0, "b bf16": 1.5}
    steps = found["consecutive_others_ms"]["a bf16"]
    assert steps == pytest.approx({"mean": 2, "p50": 2, "p90": 2.8, "p99": 2.98})
    assert found["others_failed"] == {"c fp8": "RuntimeError: no kernel image"}
    ratios = rivals.ratios(found["others_ms"], 0.5)
    assert ratios == {"against_best_bf16": 3.0, "against_fp8": None, "against_4bit": None}


def test_rivals_are_those_that_are_installed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = load_script("decode_shapes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "vllm" or None)
    ours = [*rivals.RIVALS]
    named = [name for name in rival_kernels.KERNELS if name.startswith("vllm ")]
    assert [*shapes.rivals([])] == [*ours, *named] and len(named) == 4
    assert [*shapes.rivals(["fa3", "triton"])] == ["triton bf16", "vllm fa3 bf16", "vllm fa3 fp8"]
    with pytest.raises(ValueError, match="--against nvfp4; it must be part of one of: sdpa flash"):
        shapes.rivals(["nvfp4"])


def test_rivals_that_take_one_length_refuse_ragged_ones() -> None:
    shape, device = Shape(2, 2048, shortest=1024), torch.device("cpu")
    for name in ("sdpa flash", "sdpa cudnn"):
        with pytest.raises(ValueError, match="sequences of one length"):
            rivals.RIVALS[name](shape, device)
    with pytest.raises(ValueError, match="head_dim=96; the plain Triton kernel"):
        rivals.RIVALS["triton bf16"](Shape(1, 64, head_dim=96), device)
