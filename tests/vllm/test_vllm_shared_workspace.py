"""Prompts that share a workspace: which these are, and that a layer's output is what it was."""

from __future__ import annotations

import itertools
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ragged_caches import plain_varlen, use_varlen
from tightkv import KVQuantConfig
from tightkv.fit import LayerFit
from tightkv.integrations.vllm.step import batch_split
from tightkv.integrations.vllm.step.batch_split import ALONE_FROM, Limits, PartRange, split_batch
from tightkv.integrations.vllm.step.layer_step import LayerStep
from tightkv.integrations.vllm.step.metadata import BatchPart, make_part
from tightkv.integrations.vllm.step.ring_table import BatchRings, RingTable
from tightkv.integrations.vllm.step.step_sealing import GroupRings
from tightkv.integrations.vllm.step.warm_up import Kinds, kinds_of_parts
from tightkv.kernels import ragged_plan, reference, sdpa
from tightkv.kernels.prefill import MIN_QUERIES
from tightkv.kernels.ragged_plan import is_worth
from tightkv.math.centers import Centers
from tightkv.math.key_scale import KeyScale
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

pytest.importorskip("triton")
pytest.importorskip("tightkv.kernels.triton.backend")
from tightkv.kernels.triton import backend as triton_kernels

ROOM = 65_536


def cut(counts: list[int], before: list[int], most_decoding: int = 1) -> list[PartRange]:
    first = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lengths = [a + b for a, b in zip(counts, before, strict=True)]
    return split_batch(first, lengths, most_decoding, ROOM)


# --- which share ---
def test_short_prompts_after_long_prefixes_share() -> None:
    assert cut([1, 1, 128, 64, 200], [90_000, 5, 8000, 8000, 8100]) == [
        PartRange(0, 2, False, 1),
        PartRange(2, 5, True, 200, most_before=(8000, 8000, 8100)),
    ]
    assert cut([64], [32_000]) == [PartRange(0, 1, True, 64, most_before=(32_000,))]


def test_longer_prompts_share_with_their_neighbours() -> None:
    assert cut([300, 600], [8000, 0]) == [PartRange(0, 2, True, 600, most_before=(8000, 0))]
    assert cut([300], [8000]) == [PartRange(0, 1, True, 300, most_before=(8000,))]
    assert cut([300], [80]) == [PartRange(0, 1, True, 300, 80)], "not worth it"
    assert cut([64, ALONE_FROM, 300, 64], [17_000, 7, 8000, 8000]) == [
        PartRange(0, 1, True, 64, most_before=(17_000,)),
        PartRange(1, 2, True, ALONE_FROM, 7),
        PartRange(2, 4, True, 300, most_before=(8000, 8000)),
    ]


def test_prompts_without_a_prefix_share() -> None:
    assert cut([1, 20, 600], [9, 0, 0]) == [
        PartRange(0, 1, False, 1),
        PartRange(1, 3, True, 600, most_before=(0, 0)),
    ]
    assert cut([600], [0]) == [PartRange(0, 1, True, 600, most_before=(0,))]


def test_what_does_not_fit_goes_its_own_way() -> None:
    assert cut([64, 64, 64], [17_000, ROOM - 63, ROOM - 64]) == [
        PartRange(0, 1, True, 64, most_before=(17_000,)),
        PartRange(1, 2, True, 64),
        PartRange(2, 3, True, 64, most_before=(ROOM - 64,)),
    ]
    assert cut([300, 300], [ROOM, ROOM]) == [
        PartRange(0, 1, True, 300, ROOM),
        PartRange(1, 2, True, 300, ROOM),
    ]


def test_prompts_that_do_not_fit_go_together() -> None:
    """Long ones still one by one: only those have a call of their own to gain."""
    assert cut([64] * 3, [ROOM] * 3) == [PartRange(0, 3, True, 64)]
    assert cut([1, 64, 17, 300, 64, 64], [9, ROOM, ROOM, ROOM, ROOM, 17_000]) == [
        PartRange(0, 1, False, 1),
        PartRange(1, 3, True, 64),
        PartRange(3, 4, True, 300, ROOM),
        PartRange(4, 5, True, 64),
        PartRange(5, 6, True, 64, most_before=(17_000,)),
    ]


def test_lengths_that_are_not_exact() -> None:
    """They are no `context_len`; the workspace, which needs bounds only, takes all that fit."""
    first, lengths = [0, 1, 301, 301 + ALONE_FROM], [9, 8300, 8000 + ALONE_FROM]
    decode = PartRange(0, 1, False, 1)
    alone = PartRange(1, 2, True, 300), PartRange(2, 3, True, ALONE_FROM)
    assert split_batch(first, lengths, 1, exact=False) == [decode, *alone]
    assert split_batch(first, lengths, 1, ROOM, exact=False) == [
        decode,
        PartRange(1, 3, True, ALONE_FROM, most_before=(8000, 8000)),
    ]
    assert split_batch(first, [9, 8300, ROOM + 1], 1, ROOM, exact=False) == [
        decode,
        PartRange(1, 2, True, 300, most_before=(8000,)),
        alone[1],
    ]


def test_what_is_not_worth_it_is_split_as_before() -> None:
    counts, before = [1, 20, 17, 300], [9000, 9000, 9000, 20]
    assert not is_worth(counts[1:], before[1:])
    first = [sum(counts[:i]) for i in range(len(counts) + 1)]
    lengths = [a + b for a, b in zip(counts, before, strict=True)]
    assert cut(counts, before) == split_batch(first, lengths, 1)


def test_every_sequence_is_in_exactly_one_part() -> None:
    choose = random.Random(0)
    shared = 0
    for _ in range(600):
        counts = [choose.choice([0, 1, 9, 64, 300, 2000]) for _ in range(choose.randint(1, 8))]
        before = [choose.choice([0, 50, 8000, 70_000]) for _ in counts]
        most_decoding = choose.choice([1, 9])
        parts = cut(counts, before, most_decoding)
        assert [i for part in parts for i in range(part.begin, part.end)] == [*range(len(counts))]
        for part in parts:
            inside = counts[part.begin : part.end]
            assert part.max_query_len == max(inside)
            assert part.is_prefill == (part.max_query_len > most_decoding)
            assert part.context_len is None or part.most_before is None
            if part.most_before is None:
                # a long prompt is never among others without a workspace
                assert part.max_query_len < MIN_QUERIES or part.end == part.begin + 1
                continue
            shared += 1
            assert list(part.most_before) == before[part.begin : part.end]
            assert all(a + b <= ROOM for a, b in zip(inside, part.most_before, strict=True))
            assert is_worth(inside, part.most_before)
    assert shared > 50


# --- a layer ---
HEADS, GROUP, DIM = 1, 2, 64
CFG = KVQuantConfig(page_size=32, exact_pages=1, sinks=2, window_bits=16)
CFG_8 = CFG.replace(window_bits=8)
WINDOWS = [
    pytest.param(CFG, marks=pytest.mark.thorough, id="16 bits"),
    pytest.param(CFG_8, id="8 bits"),
]


class Engine:
    """Sequences in pages of their own, stepped as the metadata builder does."""

    def __init__(self, sequences: int, rows: int, cfg: KVQuantConfig = CFG) -> None:
        self.layout = PageLayout(cfg, HEADS, DIM, torch.float16)
        self.codec = Codec(self.layout)
        blocks = 8
        self.ids = torch.arange(1, 1 + sequences * blocks).view(sequences, blocks).int()
        self.pages = self.layout.new_pages(1 + sequences * blocks)
        self.table = RingTable(cfg, rows, len(self.pages), 0, "cpu")
        self.out = torch.zeros(len(BatchRings._fields), sequences, dtype=torch.int32)
        key, value, scales = self.layout.new_ring(rows + 1, self.layout.ring_tokens)
        sinks = [torch.zeros(5 * rows + 1, cfg.sinks, HEADS, DIM).half() for _ in "kv"]
        self.rings = (key, value, *sinks, *(() if scales is None else (scales,)))
        self.lengths = [0] * sequences

    def parts(self, counts: list[int], room: int | None, spare: int = 0) -> list[BatchPart]:
        """Of a step that gives each sequence so many tokens; the host expects `spare` more."""
        page, before = CFG.page_size, self.lengths
        self.lengths = [a + b for a, b in zip(before, counts, strict=True)]
        first = [sum(counts[:i]) for i in range(len(counts) + 1)]
        starts = torch.tensor(first, dtype=torch.int32)
        slots = [
            int(self.ids[row, at // page]) * page + at % page
            for row, end in enumerate(self.lengths)
            for at in range(before[row], end)
        ]
        lengths = torch.tensor(self.lengths).int()
        rows = self.table.step(self.ids, lengths, starts, torch.tensor(slots), self.out)
        ranges = split_batch(first, [n + spare for n in self.lengths], 1, room)
        zeros = torch.zeros(len(counts), dtype=torch.int32)
        return [make_part(part, first, starts, self.ids, rows, zeros, room) for part in ranges]

    def run(
        self,
        kernels: Any,
        parts: list[BatchPart],
        states: tuple[Tensor, Tensor, Tensor],
        centers: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Output and cache after a step, which leaves the engine's cache as it was."""
        step = LayerStep(kernels, self.codec, 0.125, None, **options)
        pages, rings = self.pages.clone(), tuple(x.clone() for x in self.rings)
        output = torch.full_like(states[0], torch.nan)
        step.run(parts, pages, rings, *states, output, centers=centers)
        return (output, pages, *rings)


def states(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """As a model has them: parts of one tensor."""
    make = torch.Generator().manual_seed(seed)
    heads = (HEADS * GROUP, HEADS, HEADS)
    qkv = torch.randn(count, sum(heads), DIM, generator=make).half()
    query, key, value = qkv.split(heads, 1)
    return query, key, value


@pytest.mark.parametrize("cfg", WINDOWS)
@pytest.mark.parametrize("rows", [4, 2], ids=["rings", "few rings"])
@pytest.mark.parametrize("room,spare", [(4096, 0), (160, 0), (160, 5)])
def test_a_layer_gives_what_it_gave_without_a_workspace(
    room: int, spare: int, rows: int, cfg: KVQuantConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After cached prefixes of 0 to 130 tokens, some of whose rings and sinks were lost."""
    monkeypatch.setattr(batch_split, "is_worth", lambda *_: True)
    engine = Engine(4, rows, cfg)
    filling = engine.parts([130, 64, 0, 33], None)
    _, engine.pages, *rings = engine.run(reference, filling, states(227, 1))
    engine.rings = tuple(rings)
    (shared,) = engine.parts([7, 40, 5, 2], room, spare)
    assert len(shared.ragged) == (1 if room == 4096 else 2)
    calls: list[Tensor] = []

    def attention(*arguments: Any) -> Tensor:
        calls.append(arguments[0])
        return plain_varlen(*arguments)

    given, sinks = states(54, 2), torch.tensor([0.5, -1.0])
    use_varlen(monkeypatch, attention)
    made = engine.run(triton_kernels, [shared], given, sink_logits=sinks)
    assert len(calls) == len(shared.ragged)
    plain = replace(shared, ragged=())
    before = engine.run(triton_kernels, [plain], given, sink_logits=sinks)
    assert len(calls) == len(shared.ragged)
    torch.testing.assert_close(made[0], before[0], atol=8e-3, rtol=4e-3)
    for a, b in zip(made[1:], before[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("cfg", WINDOWS)
def test_decodes_and_prompts_of_one_step(
    cfg: KVQuantConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of tokens relative to centers, chunk after chunk, as they are without a workspace."""
    monkeypatch.setattr(batch_split, "is_worth", lambda *_: True)
    engine = Engine(4, 4, cfg)
    centers = torch.randn(HEADS, DIM).half(), torch.randn(HEADS, DIM).half()
    filling = engine.parts([90, 33, 64, 0], None)
    _, engine.pages, *rings = engine.run(reference, filling, states(187, 1), centers)
    engine.rings = tuple(rings)
    use_varlen(monkeypatch)
    for seed, counts in enumerate(([1, 1, 40, 33], [1, 1, 1, 35], [1, 1, 1, 20])):
        *decodes, shared = engine.parts(counts, 4096)
        assert len(decodes) == 1 and len(shared.ragged) == 1
        given = states(sum(counts), 2 + seed)
        made = engine.run(triton_kernels, [*decodes, shared], given, centers)
        plain = [*decodes, replace(shared, ragged=())]
        before = engine.run(triton_kernels, plain, given, centers)
        torch.testing.assert_close(made[0], before[0], atol=8e-3, rtol=4e-3)
        assert all(torch.equal(a, b) for a, b in zip(made[1:], before[1:], strict=True))
        _, engine.pages, *rings = made
        engine.rings = tuple(rings)


def test_which_layers_have_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PageLayout(CFG, 8, 128, torch.bfloat16)
    step = LayerStep(triton_kernels, Codec(layout), 0.125, None)
    monkeypatch.setattr(sdpa, "_VARLEN", [])
    found = [step.workspace_tokens]
    use_varlen(monkeypatch)
    found.append(step.workspace_tokens)
    assert found == [None, 65_536]  # None: the engine has no such attention
    assert replace(step, window=100).workspace_tokens is None
    assert replace(step, softcap=30.0).workspace_tokens is None
    assert replace(step, kernels=reference).workspace_tokens is None
    single = PageLayout(CFG, 8, 128, torch.float32)
    assert replace(step, codec=Codec(single)).workspace_tokens is None


def test_every_engine_counts_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PageLayout(CFG, 8, 128, torch.bfloat16)
    step = LayerStep(triton_kernels, Codec(layout), 0.125, None)
    taken: list[int] = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: taken.append(size))
    query = torch.zeros(100, 32, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(sdpa, "_VARLEN", [])
    step.take_workspace(query)
    assert taken == []
    use_varlen(monkeypatch)
    step.take_workspace(query)
    most = (256 << 20) + 2 * query.nbytes + 3 * 100 * 32 * 4 + (64 << 20)
    assert taken == [most]
    step.take_workspace(query, copied=9)
    assert taken == [most, most + 9]


def test_copies_of_a_layers_inputs_are_counted() -> None:
    query = torch.zeros(10, HEADS * GROUP, DIM).half()
    token = query.nbytes // GROUP  # of keys, or of values
    impl = make_layer()
    assert impl._copied_bytes(query) == 0
    scaled = LayerFit(impl.layout.cfg, scale=KeyScale(torch.ones(HEADS, DIM)))
    impl.use_fit(scaled)
    assert impl._copied_bytes(query) == query.nbytes + token
    centers = Centers(torch.randn(HEADS, DIM), torch.randn(HEADS, DIM))
    impl.use_fit(replace(scaled, centers=centers))
    assert impl._copied_bytes(query) == query.nbytes + 3 * token
    impl.has_readers = True
    assert impl._copied_bytes(query) == query.nbytes + 5 * token


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("heads,kv_heads", [(8, 1), (1, 1), (14, 2), (32, 8), (6, 2), (32, 32)])
def test_splits_of_the_keys_fit_what_is_counted(
    heads: int, kv_heads: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention's own choice is that for the longest prompt alone, times all queries."""
    pytest.importorskip("vllm")
    from tightkv.integrations.vllm.step import flash_attention

    asked: list[int] = []

    def attention(q: Tensor, *_: Any, num_splits: int, **__: Any) -> tuple[Tensor, Tensor]:
        asked.append(num_splits)
        return q, torch.zeros(heads, len(q))

    fake = SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", fake)
    monkeypatch.setattr(flash_attention, "processor_count", lambda _: 132)
    most = []
    for prompts, count, before in itertools.product((1, 5, 31, 200), (17, 64, 300), (0, 60, 9000)):
        starts = torch.arange(prompts + 1, dtype=torch.int32) * count
        lengths = torch.full((prompts,), before, dtype=torch.int32)
        (group,) = ragged_plan.plan_groups(
            [count] * prompts, [before] * prompts, 1 << 30, starts, lengths
        )
        q = torch.empty(prompts * count, heads, dim, dtype=torch.float16, device="meta")
        k = torch.empty(group.tokens, kv_heads, dim, dtype=torch.float16, device="meta")
        flash_attention.varlen_flash_attention_3(q, k, k, group, 1.0, q)
        rows = prompts * count * heads
        assert asked[-1] == 1 or rows * asked[-1] <= ragged_plan.SPLIT_ROWS
        assert asked[-1] >= 1 and (before > 500 or asked[-1] == 1)
        most.append(asked[-1])
    assert max(most) > 4, "few queries are split"


def test_the_whole_workspace_is_used_to_warm_up() -> None:
    layout = PageLayout(CFG, HEADS, DIM, torch.float16)
    sizes = (layout.ring_tokens,) * 2 + (CFG.sinks,) * 2
    rings = tuple(torch.zeros(2, n, HEADS, DIM).half() for n in sizes)
    *others, last = kinds_of_parts(layout, rings, Kinds(1, 2), 8192)
    assert not any(part.ragged for part in others)
    (group,) = last.ragged
    assert group.tokens == 8192 == int(group.cu_seqlens_k[-1]) and group.rows == slice(0, 4)
    assert last.tokens == group.queries and int(last.rows.lengths.sum()) == 8192
    assert last.block_table.shape[1] * CFG.page_size >= int(last.rows.lengths.max())
    assert ragged_plan.WORKSPACE_BYTES <= 256 << 20


# --- layers of an engine, with metadata of the builder ---
def make_layer(kernels: Any = triton_kernels, window: int | None = None) -> Any:
    pytest.importorskip("vllm")
    from tightkv.integrations.vllm.step.attention import TightAttention

    layer = SimpleNamespace(
        impl=SimpleNamespace(scale=0.125), num_heads=HEADS * GROUP, num_kv_heads=HEADS,
        head_size=DIM, kv_cache_dtype="auto", sliding_window=window,
    )  # fmt: skip
    layout = PageLayout(CFG, HEADS, DIM, torch.float16)
    return TightAttention(layer, layout, kernels, Limits(4, 4, 1), torch.device("cpu"))


class Group:
    """Layers with one metadata builder; sequences of eight blocks each."""

    def __init__(self, *impls: Any, sequences: int = 3) -> None:
        from tightkv.integrations.vllm.step.backend import TightBuilder

        made = object.__new__(TightBuilder)
        blocks = 8
        self.ids = torch.arange(1, 1 + sequences * blocks).view(sequences, blocks).int()
        shape = (1 + sequences * blocks, 1, 1, impls[0].layout.page_bytes)
        self.caches = [torch.zeros(shape, dtype=torch.uint8) for _ in impls]
        pairs = zip(impls, self.caches, strict=True)
        made.impls = list(impls)
        made.layers = [SimpleNamespace(impl=impl, kv_cache=cache) for impl, cache in pairs]
        made.group_rings, made.device, made.pages = GroupRings(), torch.device("cpu"), None
        for impl in impls:
            impl.group_rings = made.group_rings
        made.reorder_batch_threshold, made.pages_per_block = 1, 1
        scheduler = SimpleNamespace(max_num_seqs=sequences)
        # with a connector, appends seal pages at once
        config = SimpleNamespace(
            scheduler_config=scheduler,
            kv_transfer_config=SimpleNamespace(),
            parallel_config=SimpleNamespace(),
        )
        made.vllm_config, made.left_pad = config, torch.zeros(sequences, dtype=torch.int32)
        made.out = torch.zeros(len(BatchRings._fields), sequences, dtype=torch.int32)
        self.builder, self.lengths = made, [0] * sequences

    def build(self, counts: list[int], unknown: int = 0) -> Any:
        """A step; of each sequence the host does not count so many tokens."""
        page, before = CFG.page_size, self.lengths
        self.lengths = [a + b for a, b in zip(before, counts, strict=True)]
        slots = [
            int(self.ids[row, at // page]) * page + at % page
            for row, end in enumerate(self.lengths)
            for at in range(before[row], end)
        ]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        lengths = torch.tensor(self.lengths).int()
        common = SimpleNamespace(
            block_table_tensor=self.ids, query_start_loc_cpu=starts, query_start_loc=starts,
            seq_lens=lengths, seq_lens_cpu_upper_bound=lengths - unknown,
            slot_mapping=torch.tensor(slots), num_actual_tokens=sum(counts),
        )  # fmt: skip
        return self.builder.build(0, common)

    def forward(
        self, metadata: Any, given: tuple[Tensor, Tensor, Tensor], keep: bool
    ) -> list[Tensor]:
        """Output of each layer; its cache and rings are left as they were unless kept."""
        found = []
        for impl, cache in zip(self.builder.impls, self.caches, strict=True):
            held = [x.clone() for x in (cache, *impl.exact_tensors())]
            output = torch.full_like(given[0], torch.nan)
            found.append(impl.forward(None, *given, cache, metadata, output))
            if not keep:
                for x, old in zip((cache, *impl.exact_tensors()), held, strict=True):
                    x.copy_(old)
        return found


def outputs_of_hits(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Of prompts after cached prefixes, with a workspace and without, and calls of each."""
    monkeypatch.setattr(batch_split, "is_worth", lambda *_: True)
    use_varlen(monkeypatch)
    group.forward(group.build([130, 64, 33]), states(227, 1), keep=True)
    metadata = group.build([7, 40, 1])
    calls: list[int] = []

    def attention(*arguments: Any) -> Tensor:
        calls.append(len(arguments[0]))
        return plain_varlen(*arguments)

    use_varlen(monkeypatch, attention)
    given = states(48, 2)
    made = group.forward(metadata, given, keep=False)
    plain = replace(metadata, parts=tuple(replace(x, ragged=()) for x in metadata.parts))
    return made, group.forward(plain, given, keep=False), calls


def test_scaled_keys_and_centers_share_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled queries and keys have the dtype they came with, or none of them would share."""
    scale = torch.ones(HEADS, DIM)
    scale[0, [3, 40]] = torch.tensor([8.0, 0.25])
    impl = make_layer()
    centers = Centers(torch.randn(HEADS, DIM), torch.randn(HEADS, DIM))
    impl.use_fit(LayerFit(impl.layout.cfg, scale=KeyScale(scale), centers=centers))
    made, before, calls = outputs_of_hits(Group(impl), monkeypatch)
    assert calls == [48]
    torch.testing.assert_close(made[0], before[0], atol=8e-3, rtol=4e-3)


def test_windows_among_layers_with_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """They get the same parts, and attend as they did."""
    group = Group(make_layer(), make_layer(window=50))
    made, before, calls = outputs_of_hits(group, monkeypatch)
    assert calls == [48], "of the layer without a window"
    torch.testing.assert_close(made[0], before[0], atol=8e-3, rtol=4e-3)
    assert torch.equal(made[1], before[1])


def test_a_step_of_decodes_asks_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same for every step, and a model has many layers."""
    use_varlen(monkeypatch)
    group, asked = Group(make_layer(), sequences=2), []
    find = group.builder._workspace_tokens
    group.builder._workspace_tokens = lambda: asked.append(1) or find()
    (prompts,) = group.build([128, 128]).parts
    assert asked == [1] and len(prompts.ragged) == 1
    (decodes,) = group.build([1, 1]).parts
    assert asked == [1] and not decodes.ragged and not decodes.is_prefill


def test_groups_that_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows alone have no workspace, and the reference takes long prompts one by one."""
    use_varlen(monkeypatch)
    for impls in ([make_layer(window=50)], [make_layer(), make_layer(reference)]):
        parts = Group(*impls, sequences=2).build([128, 128]).parts
        assert not any(part.ragged for part in parts)
    (part,) = Group(make_layer(), sequences=2).build([128, 128]).parts
    assert len(part.ragged) == 1


@pytest.mark.parametrize("filled,unknown", [([130, 64, 33], 1), ([0, 0, 0], 3)])
def test_first_pass_of_a_draft(
    filled: list[int], unknown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequences are longer than vLLM's host says; all their tokens are in the workspace."""
    monkeypatch.setattr(batch_split, "is_worth", lambda *_: True)
    use_varlen(monkeypatch)
    group = Group(make_layer())
    group.builder.added = 3
    if any(filled):
        group.forward(group.build(filled), states(sum(filled), 1), keep=True)
    metadata = group.build([7, 40, 17], unknown)
    (part,) = metadata.parts
    (shared,) = part.ragged
    assert shared.tokens >= int(shared.cu_seqlens_k[-1]) == sum(filled) + 64
    assert shared.max_keys >= int(shared.cu_seqlens_k.diff().max())
    given = states(64, 2)
    made = group.forward(metadata, given, keep=False)
    plain = replace(metadata, parts=(replace(part, ragged=()),))
    torch.testing.assert_close(
        made[0], group.forward(plain, given, keep=False)[0], atol=8e-3, rtol=4e-3
    )
