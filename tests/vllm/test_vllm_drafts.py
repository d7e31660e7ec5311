"""Layers of a speculator's model: which they are, whose ring table they use, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def speculative(method: str, several: bool = False, gemma: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=3,
        use_multi_module_mtp=lambda: several,
        use_gemma4_mtp=lambda: gemma,
    )


def test_layers_of_a_draft_are_known_by_their_names() -> None:
    from tightkv.integrations.vllm.layer_numbers import draft_layers, model_layers

    own = ["model.layers.3.self_attn.attn", "model.layers.7.self_attn.attn"]
    drafts = ["model.layers.8.self_attn.attn", "mtp.layers.0.self_attn.attn", "head.attn"]
    layers = {name: SimpleNamespace(is_draft_layer=name == "head.attn") for name in own + drafts}
    config = SimpleNamespace(
        speculative_config=speculative("mtp"),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=8)),
    )
    assert draft_layers(layers, config) == set(drafts)
    assert list(model_layers(layers, drafts).values()) == [3, 7, -1, -1, -1]
    config.speculative_config = None
    assert draft_layers(layers, config) == set()


@pytest.mark.parametrize(
    ("found", "second", "shares"),
    [
        (speculative("eagle"), True, True),
        (speculative("mtp"), True, True),
        (speculative("mtp", several=True), True, False),
        (speculative("draft_model"), True, False),
        (speculative("eagle"), False, False),
        (None, True, False),
    ],
)
def test_the_table_of_a_draft_is_the_models_where_it_takes_its_metadata(
    found: Any, second: bool, shares: bool
) -> None:
    from tightkv.integrations.vllm.backend import _group_rings
    from tightkv.integrations.vllm.compat import drafts_share_metadata

    config = SimpleNamespace(speculative_config=found, use_v2_model_runner=second)
    assert drafts_share_metadata(config) == shares
    layers: list[Any] = [SimpleNamespace(group_rings=None, is_draft=i == 2) for i in range(3)]
    model = _group_rings(layers, shares)
    draft = _group_rings(layers[2:], shares)
    assert (draft is model) == shares
    assert _group_rings(layers, shares) is model  # another builder of the same layers
    assert layers[2].group_rings is draft  # which KV connectors tell of loaded blocks


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (speculative("dflash"), "dflash"),
        (speculative("dspark"), "dspark"),
        (speculative("mtp", gemma=True), "gemma4_mtp"),
        (speculative("eagle3"), None),
        (None, None),
    ],
)
def test_drafts_that_do_not_append_to_pages_are_refused(found: Any, name: str | None) -> None:
    from tightkv import KVQuantConfig
    from tightkv.integrations.vllm.engine_checks import check_engine_options
    from tightkv.integrations.vllm.options import EngineOptions

    cache = {"cache_dtype": "auto", "user_specified_block_size": False, "prefix_match_unit": None}
    shape = SimpleNamespace(num_hidden_layers=2)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(is_encoder_decoder=False, hf_text_config=shape),
        parallel_config=SimpleNamespace(),
        kv_transfer_config=None,
        speculative_config=found,
    )
    options = EngineOptions(KVQuantConfig())
    if name is None:
        check_engine_options(options, config)
        return
    with pytest.raises(ValueError, match=f"with speculation by {name}: .*choose another method"):
        check_engine_options(options, config)
