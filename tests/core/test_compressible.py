"""The planner, TightCache and vLLM's plugin agree on which layers are compressed, and why not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

from models import FAMILIES, SHAPE
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.model_shape import LayerShape, compressed_layers, read_model_shape, skip_reason
from tightkv.model_shape.planner import config_plan
from tightkv.model_shape.shape import INDEXED
from tightkv.pages.layout import PageLayout

COMPRESSED = {family: [1, 3] for family in FAMILIES} | {
    "llama": [0, 1, 2, 3],
    "qwen2": [0, 1, 2, 3],
    "qwen3": [0, 1, 2, 3],
    "falcon_h1": [0, 1, 2, 3],
    "llama4": [3],
}
MORE: dict[str, Callable[[], Any]] = {
    "a head of 24": lambda: hf.LlamaConfig(**SHAPE, head_dim=24),
    "a window that never slides": lambda: hf.MistralConfig(**SHAPE, sliding_window=4096),
    "latent attention": lambda: hf.DeepseekV3Config(**{**SHAPE, "num_key_value_heads": 4}),
}


def planned(config: Any) -> list[int]:
    plan = config_plan("k4v4", read_model_shape(config), KVQuantConfig.preset("k4v4"))
    return [i for i, layer in enumerate(plan.layers) if isinstance(layer.layout, PageLayout)]


def cached(config: Any) -> list[int]:
    layers = TightCache("k4v4", model=config).layers
    return [i for i, layer in enumerate(layers) if isinstance(layer, TightLayer)]


@pytest.mark.parametrize("family", FAMILIES)
def test_plan_and_cache_agree_for_every_family(family: str) -> None:
    config = FAMILIES[family]()
    assert planned(config) == cached(config) == COMPRESSED[family]


@pytest.mark.parametrize("name", MORE)
def test_what_the_plan_leaves_out_the_cache_refuses(name: str) -> None:
    config = MORE[name]()
    shape = read_model_shape(config)
    (reason,) = {skip_reason(layer) for layer in shape.layers}
    assert reason is not None and planned(config) == []
    with pytest.raises(ValueError, match="can be compressed") as error:
        TightCache("k4v4", model=config)
    assert reason in str(error.value) or "sliding window" in str(error.value)


def test_a_config_that_is_not_understood_is_judged_by_its_cache() -> None:
    config = FAMILIES["llama"]()
    config.ssm_cfg = {"layer": "new"}
    with pytest.raises(ValueError, match="not supported"):
        read_model_shape(config)
    assert cached(config) == [0, 1, 2, 3]


def test_extras_are_those_of_the_integration() -> None:
    shared = "shares its cache with another layer"
    for extra, in_vllm in (("sink logits", None), ("ALiBi", "ALiBi"), (shared, None)):
        layer = LayerShape("full", 2, 64, 64, extras=(extra,))
        assert skip_reason(layer) is None
        assert skip_reason(layer, "vllm") == in_vllm
    assert skip_reason(LayerShape("full", 2, 64, 64, extras=("wings",))) == "wings"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"extras": (INDEXED,)}, INDEXED),
        ({"rope_dim": 24}, "kv_lora_rank=552; supported: multiples of 64 up to 512"),
        ({"latent_dim": 536, "rope_dim": 24}, "qk_rope_head_dim=24; supported: 16, 32, 64, 128"),
    ],
)
def test_latents_are_compressed_in_vllm_alone(options: dict[str, Any], reason: str | None) -> None:
    layer = LayerShape("mla", **{"latent_dim": 576, "rope_dim": 64} | options)
    assert skip_reason(layer) == "latent attention (MLA)"
    assert skip_reason(layer, "vllm") == reason


def test_layers_whose_cache_others_read() -> None:
    """Gemma 3n: the last layers read the last sliding and the last full layer before them."""
    config = hf.Gemma3nTextConfig(num_hidden_layers=10, num_kv_shared_layers=4)
    shape = read_model_shape(config)
    shared = [i for i, layer in enumerate(shape.layers) if layer.extras]
    assert shared == [4] and [layer.kind for layer in shape.layers[6:]] == ["none"] * 4
    assert compressed_layers(shape.layers) == [4] == compressed_layers(shape.layers, "vllm")


# --- vLLM ----------------------------------------------------------------------------------------
def vllm_layers(config: Any) -> dict[str, Any]:
    """The layers of a model by name, as vLLM builds them: attributes alone, without weights."""
    from vllm.model_executor.layers.attention import ChunkedLocalAttention
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.attention.backend import AttentionType

    def make(kind: Any, **options: Any) -> Any:
        layer = kind.__new__(kind)
        vars(layer).update(
            attn_type=AttentionType.DECODER,
            impl=SimpleNamespace(alibi_slopes=None),
            kv_sharing_target_layer_name=None,
            sliding_window=None,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=getattr(config, "head_dim", None) or 16,
            head_size_v=getattr(config, "head_dim", None) or 16,
            has_sink=config.model_type == "gpt_oss",
            **options,
        )
        return layer

    found = {}
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for i, kind in enumerate(types):
        name = f"model.layers.{i}.self_attn.attn"
        if kind in ("hybrid", "conv", "linear_attention"):
            found[f"model.layers.{i}.mixer"] = make(MambaMixer2)
        if kind in ("hybrid", "full_attention"):
            found[name] = make(Attention)
        elif kind == "sliding_attention":
            found[name] = make(Attention)
            found[name].sliding_window = config.sliding_window
        elif kind == "chunked_attention":
            found[name] = make(ChunkedLocalAttention)
    return found


@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_agrees_for_every_family(family: str) -> None:
    from tightkv.integrations.vllm.layer_numbers import layer_number
    from tightkv.integrations.vllm.start.engine_plan import compressed_layers as chosen_layers

    config = FAMILIES[family]()
    names, _ = chosen_layers(vllm_layers(config), KVQuantConfig())
    chosen = [layer_number(name) for name in names]
    assert chosen == COMPRESSED[family]
    assert chosen == compressed_layers(read_model_shape(config).layers, "vllm")


@pytest.mark.vllm
def test_a_draft_is_not_compressed_alone() -> None:
    """Its model keeps vLLM's cache, as one with latents beside a draft that has none."""
    from tightkv.integrations.vllm.start.engine_plan import compressed_layers as chosen_layers

    layers = vllm_layers(FAMILIES["llama"]())
    *own, draft = layers
    for name in own:
        layers[name].sliding_window = 16
    assert list(chosen_layers(layers, KVQuantConfig())[0]) == [draft]
    with pytest.raises(ValueError, match="no layer of this model can be compressed"):
        chosen_layers(layers, KVQuantConfig(), drafts={draft})


@pytest.mark.vllm
def test_windows_that_are_compressed_can_be_read_by_others_with_the_same() -> None:
    from tightkv.integrations.vllm.layer_shapes import readers
    from tightkv.integrations.vllm.start.engine_plan import compressed_layers as chosen_layers

    first, second, third, *_ = vllm_layers(FAMILIES["llama"]()).items()
    layers = dict((first, second, third))
    for _, layer in layers.items():
        layer.sliding_window = 1024
    second[1].kv_sharing_target_layer_name = first[0]
    chosen, _ = chosen_layers(layers, KVQuantConfig(), windows=True)
    assert list(chosen) == [first[0], third[0]]
    assert readers(layers, chosen) == {second[0]: first[0]}
    second[1].sliding_window = None
    assert list(chosen_layers(layers, KVQuantConfig(), windows=True)[0]) == [third[0]]
    third[1].sliding_window, third[1].head_size = None, 2 * third[1].head_size
    third[1].head_size_v = third[1].head_size
    second[1].sliding_window = 1024
    assert list(chosen_layers(layers, KVQuantConfig(), windows=True)[0]) == [third[0]]


@pytest.mark.vllm
@pytest.mark.parametrize(("change", "compressed"), [({}, [0]), ({"sliding_window": 16}, [])])
def test_a_cache_that_others_read_is_compressed_if_they_can_read_pages(
    change: dict[str, Any], compressed: list[int]
) -> None:
    from tightkv.integrations.vllm.layer_numbers import layer_number
    from tightkv.integrations.vllm.layer_shapes import readers
    from tightkv.integrations.vllm.start.engine_plan import compressed_layers as chosen_layers

    first, second, third, *_ = vllm_layers(FAMILIES["llama"]()).items()
    layers = dict((first, second, third))
    for name, layer in (second, third):
        layer.kv_sharing_target_layer_name = first[0]
        vars(layer).update(change if name == third[0] else {})
    if not compressed:
        with pytest.raises(ValueError, match="cannot read compressed pages"):
            chosen_layers(layers, KVQuantConfig())
        return
    chosen, _ = chosen_layers(layers, KVQuantConfig())
    assert [layer_number(name) for name in chosen] == compressed
    assert readers(layers, chosen) == dict.fromkeys((second[0], third[0]), first[0])
