"""Blocks of models with states: how long they are, what they hold, and where prefixes end."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tightkv.config import KVQuantConfig
from tightkv.pages.layout import PageLayout

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]

WINDOW = 192  # tokens, of k4v4


class Shape(NamedTuple):
    """What a model's layers keep, in bfloat16."""

    attention: int
    states: int
    state_bytes: int
    kv_heads: int
    head_dim: int
    block: int
    """Tokens per block of vLLM's own cache: as many bytes in a layer as a state, rounded up."""


SHAPES = {
    # gated delta nets: 32 heads of 128 x 128, and convolutions of 8,192 channels
    "qwen3-next": Shape(12, 36, 2 * (32 * 128 * 128 + 3 * 8192), 2, 256, 544),
    # Mamba-2: 128 heads of 64 x 128, and convolutions of 10,240 channels
    "nemotron-h": Shape(4, 24, 2 * (128 * 64 * 128 + 3 * 10240), 8, 128, 528),
    # attention and Mamba-2 in each of 44 layers
    "falcon-h1": Shape(44, 44, 2 * (24 * 128 * 256 + 3 * 3584), 2, 128, 1600),
    # convolutions alone
    "lfm2": Shape(6, 10, 2 * 3 * 2048, 8, 64, 16),
}


def layouts(shape: Shape, **bits: str) -> dict[str, PageLayout]:
    cfg = KVQuantConfig.from_dict({"preset": "k4v4", **bits})
    each = (cfg.for_layer(i, shape.attention) for i in range(shape.attention))
    return {
        f"attention.{i}": PageLayout(one, shape.kv_heads, shape.head_dim, torch.bfloat16)
        for i, one in enumerate(each)
    }


def packed(shape: Shape, pages: dict[str, PageLayout], mode: str = "align") -> tuple[int, Any]:
    """Pages per block, and the specs of all layers with such blocks."""
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from tightkv.integrations.vllm.compat import page_spec
    from tightkv.integrations.vllm.prefix.blocks import pages_per_block

    def state(block: int) -> Any:
        return MambaSpec(
            block_size=block,
            shapes=((shape.state_bytes // 2,),),
            dtypes=(torch.bfloat16,),
            mamba_cache_mode=mode,
        )

    cache = CacheConfig(enable_prefix_caching=mode != "none", mamba_cache_mode=mode)
    others = [(object(), state(16))] * shape.states
    config = SimpleNamespace(cache_config=cache)
    count = pages_per_block(pages, others, config, mixed=False, packed=True)
    plain = FullAttentionSpec(
        block_size=16,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_dim,
        dtype=torch.bfloat16,
    )
    specs = {name: page_spec(plain, layout, count) for name, layout in pages.items()}
    block = 32768 if mode == "none" else count * 64  # as vLLM has it without prefixes
    assert mode == "none" or cache.mamba_block_size == block
    specs |= {f"state.{i}": state(block) for i in range(shape.states)}
    return count, specs


def engine_blocks(specs: Any, memory: int) -> Any:
    """The KVCacheConfig that vLLM makes of an engine's specs."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import KVCacheLayout

    from tightkv.integrations.vllm.prefix.blocks import name_states

    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
    )
    config = SimpleNamespace(
        cache_config=cache,
        speculative_config=None,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    groups = kv_cache_utils.get_kv_cache_groups(config, specs)
    name_states(groups)
    return kv_cache_utils.get_kv_cache_config_from_groups(config, groups, memory)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bits", [{}, {"layer_bits": "0=k8v8"}], ids=["alike", "bits"])
def test_a_block_holds_pages_of_all_layers_or_some_states(name: str, bits: dict[str, str]) -> None:
    shape = SHAPES[name]
    pages = layouts(shape, **bits)
    count, specs = packed(shape, pages)
    held = sum(layout.page_bytes for layout in pages.values()) * count
    assert held >= shape.state_bytes
    made = engine_blocks(specs, 100 * held)
    assert made.num_blocks == 100  # attention wastes nothing
    attention, *states = made.kv_cache_groups
    assert sorted(attention.layer_names) == sorted(pages)
    assert attention.kv_cache_spec.block_size == states[0].kv_cache_spec.block_size
    most = held // shape.state_bytes
    assert all(len(group.layer_names) <= most for group in states)
    assert len(states) <= max(24, -(-shape.states // most))
    assert {type(group.kv_cache_spec).__name__ for group in states} == {"MambaSpec"}


@pytest.mark.parametrize("name", SHAPES)
def test_blocks_are_no_longer_than_vllms_own(name: str) -> None:
    """Or as long as one page, or one state in all layers together."""
    shape = SHAPES[name]
    pages = layouts(shape)
    count, _ = packed(shape, pages)
    one_state = -(-shape.state_bytes // sum(layout.page_bytes for layout in pages.values()))
    assert (count - 1) * 64 <= max(shape.block, (one_state - 1) * 64)


def test_without_cached_prefixes_there_are_as_few_groups_as_in_16_bits() -> None:
    shape = SHAPES["qwen3-next"]
    pages = layouts(shape)
    count, specs = packed(shape, pages, "none")
    layout = next(iter(pages.values()))
    assert count == -(-shape.state_bytes // layout.page_bytes)
    made = engine_blocks(specs, 10 * count * sum(each.page_bytes for each in pages.values()))
    assert [len(group.layer_names) for group in made.kv_cache_groups] == [12] * 4


@pytest.mark.parametrize("name", SHAPES)
def test_prefixes_are_found_as_finely_as_in_16_bits(name: str) -> None:
    """Of prompts of 1k to 16k tokens: less than a block of either and the exact window is lost."""
    from tightkv.integrations.vllm.prefix.cache_format import CacheFormat
    from tightkv.integrations.vllm.prefix.prefix_hits import HitEnds

    shape = SHAPES[name]
    count, _ = packed(shape, layouts(shape))
    found = CacheFormat("", "k4v4", 64, 3, 64, 8, 1.0, 1, ())
    managers = [SimpleNamespace(block_size=64 * count)] * 2
    ends = HitEnds(found, SimpleNamespace(single_type_managers=managers))
    lengths = range(1000, 16001, 13)
    lost = [
        (length - 1) // shape.block * shape.block - ends.kept_state(length, False)[0]
        for length in lengths
    ]
    assert max(lost) < 64 * count + WINDOW
    within = sum(each <= max(shape.block, 64 + WINDOW) for each in lost)
    assert within > 0.95 * len(lost)


def test_pages_of_packed_blocks_are_apart() -> None:
    """In memory that vLLM lays out: each byte of a block belongs to one page of one layer."""
    from vllm.v1.kv_cache_interface import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    from tightkv.integrations.vllm.compat import as_pages

    shape = SHAPES["nemotron-h"]._replace(state_bytes=900_000, states=3)
    pages = layouts(shape, layer_bits="1=k8v8,2=k8v4")
    count, specs = packed(shape, pages)
    made = engine_blocks(specs, 16 << 20)
    caches = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout.BLHNC)
    memory = caches["attention.0"].untyped_storage()
    total = torch.empty(0, dtype=torch.uint8).set_(memory).view(made.num_blocks, -1)
    for name, layout in pages.items():
        own = as_pages(caches[name], layout)
        assert own.shape == (made.num_blocks * count, layout.num_kv_heads, layout.record_bytes)
        own += 1
        own[count] += 1  # the first of the second block
    assert count > 1 and (total == 1).sum(1).tolist()[0] == total.shape[1]
    assert int((total[1] == 2).sum()) == total.shape[1] // count and int(total[1].max()) == 2
    assert bool((total[2:] == 1).all())


@pytest.mark.parametrize(
    ("version", "stages", "layout", "kinds", "expected"),
    [
        ("0.32.0", 1, None, "states", True),
        ("0.33.1+cu130", 1, None, "states", True),
        ("0.28.0", 1, None, "states", False),
        ("unknown", 1, None, "states", False),  # a folder of sources on PYTHONPATH
        ("0.32.0", 2, None, "states", False),
        ("0.32.0", 1, "LBHNC", "states", False),
        ("0.32.0", 1, None, "windows", False),
        ("0.32.0", 1, None, "none", False),
    ],
)
def test_where_blocks_are_packed(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    stages: int,
    layout: str | None,
    kinds: str,
    expected: bool,
) -> None:
    from vllm import envs
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    from tightkv.integrations.vllm.prefix import blocks

    state = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.bfloat16,))
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, sliding_window=64
    )
    specs = {"states": [state], "windows": [state, window], "none": []}[kinds]
    monkeypatch.setattr(blocks, "installed_version", lambda _: version)
    monkeypatch.setattr(envs, "VLLM_KV_CACHE_LAYOUT", layout, raising=False)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        model_config=SimpleNamespace(supports_kv_cache_grouping=False),
    )
    assert blocks.packs([(object(), spec) for spec in specs], config) is expected


@pytest.mark.parametrize(
    ("length", "start", "asked", "stops_at", "drops", "count"),
    [
        (1100, 0, 1000, 768, False, 768),
        (1100, 0, 1100, 1024, False, 768),  # vLLM ends a chunk at the prompt's last block
        (1100, 0, 700, 512, False, 512),
        (1100, 768, 332, 256, False, 332),  # the rest at once, not up to the last block
        (1100, 512, 588, 512, False, 256),
        (1100, 1024, 76, 76, False, 76),
        (1100, 0, 1100, 768, True, 768),
        (1270, 0, 1270, 1270, False, 1270),  # vLLM keeps the last block's state inside of a chunk
        (1270, 0, 1270, 1024, False, 1024),
        (300, 0, 300, 256, False, 256),
    ],
)
def test_prompts_stop_before_their_exact_windows(
    length: int, start: int, asked: int, stops_at: int, drops: bool, count: int
) -> None:
    """In blocks of 256 tokens."""
    from tightkv.integrations.vllm.prefix.cache_format import CacheFormat
    from tightkv.integrations.vllm.prefix.prefix_hits import HitEnds, keep_states_before_windows

    scheduler = SimpleNamespace(
        need_mamba_block_aligned_split=True,
        use_eagle_block_drop=drops,
        _mamba_block_aligned_split=lambda *given: stops_at,
    )
    found = CacheFormat("", "k4v4", 64, 3, 64, 8, 1.0, 1, ())
    managers = [SimpleNamespace(block_size=256)] * 2
    ends = HitEnds(found, SimpleNamespace(single_type_managers=managers))
    keep_states_before_windows(scheduler, ends)
    request: Any = SimpleNamespace(
        num_computed_tokens=start, num_tokens=length, num_prompt_tokens=length
    )
    assert scheduler._mamba_block_aligned_split(request, asked) == count


def test_blocks_in_which_pages_lie_elsewhere_have_other_hashes() -> None:
    """A connector's store may have been filled by an engine whose blocks were not packed."""
    from tightkv.integrations.vllm.prefix.cache_format import _meaning

    (layout,) = layouts(SHAPES["lfm2"]._replace(attention=1)).values()
    impl = SimpleNamespace(layout=layout, centers=None, key_scale=None, packed_pages=0)
    meanings = [_meaning(0, impl)]
    for impl.packed_pages in (1, 2):
        meanings.append(_meaning(0, impl))
    assert len(set(meanings)) == 3


@pytest.mark.parametrize(("packed", "fits"), [(True, True), (False, False)])
def test_checked_layers_may_get_bits_of_their_own(packed: bool, fits: bool) -> None:
    from tightkv.integrations.vllm.start.engine_plan import Chosen

    layers = {
        str(i): SimpleNamespace(num_kv_heads=2, head_size=64, sliding_window=None) for i in "01"
    }
    cfg = KVQuantConfig.preset("k4v4")
    numbers = {name: int(name) for name in layers}
    others = [object()]
    chosen = Chosen(layers, {}, numbers, (0, 2), others, torch.bfloat16, cfg, packed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tightkv.integrations.vllm.start.engine_plan.layer_shape", lambda layer: None)
        together = chosen.for_fit().fit_together
    assert together({0: cfg, 1: cfg})
    assert together({0: cfg.replace(key_bits=8), 1: cfg}) is fits
