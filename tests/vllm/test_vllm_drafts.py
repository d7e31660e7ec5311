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
    del config.model_config.hf_text_config.num_hidden_layers  # some call it otherwise
    assert draft_layers(layers, config) == set(drafts[1:])
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
    from tightkv.integrations.vllm.compat import drafts_share_metadata
    from tightkv.integrations.vllm.step.backend import _group_rings

    config = SimpleNamespace(speculative_config=found, use_v2_model_runner=second)
    assert drafts_share_metadata(config) == shares
    layers: list[Any] = [SimpleNamespace(group_rings=None, is_draft=i == 2) for i in range(3)]
    model = _group_rings(layers, shares)
    draft = _group_rings(layers[2:], shares)
    assert (draft is model) == shares
    assert _group_rings(layers, shares) is model  # another builder of the same layers
    assert layers[2].group_rings is draft  # which KV connectors tell of loaded blocks


@pytest.mark.parametrize(
    ("found", "parallel", "added"),
    [
        (speculative("eagle"), False, 0),
        (speculative("mtp"), False, 0),
        (speculative("eagle3"), True, 3),
        (speculative("draft_model"), False, 3),
        (None, False, 0),
    ],
)
def test_which_drafts_have_tokens_that_the_host_does_not_count(
    found: Any, parallel: bool, added: int
) -> None:
    from tightkv.integrations.vllm.step.backend import _added

    if found is not None:
        found.parallel_drafting = parallel
    config = SimpleNamespace(speculative_config=found)
    layers: list[Any] = [SimpleNamespace(is_draft=i == 1) for i in range(2)]
    assert _added(layers[1:], config) == added
    assert _added(layers, config) == _added(layers[:1], config) == 0, "the model's own step"


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
    if name is None:
        check_speculation(found)
        return
    with pytest.raises(ValueError, match=f"with speculation by {name}: .*choose another method"):
        check_speculation(found)


def test_drafts_that_are_counted_on_the_device_are_refused() -> None:
    found = speculative("eagle3")
    found.enable_adaptive_verification = True
    with pytest.raises(ValueError, match=r"adaptive verification: .*leave enable_adaptive"):
        check_speculation(found)


def check_speculation(found: Any) -> None:
    """As an engine with these drafts does at start."""
    from tightkv import KVQuantConfig
    from tightkv.integrations.vllm.options import EngineOptions
    from tightkv.integrations.vllm.start.engine_checks import check_engine_options

    cache = {"cache_dtype": "auto", "user_specified_block_size": False, "prefix_match_unit": None}
    shape = SimpleNamespace(num_hidden_layers=2)
    config = SimpleNamespace(
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, architectures=["LlamaForCausalLM"], hf_text_config=shape
        ),
        parallel_config=SimpleNamespace(),
        kv_transfer_config=None,
        speculative_config=found,
    )
    check_engine_options(EngineOptions(KVQuantConfig()), config)


def builder(pages_per_block: int) -> Any:
    """Of an engine with two sequences and up to three drafts, and pages of 32 tokens."""
    import torch

    from tightkv import KVQuantConfig
    from tightkv.integrations.vllm.step.backend import TightBuilder
    from tightkv.integrations.vllm.step.batch_split import Limits
    from tightkv.integrations.vllm.step.ring_table import BatchRings
    from tightkv.integrations.vllm.step.step_sealing import GroupRings
    from tightkv.kernels import reference

    made = object.__new__(TightBuilder)
    cfg = KVQuantConfig(page_size=32, exact_pages=1, sinks=4, window_bits=16)
    layout = SimpleNamespace(cfg=cfg, page_size=32)
    impl: Any = SimpleNamespace(layout=layout, limits=Limits(2, 2, 4), short_prompt=0, window=None)
    impl.step = SimpleNamespace(kernels=reference)
    impl.kernels, impl.reads, impl.feedback = reference, None, None
    rings = tuple(torch.zeros(n, 4, 1, 64) for n in (3, 3, 11, 11))
    impl.exact_tensors = lambda: rings
    made.impls = [impl]
    made.layers = [SimpleNamespace(kv_cache=torch.zeros(12, 1), impl=impl)]
    made.group_rings = impl.group_rings = GroupRings()
    made.device, made.pages = torch.device("cpu"), None
    made.reorder_batch_threshold, made.pages_per_block = 4, pages_per_block
    made.inside = torch.arange(pages_per_block, dtype=torch.int32)
    made.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=2), parallel_config=SimpleNamespace()
    )
    made.left_pad = torch.zeros(2, dtype=torch.int32)
    made.out = torch.zeros(len(BatchRings._fields), 2, dtype=torch.int32)
    return made


@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_metadata_that_is_updated_is_that_of_another_build(pages_per_block: int) -> None:
    """As a CUDA graph of a draft's passes holds it: all tensors keep their addresses."""
    import torch

    size = 32 * pages_per_block
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    starts, lengths = torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(2).int()
    slots = torch.zeros(2, dtype=torch.long)

    def common(counts: list[int], *tensors: Any) -> Any:
        begins = torch.tensor([0, *counts]).cumsum(0).int()
        given = tensors or (lengths, starts, slots)
        return SimpleNamespace(
            block_table_tensor=table,
            query_start_loc_cpu=begins,
            **dict(zip(("seq_lens", "query_start_loc", "slot_mapping"), given, strict=True)),
            num_actual_tokens=sum(counts),
        )

    def prompts() -> Any:
        counts = [30, 63]
        at = [(row, i) for row, count in enumerate(counts) for i in range(count)]
        where = [int(table[row, i // size]) * size + i % size for row, i in at]
        begins = torch.tensor([0, *counts]).cumsum(0).int()
        return common(counts, torch.tensor(counts).int(), begins, torch.tensor(where))

    updated, rebuilt = builder(pages_per_block), builder(pages_per_block)
    metadata = None
    for step in range(1, 5):  # both sequences begin another page
        for made in (updated, rebuilt):
            if step == 1:
                made.build(0, prompts())
        lengths.copy_(torch.tensor([30 + step, 63 + step]))
        newest = (lengths - 1).tolist()
        slots.copy_(
            torch.tensor([int(table[i, n // size]) * size + n % size for i, n in enumerate(newest)])
        )
        other = rebuilt.build(0, common([1, 1]))
        if metadata is None:
            metadata = updated.build(0, common([1, 1]))
        else:
            updated.update_draft_decode_metadata(metadata)
        (mine,), (theirs,) = metadata.parts, other.parts
        assert torch.equal(torch.stack(mine.rows), torch.stack(theirs.rows))
        assert torch.equal(mine.block_table, theirs.block_table)
        assert mine.rows.lengths.tolist() == lengths.tolist()
        assert mine.rows.ring_read_from.tolist() == [n // 32 * 32 for n in newest]
