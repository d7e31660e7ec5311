"""How a batch is cut into parts, and the options of an engine."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightkv import KVQuantConfig
from tightkv.integrations.vllm.options import EngineOptions, engine_options, with_options
from tightkv.integrations.vllm.step.batch_split import SHORT_PROMPT, Limits, PartRange, split_batch
from tightkv.integrations.vllm.step.ring_table import BatchRings, RingTable
from tightkv.kernels import reference
from tightkv.kernels.prefill import MIN_QUERIES
from tightkv.pages.layout import RING_SLACK, PageLayout

LONG = MIN_QUERIES


def cut(counts: list[int], before: list[int] | None, most_decoding: int = 1) -> list[PartRange]:
    first = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lengths = None if before is None else [a + b for a, b in zip(counts, before, strict=True)]
    return split_batch(first, lengths, most_decoding)


# --- cutting ---
def test_decodes_are_one_part() -> None:
    assert cut([1, 1, 1], [5, 9, 700]) == [PartRange(0, 3, False, 1)]
    assert cut([4, 2, 1], [5, 9, 700], most_decoding=4) == [PartRange(0, 3, False, 4)]
    assert cut([], []) == []


def test_stand_ins_of_a_padded_batch_stay_with_the_decodes() -> None:
    assert cut([2, 2, 0, 0], [5, 9, 0, 0], most_decoding=2) == [PartRange(0, 4, False, 2)]


def test_short_prompts_are_one_part() -> None:
    assert cut([1, 2, LONG - 1, 7], [9, 0, 3, 0]) == [
        PartRange(0, 1, False, 1),
        PartRange(1, 4, True, LONG - 1),
    ]


def test_a_long_prompt_is_alone_and_the_host_knows_what_came_before() -> None:
    assert cut([1, LONG], [9, 33]) == [PartRange(0, 1, False, 1), PartRange(1, 2, True, LONG, 33)]
    assert cut([LONG, LONG + 5], [0, 64]) == [
        PartRange(0, 1, True, LONG, 0),
        PartRange(1, 2, True, LONG + 5, 64),
    ]


def test_short_prompts_on_both_sides_of_a_long_one() -> None:
    assert cut([3, 5, LONG, 2, 9], [0, 1, 2, 3, 4]) == [
        PartRange(0, 2, True, 5),
        PartRange(2, 3, True, LONG, 2),
        PartRange(3, 5, True, 9),
    ]


def test_few_new_tokens_of_a_prompt_are_a_part_with_the_decodes_before_them() -> None:
    short, more = SHORT_PROMPT, SHORT_PROMPT + 1
    assert cut([1, 1, 7, short], [9, 9, 0, 64], short) == [PartRange(0, 4, False, short)]
    assert cut([1, short, more, 2], [9, 0, 0, 0], short) == [
        PartRange(0, 2, False, short),
        PartRange(2, 4, True, more),  # not cut for the last one's sake
    ]
    assert cut([more, LONG, 3, short, more], [0] * 5, short) == [
        PartRange(0, 1, True, more),
        PartRange(1, 2, True, LONG, 0),
        PartRange(2, 4, False, short),
        PartRange(4, 5, True, more),
    ]


def test_short_prompts_decode_where_each_sequence_has_a_ring() -> None:
    limits = Limits(sequences=8, rows=4, decoding=2)
    assert limits.most_as_decoding(4, SHORT_PROMPT) == SHORT_PROMPT <= RING_SLACK
    assert limits.most_as_decoding(5, SHORT_PROMPT) == 2
    assert limits.most_as_decoding(4, 0) == 2


@pytest.mark.parametrize("page", [32, 64])
def test_a_batch_with_no_more_sequences_than_rings_gives_each_one(page: int) -> None:
    """Whoever comes and goes: so short prompts never read their own tokens as codes."""
    choose, rows = random.Random(0), 4
    table = RingTable(KVQuantConfig(page_size=page, exact_pages=1), rows, 400, 0, "cpu")
    out = torch.zeros(len(BatchRings._fields), rows, dtype=torch.int32)
    lengths, blocks, free = [0] * 9, [[0] * 40 for _ in range(9)], list(range(1, 400))
    for _ in range(200):
        batch = choose.sample(range(9), choose.randint(1, rows))
        slots, counts, ends = [], [], []
        for one in batch:
            if lengths[one] > 35 * page:  # finished: another sequence in its place
                free += [block for block in blocks[one] if block]
                lengths[one], blocks[one] = 0, [0] * 40
            count = choose.choice([1, 1, 2, SHORT_PROMPT])
            for at in range(lengths[one], lengths[one] + count):
                if not blocks[one][at // page]:
                    blocks[one][at // page] = free.pop(0)
                slots.append(blocks[one][at // page] * page + at % page)
            lengths[one] += count
            counts.append(count), ends.append(lengths[one])
        first = torch.tensor([0, *counts]).cumsum(0).int()
        ids = torch.tensor([blocks[one] for one in batch]).int()
        found = table.step(ids, torch.tensor(ends).int(), first, torch.tensor(slots), out)
        assert len(set(found.ring_rows.tolist())) == len(batch)
        assert int(found.ring_rows.max()) < rows
        assert bool((found.ring_read_from <= found.before).all()), "new tokens are exact"


def test_without_lengths_prompts_stay_together() -> None:
    assert cut([1, 3, LONG], None) == [PartRange(0, 1, False, 1), PartRange(1, 3, True, LONG)]


def test_every_sequence_is_in_exactly_one_part() -> None:
    choose = random.Random(0)
    for _ in range(200):
        counts = [choose.choice([0, 1, 2, 9, LONG, 1000]) for _ in range(choose.randint(1, 8))]
        before = [choose.randint(0, 500) for _ in counts]
        most_decoding = choose.choice([1, 2, SHORT_PROMPT])
        parts = cut(counts, before, most_decoding)
        assert [i for part in parts for i in range(part.begin, part.end)] == [*range(len(counts))]
        for part in parts:
            inside = counts[part.begin : part.end]
            assert part.max_query_len == max(inside)
            assert part.is_prefill == (part.max_query_len > most_decoding)
            assert (part.context_len is not None) == (
                part.is_prefill and part.max_query_len >= LONG
            )
            if part.context_len is not None:
                assert part.end == part.begin + 1 and part.context_len == before[part.begin]


# --- options ---
def test_options_of_the_environment_become_part_of_the_engines_config() -> None:
    options = EngineOptions(KVQuantConfig.preset("k4v4"))
    assert with_options({"a": 1}, options)["a"] == 1
    assert engine_options(with_options({}, options), env={}) == options


def test_bits_that_were_found_become_part_of_it_too() -> None:
    """vLLM keeps compiled models by this config."""
    given = {"tightkv": {"preset": "k2v2", "exact_rows": 3}}
    options = engine_options(given, env={})
    assert options is not None
    raised = replace(options, config=options.config.replace(layer_bits="0=k8v2"))
    assert engine_options(with_options(given, raised), env={}) == raised
    assert given == {"tightkv": {"preset": "k2v2", "exact_rows": 3}}


# --- layers ---
def some_attention(sinks: Any = None) -> Any:
    """Of a layer with 4 heads."""
    from tightkv.integrations.vllm.step.attention import TightAttention

    layout, device = PageLayout(KVQuantConfig(), 2, 32), torch.device("cpu")
    layer = SimpleNamespace(
        impl=SimpleNamespace(scale=1.0, sinks=sinks),
        num_heads=4,
        num_kv_heads=2,
        head_size=32,
        kv_cache_dtype="auto",
        sliding_window=None,
    )
    return TightAttention(layer, layout, reference, Limits(1, 1, 1), device)


@pytest.mark.vllm
def test_sink_logits_are_the_parameter_that_new_weights_are_loaded_into() -> None:
    heads, logits = 4, torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    made = some_attention(logits)
    logits.data.fill_(3.0)
    assert made.step.sink_logits is not None and made.step.sink_logits.tolist() == [3.0] * heads


@pytest.mark.vllm
def test_a_model_that_writes_to_the_cache_itself_is_refused_in_the_first_run() -> None:
    made, layer = some_attention(), SimpleNamespace(layer_name="layers.3")
    query = torch.zeros(1, 4, 32)
    with pytest.raises(ValueError, match=r"values of layers.3 to vLLM's cache.*TRITON_ATTN"):
        made.forward(layer, query, None, None, query, None, query)
