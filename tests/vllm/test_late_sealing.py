"""Pages that are sealed after the step, against pages that their append seals: random schedules."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_scheduler import LATER, PAGE, Scheduler, Sequence
from tightkv import KVQuantConfig
from tightkv.integrations.vllm.step.layer_step import LayerStep
from tightkv.integrations.vllm.step.metadata import BatchPart
from tightkv.integrations.vllm.step.ring_table import (
    NAMED,
    BatchRings,
    RingTable,
    ring_size,
    sink_rows,
)
from tightkv.kernels import reference
from tightkv.kernels.view import SealedLayer
from tightkv.math.feedback import QueryMetric
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

HEADS, GROUP, DIM = 1, 2, 32


class Layer:
    """A layer's pages, rings and sinks, and its steps with the reference kernels."""

    def __init__(
        self, cfg: KVQuantConfig, blocks: int, rows: int, drafts: int, feedback: bool
    ) -> None:
        layout = PageLayout(cfg, HEADS, DIM, torch.float16)
        self.codec = Codec(layout)
        self.pages = layout.new_pages(blocks)
        key, value, scales = layout.new_ring(rows + 1, ring_size(cfg, drafts))
        sinks = torch.zeros(2, sink_rows(rows), cfg.sinks, HEADS, DIM).half()
        self.rings = (key, value, *sinks, *([] if scales is None else [scales]))
        metric = QueryMetric((torch.eye(DIM) + 0.5).expand(HEADS, DIM, DIM))
        factors = self.codec.feedback_factors(metric, torch.device("cpu"))
        assert factors is not None
        self.feedback = factors if feedback else None

    def seal(self, chosen: Tensor) -> None:
        key, value, _, _, *scales = self.rings
        layer = SealedLayer(self.pages, key, value, self.feedback, *scales)
        reference.seal_layers(self.codec, [layer], chosen)

    def run(
        self,
        part: BatchPart,
        inherited: tuple[Tensor, Tensor] | None,
        states: tuple[Tensor, ...],
        seals_later: bool,
    ) -> Tensor:
        output = torch.full_like(states[0], torch.nan)
        step = LayerStep(reference, self.codec, 0.3, None)
        step.run(
            *([part], self.pages, self.rings, *states, output),
            inherited=inherited,
            feedback=self.feedback,
            seals_later=seals_later,
        )
        return output


class Engine(Scheduler):
    """Runs a layer that seals later beside one that seals at once."""

    def __init__(
        self, blocks: int, rows: int, drafts: int, seed: int, cfg: KVQuantConfig, feedback: bool
    ) -> None:
        super().__init__(blocks, rows, drafts, seed, later=cfg)
        self.late, self.at_once = (Layer(cfg, blocks, rows, drafts, feedback) for _ in "ab")
        make = torch.Generator().manual_seed(seed)
        self.states = torch.randn(1 << 12, 2 * HEADS + GROUP, DIM, generator=make).half()
        self.compared = 0

    def states_of(self, work: list[tuple[Sequence, int]]) -> tuple[Tensor, ...]:
        """Queries, keys and values of tokens, by what they and all before them are."""
        names = [
            hash(self.name(seq, at)) % len(self.states)
            for seq, count in work
            for at in range(seq.computed, seq.computed + count)
        ]
        return self.states[names].split([GROUP, HEADS, HEADS], 1)

    def step(
        self,
        blocks: Tensor,
        lengths: Tensor,
        first: Tensor,
        slots: Tensor,
        copies: bool,
        drafting: bool = False,
    ) -> BatchRings:
        rows = super().step(blocks, lengths, first, slots, copies, drafting)
        zeros = torch.zeros(len(lengths), dtype=torch.int32)
        tokens, most = slice(0, int(first[-1])), int(first.diff().max())
        self.part = BatchPart(tokens, first, most, False, blocks, zeros, rows)
        self.inherited = None
        if copies:
            own = rows.ring_rows
            to, source = torch.cat([rows.saved_at, own]), torch.cat([own, rows.sink_sources])
            self.inherited = to.long(), source.long()
        return rows

    def run(self, work: list[tuple[Sequence, int]]) -> BatchRings:
        states, before = self.states_of(work), [seq.computed for seq, _ in work]
        rows = super().run(work)
        queue = self.table.queue
        assert queue is not None
        self.late.seal(queue.chosen)
        outputs = [
            layer.run(self.part, self.inherited, states, later and self.inherited is None)
            for layer, later in ((self.late, True), (self.at_once, False))
        ]
        for i, (seq, _) in enumerate(work):
            read = seq.blocks[seq.freed : -(-int(rows.ring_read_from[i]) // PAGE)]
            if any(block in self.plain for block in read):
                continue  # completed in this step, by others
            mine = slice(*self.part.query_start_loc[i : i + 2].tolist())
            assert torch.equal(*(output[mine] for output in outputs)), (i, before[i])
            assert torch.equal(*(layer.pages[read] for layer in (self.late, self.at_once)))
            self.compared += 1
        return rows


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(24))
def test_what_is_read_is_what_appends_seal(seed: int) -> None:
    """To the bit, whatever is shared, preempted, taken back, cut in chunks or left out of a step.

    There are rings for all. Half of the schedules have error feedback, half a window of 8 bits.
    """
    choose = random.Random(seed)
    cfg = choose.choice([*LATER, LATER[-1], LATER[-1]])
    cfg = cfg.replace(window_bits=16 if seed % 4 < 2 else 8)
    drafts = choose.choice([0, 1, 3, 8])
    engine = Engine(choose.choice([40, 60]), 20, drafts, seed, cfg, seed % 2 == 0)
    for _ in range(100):
        engine.random_step()
    assert engine.sealed > 0 and engine.compared > 50


@pytest.mark.sampled
@pytest.mark.parametrize("cfg", LATER, ids=lambda cfg: f"exact_pages={cfg.exact_pages}")
@pytest.mark.parametrize(("rows", "drafts"), [(20, 0), (8, 3), (3, 8), (0, 0)])
def test_pages_are_sealed_before_they_are_read(cfg: KVQuantConfig, rows: int, drafts: int) -> None:
    sealed = 0
    for seed in range(2):
        scheduler = Scheduler(40, rows, drafts, seed, later=cfg)
        for _ in range(120):
            scheduler.random_step()
        sealed += scheduler.sealed
    assert bool(sealed) == bool(rows)


@pytest.mark.parametrize("drafts", [0, 3])
def test_pages_that_many_complete_at_once_wait_their_turn(drafts: int) -> None:
    """All seal before they have waited for two pages, and no step seals many."""
    count, cfg = 48, LATER[-1]
    scheduler = Scheduler(12 * count, count, drafts, 0, later=cfg)
    for i in range(count):
        scheduler.admit([100 + i] * 40)
    queue, most, new = scheduler.table.queue, 0, 1 + drafts
    assert queue is not None
    for step in range(200 // new):
        work = []
        for seq in scheduler.running:
            left = max(len(seq.tokens) - seq.computed, 1)
            if left == 1:
                seq.tokens += [7] * (seq.computed + new - len(seq.tokens))
            assert scheduler.reserve(seq, seq.computed + max(left, new))
            work.append((seq, max(left, new)))
        scheduler.run(work)
        most = max(most, int(queue.chosen[0, 0])) if step > 2 else 0
    assert 0 < most <= queue.budget(count) < count / 2
    assert scheduler.longest_wait * new <= PAGE


def decode(scheduler: Scheduler, new: int = 1, running: list[Sequence] | None = None) -> None:
    """A step of all sequences, or some: their prompts, then `new` tokens of each."""
    work = []
    for seq in scheduler.running if running is None else running:
        left = max(len(seq.tokens) - seq.computed, new)
        seq.tokens += [7] * (seq.computed + left - len(seq.tokens))
        assert scheduler.reserve(seq, seq.computed + left)
        work.append((seq, left))
    scheduler.run(work)


@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_page_does_not_wait_for_those_of_sequences_that_have_ended(has_kernel: bool) -> None:
    """When most of a batch end, their pages wait, and a step of those left has a small budget."""
    count = 3 * PAGE
    scheduler = Scheduler(4 * count, count, 0, 0, later=LATER[-1])
    for i in range(count):
        scheduler.admit([100 + i] * 60)
    while scheduler.running[0].computed < 2 * PAGE:  # all complete a page in this step
        decode(scheduler)
    for seq in scheduler.running[:-1]:
        scheduler.release(seq)
    scheduler.running = scheduler.running[-1:]  # its ring is the last
    queue = scheduler.table.queue
    assert queue is not None and queue.budget(1) < count / PAGE
    scheduler.has_kernel = has_kernel
    for _ in range(4 * PAGE if not has_kernel else PAGE + 2):
        decode(scheduler)
    assert not any(scheduler.plain.values())


def test_a_page_that_is_found_in_the_step_that_completes_it_is_sealed_in_the_next() -> None:
    scheduler = Scheduler(80, 12, 0, 0, later=LATER[-1])
    for i in range(8):
        scheduler.admit([100 + i] * (2 * PAGE - 1))
    decode(scheduler)
    last = scheduler.running[-1]
    last.tokens.append(7)
    scheduler.remember(last, 2 * PAGE)
    found = scheduler.admit([*last.tokens, 9])
    assert found.blocks == last.blocks
    for _ in range(PAGE):
        decode(scheduler)
    assert scheduler.longest_wait <= 1


def complete_together(scheduler: Scheduler, count: int = 8) -> list[Sequence]:
    """Sequences of which each has just completed its second page."""
    running = [scheduler.admit([100 + i] * (2 * PAGE - 2)) for i in range(count)]
    for _ in range(3):
        decode(scheduler, running=running)
    assert len(scheduler.plain) == count
    return running


def test_pages_that_wait_are_sealed_before_a_chunk_of_a_prompt() -> None:
    """Its sequence is not new, and what its step completes is sealed at once."""
    scheduler = Scheduler(80, 12, 0, 0, later=LATER[-1])
    prompt = scheduler.admit([5] * 100)
    scheduler.reserve(prompt, 100)
    scheduler.run([(prompt, 40)])
    others = complete_together(scheduler)
    for seq in others:
        seq.tokens.append(7)
        scheduler.reserve(seq, len(seq.tokens))
    scheduler.run([(prompt, 60), *((seq, 1) for seq in others)])
    assert not scheduler.plain


def test_a_page_that_waits_and_is_freed_is_not_sealed_over_its_next_owner() -> None:
    scheduler = Scheduler(80, 12, 0, 0, later=LATER[-1])
    *gone, one, two = complete_together(scheduler)
    blocks = [seq.blocks[1] for seq in gone]
    for seq in gone:
        scheduler.release(seq)
    scheduler.running = [one, two]
    scheduler.free = [block for block in scheduler.free if block not in blocks]
    scheduler.free += blocks[-2:]
    scheduler.random.random = lambda: 0.9
    for _ in range(2 * PAGE):
        decode(scheduler)
    assert {one.blocks[2], two.blocks[2]} == set(blocks[-2:])
    assert scheduler.sealed >= len(gone)


def test_as_many_drafts_as_a_ring_has_room_for() -> None:
    """They may begin a page more than the first of them sees, whose window all of them have."""
    for cfg in LATER[:2]:
        scheduler = Scheduler(40, 4, PAGE, 0, later=cfg)
        for i in range(3):
            scheduler.admit([100 + i] * (40 + i))
        for _ in range(6):
            decode(scheduler, PAGE + 1)
        assert scheduler.sealed
        alone = Scheduler(40, 4, PAGE, 0, later=cfg)
        alone.admit([5] * (2 * PAGE - 1))
        decode(alone)
        decode(alone, PAGE + 1)
        assert alone.plain  # what drafts have completed


@pytest.mark.parametrize("rows", [8, 2])
def test_drafts_that_go_on_in_the_models_table_leave_its_pages_alone(rows: int) -> None:
    """vLLM's second runner: after the model's step come passes of the draft, and no launch."""
    drafts = 3
    scheduler = Scheduler(60, rows, drafts, 0, later=LATER[-1])
    for i in range(4):
        scheduler.admit([100 + i] * (40 + 5 * i))
    for step in range(60):
        scheduler.has_kernel = step % 8 == 3
        decode(scheduler, 1 + drafts)
        for i, seq in enumerate(scheduler.running):
            rejected = (step + i) % (drafts + 1) if step else 0
            seq.computed -= rejected
            del seq.tokens[len(seq.tokens) - rejected :]
        for n in range(1, drafts):
            ends = [seq.computed + n for seq in scheduler.running]
            for seq, end in zip(scheduler.running, ends, strict=True):
                assert scheduler.reserve(seq, end)
            width = max(len(seq.blocks) for seq in scheduler.running)
            blocks = [seq.blocks + [0] * (width - len(seq.blocks)) for seq in scheduler.running]
            slots = [
                seq.blocks[(end - 1) // PAGE] * PAGE + (end - 1) % PAGE
                for seq, end in zip(scheduler.running, ends, strict=True)
            ]
            scheduler.step(
                torch.tensor(blocks).int(),
                torch.tensor(ends).int(),
                torch.arange(len(ends) + 1).int(),
                torch.tensor(slots),
                copies=False,
                drafting=True,
            )
    assert scheduler.sealed >= 3 * min(rows, 4) and scheduler.longest_wait <= PAGE


# --- an engine's layers ---
def attention(cfg: KVQuantConfig, drafts: int, is_draft: bool, window: int | None = None) -> Any:
    """One of vLLM's layers with two heads and one of keys."""
    from vllm.model_executor.layers.attention.attention import Attention

    from tightkv.integrations.vllm.step.attention import TightAttention
    from tightkv.integrations.vllm.step.batch_split import Limits

    layer: Any = object.__new__(Attention)
    torch.nn.Module.__init__(layer)
    shape = {"num_heads": GROUP, "num_kv_heads": HEADS, "head_size": DIM, "kv_cache_dtype": "auto"}
    for name, value in {**shape, "sliding_window": window}.items():
        setattr(layer, name, value)
    layer.impl = SimpleNamespace(scale=1.0)
    layout = PageLayout(cfg, HEADS, DIM, torch.float16)
    limits, cpu = Limits(2, 2, 1 + drafts), torch.device("cpu")
    layer.impl = TightAttention(layer, layout, reference, limits, cpu, is_draft=is_draft)
    layer.kv_cache = layout.new_pages(12).flatten(1)
    return layer


def builder(layers: dict[str, Any], names: list[str], **config: Any) -> Any:
    """Of an engine with these layers, for some of them."""
    from tightkv.integrations.vllm.compat import drafts_share_metadata
    from tightkv.integrations.vllm.step.backend import TightBuilder, _group_rings

    made: Any = object.__new__(TightBuilder)
    made.vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        **{"kv_transfer_config": None, "speculative_config": None, "parallel_config": None},
    )
    vars(made.vllm_config).update(config)
    made.layers = [layers[name] for name in names]
    made.impls, made.pages_per_block = [layer.impl for layer in made.layers], 1
    made.group_rings = _group_rings(made.impls, drafts_share_metadata(made.vllm_config))
    made.device, made.left_pad = torch.device("cpu"), torch.zeros(2, dtype=torch.int32)
    made.out = torch.zeros(len(BatchRings._fields), 2, dtype=torch.int32)
    return made


@pytest.mark.vllm
@pytest.mark.parametrize("shares", [False, True])
def test_layers_of_a_draft_are_sealed_by_the_table_that_they_go_by(shares: bool) -> None:
    """vLLM has them in the group of the model's layers, whatever their table."""
    layers = {name: attention(LATER[-1], 3, name == "draft") for name in ("a", "b", "draft")}
    eagle = SimpleNamespace(method="eagle")
    config = {"speculative_config": eagle, "use_v2_model_runner": shares}
    model, draft = builder(layers, list(layers), **config), builder(layers, ["draft"], **config)
    for each in (model, draft):
        each._ring_table()
    impls = {name: layer.impl for name, layer in layers.items()}
    own = {impls["a"], impls["b"]}
    assert model.group_rings.sealing.late == (own | {impls["draft"]} if shares else own)
    assert draft.group_rings.sealing.late >= {impls["draft"]}
    assert (model.group_rings is draft.group_rings) == shares


@pytest.mark.vllm
def test_pages_are_sealed_when_the_models_first_layer_begins() -> None:
    """Also if the draft's layers of the group were the first to run, as in a dry run."""
    layers = {name: attention(LATER[-1], 3, name == "draft") for name in ("draft", "a", "b")}
    eagle = {"speculative_config": SimpleNamespace(method="eagle"), "use_v2_model_runner": True}
    made = builder(layers, list(layers), **eagle)
    table = made._ring_table()
    sealing, launched = made.group_rings.sealing, []
    sealing._launches = [lambda: launched.append(table.steps.item())]
    for name in ("draft", "a", "b", "draft", "a", "b", "draft"):
        launched.append(name)
        sealing.begin(layers[name].impl)
    steps = table.steps.item()
    assert launched == ["draft", "a", steps, "b", "draft", "a", steps, "b", "draft"]


@pytest.mark.vllm
@pytest.mark.parametrize("why", ["connector", "halves", "window", "state", "one exact page", None])
def test_where_pages_do_not_wait(why: str | None) -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class State(AttentionLayerBase):
        def get_attn_backend(self) -> Any: ...

        def get_kv_cache_spec(self, vllm_config: Any) -> Any: ...

    cfg = LATER[0] if why == "one exact page" else LATER[1]
    layers = {name: attention(cfg, 3, False) for name in "ab"}
    config: dict[str, Any] = {}
    if why == "window":
        layers["w"] = attention(cfg, 3, False, window=300)
    elif why == "state":
        layers["w"] = State()
    elif why == "connector":
        config["kv_transfer_config"] = SimpleNamespace()
    elif why == "halves":
        config["parallel_config"] = SimpleNamespace(use_ubatching=True)
    made = builder(layers, ["a", "b"], **config)
    queue = made._ring_table().queue
    assert (queue is None) == (made.group_rings.sealing is None) == (why is not None)


@pytest.mark.vllm
def test_a_store_names_what_blocks_hold_in_each_table() -> None:
    """Not what they held before: for layers of another group, or until a draft has written them."""
    from tightkv.integrations.vllm.connectors.store_loads import StoreStep, watch_loads
    from tightkv.integrations.vllm.step.step_sealing import GroupRings

    layers = {name: attention(LATER[0], 0, name == "draft") for name in ("full", "window", "draft")}
    tables = {name: RingTable(LATER[0], 2, 9, 0, "cpu") for name in layers}
    for name, layer in layers.items():
        layer.impl.group_rings = GroupRings()
        layer.impl.group_rings.table = tables[name]
    groups = [SimpleNamespace(layer_names=names) for names in (["full", "draft"], ["window"])]
    worker: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers)
        ),
        model_runner=SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=groups)),
    )

    def write(name: str, block: int) -> None:
        one = torch.tensor([[block]]).int(), torch.tensor([PAGE]), torch.tensor([0, PAGE])
        out = torch.empty(len(BatchRings._fields), 1, dtype=torch.int32)
        tables[name].step(*one, block * PAGE + torch.arange(PAGE), out, copies=True)

    worker.execute_model = lambda output: [write(*each) for each in output.written]
    watch_loads(worker)
    names = [NAMED + 1, NAMED + 2]
    for (full, window), held in zip(((3, 4), (5, 3)), names, strict=True):  # 3 is free meanwhile
        told = StoreStep(begun_firsts={0: {full: held}, 1: {window: held}})
        written = ("full", full), ("window", window)
        worker.execute_model(SimpleNamespace(written=written, _tightkv_store_step=told))
        write("draft", full)  # after the model's step
    worker.execute_model(SimpleNamespace(written=()))
    assert [table.sink_content[:2].tolist() for table in tables.values()] == [names] * 3


@pytest.mark.vllm
def test_pages_are_sealed_in_the_cache_that_layers_have() -> None:
    """vLLM allocates a small cache to profile CUDA graphs, then the engine's, maybe as large."""
    layers = {"a": attention(LATER[-1], 0, False)}
    builder(layers, ["a"])._ring_table()
    layers["a"].kv_cache = layers["a"].kv_cache.clone()
    halves = [builder(layers, ["a"]) for _ in range(2)]
    assert len({half._ring_table() for half in halves}) == 1
    (launch,) = halves[0].group_rings.sealing._launches
    assert launch.args[1][0].pages.data_ptr() == layers["a"].kv_cache.data_ptr()


@pytest.mark.vllm
def test_readers_of_a_cache_get_the_new_tokens_of_their_own_half() -> None:
    """vLLM runs the halves of a batch in turn, so a layer may be through with both by then."""
    from tightkv.integrations.vllm.step.attention import TightAttention
    from tightkv.integrations.vllm.step.metadata import TightMetadata

    layer, other = (attention(LATER[0], 0, False) for _ in range(2))
    own, cpu = layer.impl, torch.device("cpu")
    reader = TightAttention(other, own.layout, reference, own.limits, cpu, own)
    seen: list[Any] = []
    own.step = SimpleNamespace(run=lambda *_: None)
    reader.step = SimpleNamespace(attend=lambda *given: seen.append(given[4]))
    halves = [TightMetadata((SimpleNamespace(is_prefill=True),), 4) for _ in range(2)]
    query, key = torch.zeros(4, GROUP, DIM), torch.zeros(4, HEADS, DIM)
    for i, half in enumerate(halves):
        own.forward(layer, query, key + i, key, layer.kv_cache, half, query)
    for half in halves:
        reader.forward(other, query, None, None, layer.kv_cache, half, query)
    assert [new[0].unique().tolist() for new in seen] == [[0.0], [1.0]]


def test_only_sinks_are_copied_between_places() -> None:
    """Rings of 8 bits have scales behind the sinks, which stay with their ring."""
    pytest.importorskip("vllm")
    cfg = KVQuantConfig(page_size=PAGE, exact_pages=2, sinks=4, window_bits=8)
    layer = attention(cfg, drafts=0, is_draft=False)
    made = builder({"a": layer}, ["a"], parallel_config=SimpleNamespace())
    copies = made._sink_copies(made.impls)
    _, _, *sinks, scales = layer.impl.exact_tensors()
    scales.uniform_()
    before = scales.clone()
    for i, each in enumerate(sinks):
        each += torch.arange(len(each))[:, None, None, None] + i
    places = {"saved_at": [len(sinks[0]) - 1], "ring_rows": [0], "sink_sources": [1]}
    rows = SimpleNamespace(**{k: torch.tensor(v, dtype=torch.int32) for k, v in places.items()})
    copies.copy(rows)
    assert torch.equal(scales, before)
    for i, each in enumerate(sinks):
        assert (each[0] == 1 + i).all() and (each[-1] == i).all()
