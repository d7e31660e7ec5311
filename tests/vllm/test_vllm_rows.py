"""Who owns which exact ring, against a small scheduler that shares, frees and reuses blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_scheduler import CFG, LATER, PAGE, Scheduler, Sequence
from tightkv import KVQuantConfig
from tightkv.integrations.vllm.step.ring_table import NAMED, BatchRings, RingTable, sink_rows
from tightkv.integrations.vllm.step.step_sealing import copied
from tightkv.pages.layout import RING_SLACK


@pytest.mark.sampled
@pytest.mark.parametrize("later", [None, *LATER, LATER[-1].replace(window_bits=8)])
@pytest.mark.parametrize(
    "rows,drafts,window", [(3, 3, None), (0, 0, None), (8, 0, None), (20, 2, 70)]
)
def test_the_kernel_takes_the_steps_of_the_table(
    rows: int, drafts: int, window: int | None, later: KVQuantConfig | None
) -> None:
    """Also with stand-ins, and with slots that no sequence has."""
    scheduler = Scheduler(24, rows, drafts, seed=1, has_kernel=True, window=window, later=later)
    plain = scheduler.step

    def padded(
        blocks: Tensor, lengths: Tensor, first: Tensor, slots: Tensor, copies: bool
    ) -> BatchRings:
        ends = torch.cat([first, first[-1:] + torch.tensor([1, 1])]).int()
        more = torch.tensor([-1] * 4)
        rows = plain(
            torch.cat([blocks, blocks[:1], 0 * blocks[:1]]),
            torch.cat([lengths, torch.tensor([500, 0]).int()]),
            ends, torch.cat([slots, more]), copies,
        )  # fmt: skip
        return BatchRings(*(column[: len(lengths)] for column in rows))

    scheduler.step = padded
    for _ in range(60):
        scheduler.random_step()
    assert scheduler.kernel_steps[0] > 8 and scheduler.kernel_steps[1] > (2 if later else 8)


@pytest.mark.parametrize("rows,drafts", [(3, 0), (2, 3)])
def test_the_kernel_saves_named_sinks(rows: int, drafts: int) -> None:
    """Sinks that a store has named are saved although their blocks are given away."""
    scheduler = Scheduler(24, rows, drafts, seed=4, has_store=True, has_kernel=True)
    for _ in range(80):
        scheduler.random_step()
    saved = scheduler.table.sink_content[rows + 1 :]
    assert (saved >= NAMED).any() and scheduler.kernel_steps[1] > 8


@pytest.mark.parametrize("dim", [64, 80])
def test_sinks_of_all_layers_are_copied_at_once(dim: int) -> None:
    """A place may be read and written; layers may have different heads."""
    from tightkv.integrations.vllm.step import ring_kernel

    device = "cuda" if torch.cuda.is_available() else "cpu"  # there the interpreter
    nobody, places = 6, sink_rows(6)
    plain = [torch.randn(places, 4, heads, dim).half().to(device) for heads in (2, 3, 2)]
    fused = [sinks.clone() for sinks in plain]
    numbers = {"saved_at": [6, 9, 8, 6], "ring_rows": [0, 1, 2, 6], "sink_sources": [1, 8, 2, 6]}
    rows = SimpleNamespace(
        **{name: torch.tensor(n, dtype=torch.int32, device=device) for name, n in numbers.items()}
    )
    to, source = copied(rows)
    for sinks in plain:
        sinks[to] = sinks[source]
    table = torch.tensor([[x.data_ptr(), x[0].nbytes // 4] for x in fused], device=device)
    ring_kernel.copy_sinks(table, rows, nobody, int(table[:, 1].max()), 20)
    for expected, found in zip(plain, fused, strict=True):
        for each in (expected, found):
            each[nobody] = 0
        assert torch.equal(expected, found)


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [3, 0, 8])
@pytest.mark.parametrize("drafts", [8, 0])
def test_no_step_reads_anothers_copies(rows: int, drafts: int) -> None:
    for seed in range(5):
        scheduler = Scheduler(blocks=24, rows=rows, drafts=drafts, seed=seed)
        for _ in range(120):
            scheduler.random_step()


@pytest.mark.sampled
@pytest.mark.parametrize("window", [70, 33, 128])
@pytest.mark.parametrize("drafts", [0, 8])
def test_no_step_reads_copies_of_who_writes_blocks_that_left_a_window(
    window: int, drafts: int
) -> None:
    for seed in range(3):
        scheduler = Scheduler(blocks=24, rows=8, drafts=drafts, seed=seed, window=window)
        for _ in range(80):
            scheduler.random_step()


def test_a_first_block_that_left_a_window_has_the_sinks_of_its_next_writer() -> None:
    scheduler = Scheduler(blocks=8, rows=4, drafts=0, seed=0, has_kernel=True, window=PAGE + 8)
    old = scheduler.admit([5] * 80)
    scheduler.reserve(old, 80)
    scheduler.run([(old, 80)])
    scheduler.free_left(old)
    scheduler.free = [old.blocks[0], 5]
    scheduler.random.random = lambda: 0.0  # free blocks in turn
    new = scheduler.admit([6] * (PAGE + 1))
    scheduler.reserve(new, PAGE + 1)
    scheduler.remember(new, PAGE)
    scheduler.run([(new, PAGE + 1)])
    assert new.blocks == [old.blocks[0], 5]
    old.tokens += [1]
    scheduler.run([(old, 1)])  # its table still has that block in the first place
    scheduler.free = [4]
    hit = scheduler.admit([6] * PAGE + [7] * 5)
    assert hit.blocks == new.blocks[:1]
    scheduler.reserve(hit, len(hit.tokens))
    assert scheduler.run([(hit, 5)]).context_sink_counts.tolist() == [4]


@pytest.mark.parametrize("rows", [3, 8])
def test_blocks_that_a_store_fills_bring_no_copies_of_others(rows: int) -> None:
    for seed in range(3):
        scheduler = Scheduler(blocks=24, rows=rows, drafts=0, seed=seed, has_store=True)
        for _ in range(120):
            scheduler.random_step()
        assert scheduler.loads > 5


@pytest.mark.vllm
def test_a_store_names_no_blocks_that_left_a_window() -> None:
    from tightkv.integrations.vllm.connectors.store_loads import content_name, follow_loads
    from tightkv.integrations.vllm.prefix.prefix_hits import LOCAL

    ids, name = ([3, 4], [0, 7]), content_name(b"12345678")
    connector = SimpleNamespace(update_state_after_alloc=lambda *_: None)
    new = SimpleNamespace(req_id="a", block_ids=ids)
    request: Any = SimpleNamespace(block_hashes=[b"12345678"], **{LOCAL: 0})
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=PAGE))
    scheduler: Any = SimpleNamespace(
        connector=connector,
        schedule=lambda: SimpleNamespace(scheduled_new_reqs=[new]),
        reset_prefix_cache=lambda: True,
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group, group]),
        hash_block_size=PAGE,
        requests={"a": request},
    )
    found: Any = SimpleNamespace(page_size=PAGE)
    follow_loads(scheduler, found)
    blocks = SimpleNamespace(get_block_ids=lambda: ids)
    connector.update_state_after_alloc(request, blocks, 2 * PAGE)
    told = vars(scheduler.schedule())["_tightkv_store_step"]
    assert (told.loaded_firsts, told.begun_firsts) == ({3: name}, {0: {3: name}})
    assert not told.forget
    assert scheduler.reset_prefix_cache()
    assert [vars(scheduler.schedule())["_tightkv_store_step"].forget for _ in "ab"] == [True, False]


@pytest.mark.parametrize("forget", [True, False])
def test_a_loaded_first_block_has_not_the_sinks_of_what_it_held(forget: bool) -> None:
    scheduler = Scheduler(blocks=4, rows=4, drafts=0, seed=0, has_store=True)
    scheduler.random.random = lambda: 0.0  # free blocks in turn
    stored = [3] * 60
    scheduler.store.add(tuple(stored[:PAGE]))
    one = scheduler.admit([5] * 90)  # all blocks
    scheduler.reserve(one, 90)
    scheduler.run([(one, 90)])
    first = one.blocks[0]
    scheduler.release(one)
    scheduler.running.remove(one)
    scheduler.free.sort(key=lambda block: block != first)
    two = scheduler.admit(stored)
    assert scheduler.load(two, forget) == [first]
    scheduler.reserve(two, 60)
    work = [(two, 60 - PAGE)]
    if forget:
        assert scheduler.run(work).sink_counts.tolist() == [0]
    else:
        with pytest.raises(AssertionError):
            scheduler.run(work)


def test_sinks_are_found_again_when_their_first_block_is_loaded() -> None:
    """Blocks and rings went to others meanwhile."""
    scheduler = Scheduler(blocks=8, rows=2, drafts=0, seed=0, has_store=True)
    prompts = [[number] * 200 for number in (3, 4, 5, 6)]
    for tokens in prompts * 3:
        seq = scheduler.admit(tokens, hits=False)
        loaded = scheduler.load(seq)
        scheduler.reserve(seq, 200)
        scheduler.remember(seq, 200)
        rows = scheduler.run([(seq, 200 - seq.computed)])
        assert rows.sink_counts.tolist() == [4]
        assert rows.context_sink_counts.tolist() == [4 if loaded else 0]
        scheduler.release(seq)
        scheduler.running.remove(seq)
    assert len(loaded) == 6


def test_forgotten_sinks_are_not_found_again() -> None:
    scheduler = Scheduler(blocks=8, rows=2, drafts=0, seed=0, has_store=True)
    counts = []
    for forget in (False, False, True, False):
        if forget:
            scheduler.table.forget_names()
        for tokens in ([number] * 200 for number in (3, 4, 5)):  # more than there are blocks for
            seq = scheduler.admit(tokens, hits=False)
            scheduler.load(seq)
            scheduler.reserve(seq, 200)
            scheduler.remember(seq, 200)
            rows = scheduler.run([(seq, 200 - seq.computed)])
            scheduler.release(seq)
            scheduler.running.remove(seq)
        counts += rows.context_sink_counts.tolist()
    assert counts == [0, 4, 0, 0]  # loaded from then on without any, as after a restart


def test_a_decoding_sequence_keeps_its_window_and_sinks() -> None:
    scheduler = Scheduler(blocks=40, rows=2, drafts=0, seed=0)
    seqs = [scheduler.admit(list(range(start, start + 50))) for start in (0, 100)]
    for step in range(150):
        work = []
        for seq in seqs:
            seq.tokens += [1] if step else []
            scheduler.reserve(seq, len(seq.tokens))
            work.append((seq, len(seq.tokens) - seq.computed))
        rows = scheduler.run(work)
        newest = len(seqs[0].tokens) - 1
        window = max(0, (newest // PAGE - 1) * PAGE)
        assert rows.ring_read_from.tolist() == [window, window]
        assert rows.sink_counts.tolist() == [CFG.sinks, CFG.sinks]
        assert sorted(rows.ring_rows.tolist()) == [0, 1]


@pytest.mark.parametrize("drafts", [3, RING_SLACK])
def test_rejected_drafts_cost_no_window(drafts: int) -> None:
    """Also where they had begun a block that the sequence then goes back from."""
    scheduler = Scheduler(blocks=8 + drafts, rows=1, drafts=drafts, seed=0)
    seq = scheduler.admit([5] * 50)
    scheduler.reserve(seq, 50)
    scheduler.run([(seq, 50)])
    for step in range(60):
        seq.tokens += [1, *range(drafts)]
        before = seq.computed
        scheduler.reserve(seq, len(seq.tokens))
        rows = scheduler.run([(seq, 1 + drafts)])
        assert rows.ring_read_from.tolist() == [max(0, (before // PAGE - 1) * PAGE)], before
        assert rows.sink_counts.tolist() == [CFG.sinks]
        rejected = step % (drafts + 1)
        seq.computed -= rejected
        del seq.tokens[len(seq.tokens) - rejected :]


def test_a_prefix_hit_does_not_go_back_to_the_ring_that_its_writer_has_lost() -> None:
    """The block after the prefix is the last one of who has the ring now, a few tokens longer."""
    drafts = 3
    scheduler = Scheduler(blocks=8, rows=1, drafts=drafts, seed=0, has_kernel=True)
    writer, gone = (scheduler.admit([x] * (PAGE + drafts)) for x in (7, 5))
    for seq in (writer, gone):
        scheduler.reserve(seq, len(seq.tokens))
        scheduler.remember(seq, len(seq.tokens))
        scheduler.run([(seq, len(seq.tokens))])
    prefix, last = writer.blocks[0], gone.blocks[1]
    scheduler.release(gone)
    hit = scheduler.admit([7] * (PAGE + 1))
    scheduler.free = [last]
    scheduler.reserve(hit, PAGE + 1)
    assert hit.blocks == [prefix, last]
    rows = scheduler.run([(hit, 1)])
    assert rows.ring_valid_from.tolist() == [PAGE]


def test_a_prefix_that_is_written_in_this_step_leads_to_no_ring_of_its_old_owner() -> None:
    """The blocks of a sequence that is gone, again one after the other in another one."""
    drafts = 3
    scheduler = Scheduler(blocks=8, rows=3, drafts=drafts, seed=0)
    gone = scheduler.admit([5] * (PAGE + drafts))
    scheduler.reserve(gone, len(gone.tokens))
    scheduler.run([(gone, len(gone.tokens))])
    blocks = gone.blocks
    scheduler.release(gone)
    writer = scheduler.admit([7] * PAGE)
    scheduler.free = blocks[:1]
    scheduler.reserve(writer, PAGE)
    scheduler.remember(writer, PAGE)
    hit = scheduler.admit([7] * (PAGE + 1))
    scheduler.free = blocks[1:]
    scheduler.reserve(hit, PAGE + 1)
    assert hit.blocks == blocks
    rows = scheduler.run([(writer, PAGE), (hit, 1)])
    assert rows.ring_valid_from.tolist() == [0, PAGE]


def test_drafts_that_go_on_in_the_models_table_take_no_window() -> None:
    """vLLM's second runner: the model's step, which is the draft's first pass too, then its others.

    Only the draft's own rings are written by those.
    """
    drafts = 3
    scheduler = Scheduler(blocks=16, rows=2, drafts=drafts, seed=0)
    seqs = [scheduler.admit([start] * 40) for start in (5, 6)]
    rings = model, draft = scheduler.ring, [list(ring) for ring in scheduler.ring]

    def run(work: list[tuple[Sequence, int]], *written: list[list[object]]) -> None:
        """A pass whose tokens are written to these rings, of which all reads are checked."""
        before, table = [seq.computed for seq, _ in work], scheduler.table
        states = {name: x.clone() for name, x in vars(table).items() if torch.is_tensor(x)}
        for ring in written:
            for name, value in states.items():  # a step is one, whatever rings it writes
                getattr(table, name).copy_(value)
            for (seq, _), computed in zip(work, before, strict=True):
                seq.computed = computed
            scheduler.ring = ring
            rows = scheduler.run(work)
            windows = [max(0, (computed // PAGE - 1) * PAGE) for computed in before]
            assert rows.ring_read_from.tolist() == windows

    for step in range(40):
        for seq in seqs:
            seq.tokens += [1, *range(drafts)] if step else []
            scheduler.reserve(seq, len(seq.tokens) + drafts)
        run([(seq, len(seq.tokens) - seq.computed) for seq in seqs], model, draft)
        for i, seq in enumerate(seqs):
            rejected = (step + i) % (drafts + 1) if step else 0
            seq.computed -= rejected
            del seq.tokens[len(seq.tokens) - rejected :]
        for _ in range(drafts - 1):
            for seq in seqs:
                seq.tokens.append(9)
            run([(seq, 1) for seq in seqs], draft)
        for seq in seqs:
            seq.computed -= drafts - 1
            del seq.tokens[len(seq.tokens) - drafts + 1 :]
    assert rings == (model, draft) and model != draft


def test_more_sequences_than_rows_leaves_the_running_ones_theirs() -> None:
    scheduler = Scheduler(blocks=40, rows=1, drafts=0, seed=0)
    seqs = [scheduler.admit([i] * 10) for i in range(3)]
    for step in range(5):
        for seq in seqs:
            seq.tokens += [1] if step else []
            scheduler.reserve(seq, len(seq.tokens))
        rows = scheduler.run([(seq, len(seq.tokens) - seq.computed) for seq in seqs])
        assert rows.ring_rows.tolist() == [0, 1, 1]
        assert rows.ring_read_from.tolist() == [0, *rows.lengths.tolist()[1:]]
        assert rows.sink_counts.tolist() == [4, 0, 0]


def test_a_prefix_hit_starts_without_copies() -> None:
    scheduler = Scheduler(blocks=40, rows=4, drafts=0, seed=0)
    one = scheduler.admit([3] * 100)
    scheduler.reserve(one, 100)
    scheduler.remember(one, 100)
    two = scheduler.admit([3] * 100)  # hits blocks that the first writes in this very step
    scheduler.reserve(two, 100)
    assert two.computed == 96
    rows = scheduler.run([(one, 100), (two, 4)])
    assert rows.ring_valid_from.tolist() == [0, 96]
    assert rows.context_ring_read_from.tolist() == [0, 96]
    assert rows.sink_counts.tolist() == [4, 0]


def hit(scheduler: Scheduler, tokens: list[int]) -> BatchRings:
    """A new sequence that finds its prefix in the cache."""
    seq = scheduler.admit(tokens)
    scheduler.reserve(seq, len(tokens))
    assert seq.computed
    return scheduler.run([(seq, len(tokens) - seq.computed)])


def test_a_prefix_hit_takes_over_the_sinks() -> None:
    scheduler = Scheduler(blocks=40, rows=2, drafts=0, seed=0)
    one = scheduler.admit([3] * 100)
    scheduler.reserve(one, 100)
    scheduler.remember(one, 100)
    scheduler.run([(one, 100)])
    rows = hit(scheduler, [3] * 90)
    assert rows.sink_sources.tolist() == [0] and rows.ring_rows.tolist() == [1]
    assert rows.sink_counts.tolist() == rows.context_sink_counts.tolist() == [4]
    scheduler.release(one)
    rows = hit(scheduler, [3] * 95)  # takes the first's ring, and its sinks from either
    assert rows.ring_rows.tolist() == [0] and rows.sink_counts.tolist() == [4]


def test_sinks_outlive_the_rows_of_their_sequences() -> None:
    scheduler = Scheduler(blocks=60, rows=2, drafts=0, seed=0)
    scheduler.random.random = lambda: 0.0  # free blocks in turn: cached ones stay a while
    for number in range(3, 8):  # five first blocks, two rows, eight saved
        seq = scheduler.admit([number] * 50)
        scheduler.reserve(seq, 50)
        scheduler.remember(seq, 50)
        scheduler.run([(seq, 50)])
        scheduler.release(seq)
        scheduler.running.remove(seq)
    for number in range(3, 8):
        rows = hit(scheduler, [number] * 60)
        assert rows.sink_counts.tolist() == rows.context_sink_counts.tolist() == [4], number


def test_a_prefix_hit_that_begins_with_one_token_takes_over_the_sinks_later() -> None:
    """A step without prompts copies nothing."""
    scheduler = Scheduler(blocks=40, rows=2, drafts=0, seed=0)
    one = scheduler.admit([3] * 100)
    scheduler.reserve(one, 100)
    scheduler.remember(one, 100)
    scheduler.run([(one, 100)])
    two = scheduler.admit([3] * 90)
    scheduler.reserve(two, 90)
    assert scheduler.run([(two, 1)]).sink_counts.tolist() == [0]
    rows = scheduler.run([(two, 25)])
    assert rows.sink_sources.tolist() == [0] and rows.ring_rows.tolist() == [1]
    assert rows.sink_counts.tolist() == rows.context_sink_counts.tolist() == [4]


def test_sinks_of_a_first_block_that_was_written_again_are_gone() -> None:
    scheduler = Scheduler(blocks=4, rows=4, drafts=0, seed=0)
    for number in (3, 5):
        seq = scheduler.admit([number] * 40)
        scheduler.reserve(seq, 40)
        scheduler.remember(seq, 40)
        scheduler.run([(seq, 40)])
        if number == 3:
            old = list(seq.blocks)
            scheduler.release(seq)
            scheduler.running.remove(seq)
            for block in old:  # somebody else gets them, and starts with the same block
                scheduler.known.pop(scheduler.holds.pop(block, ()), None)
            scheduler.free = [*old, *(b for b in scheduler.free if b not in old)]
            scheduler.random.random = lambda: 0.0
    assert seq.blocks == old
    rows = hit(scheduler, [5] * 36)
    assert rows.sink_sources.tolist() == [1] and rows.sink_counts.tolist() == [4]


def test_stand_ins_touch_nothing() -> None:
    """Sequences of a dummy run have slots of -1, whatever their block table says."""
    scheduler = Scheduler(blocks=40, rows=2, drafts=0, seed=0)
    seq = scheduler.admit([3] * 10)
    scheduler.reserve(seq, 12)
    scheduler.run([(seq, 10)])
    table, first = torch.tensor([seq.blocks, seq.blocks]).int(), torch.tensor([0, 1, 2]).int()
    lengths, slots = torch.tensor([11, 500]).int(), torch.tensor([-1, -1])
    rows = scheduler.table.step(table, lengths, first, slots, scheduler.out)
    assert rows.lengths.tolist() == rows.before.tolist() == [0, 0]
    assert rows.ring_rows.tolist() == [2, 2]
    seq.tokens.append(1)
    assert scheduler.run([(seq, 1)]).ring_read_from.tolist() == [0]


def test_more_speculative_tokens_than_the_ring_can_lose_are_refused() -> None:
    with pytest.raises(ValueError, match=r"33 speculative tokens; supported: up to 32"):
        RingTable(CFG, 1, 8, 33, "cpu")


def one_page_then_gone(scheduler: Scheduler) -> int:
    """A sequence that filled one block and ended; its ring is still tagged with that block."""
    seq = scheduler.admit([3] * PAGE)
    scheduler.reserve(seq, PAGE)
    scheduler.run([(seq, PAGE)])
    block = seq.blocks[0]
    scheduler.release(seq)
    scheduler.running.remove(seq)
    return block


def reserve_from(scheduler: Scheduler, seq: Sequence, length: int, block: int) -> None:
    """Reserve blocks, the first of them `block`."""
    scheduler.free.remove(block)
    scheduler.users[block] = 1
    seq.blocks.append(block)
    scheduler.reserve(seq, length)


@pytest.mark.parametrize("same_step", [True, False])
def test_a_reused_block_does_not_lead_to_the_ring_of_its_old_owner(same_step: bool) -> None:
    scheduler = Scheduler(blocks=40, rows=4, drafts=0, seed=0)
    block = one_page_then_gone(scheduler)
    writer = scheduler.admit([5] * 100)
    reserve_from(scheduler, writer, 100, block)
    scheduler.remember(writer, 100)
    reader = scheduler.admit([5] * PAGE + [6])
    scheduler.reserve(reader, PAGE + 1)
    assert reader.blocks[0] == block
    if same_step:
        rows = scheduler.run([(writer, 100), (reader, 1)])
    else:
        scheduler.run([(writer, 100)])
        rows = scheduler.run([(reader, 1)])
    assert rows.ring_valid_from[-1] == PAGE


def test_of_two_sequences_with_the_same_last_block_one_keeps_the_ring() -> None:
    scheduler = Scheduler(blocks=40, rows=4, drafts=0, seed=0)
    one = scheduler.admit([3] * PAGE)
    scheduler.reserve(one, PAGE)
    scheduler.remember(one, PAGE)
    scheduler.run([(one, PAGE)])
    two = scheduler.admit([3] * PAGE + [4])
    one.tokens.append(5)
    for seq in (one, two):
        scheduler.reserve(seq, PAGE + 1)
    assert two.blocks[0] == one.blocks[0]
    rows = scheduler.run([(one, 1), (two, 1)])
    assert rows.ring_valid_from.tolist() == [0, PAGE]
    assert rows.sink_counts.tolist() == [4, 0]


def test_a_new_sequence_takes_the_ring_that_was_not_used_longest() -> None:
    scheduler = Scheduler(blocks=40, rows=2, drafts=0, seed=0)
    one, two = (scheduler.admit([i] * 10) for i in (3, 4))
    for seq in (one, two):
        scheduler.reserve(seq, 20)
    scheduler.run([(one, 10), (two, 10)])
    one.tokens.append(1)
    assert scheduler.run([(one, 1)]).ring_rows.tolist() == [0]
    three = scheduler.admit([5] * 10)
    scheduler.reserve(three, 20)
    assert scheduler.run([(three, 10)]).ring_rows.tolist() == [1]
    one.tokens.append(1)
    rows = scheduler.run([(one, 1)])
    assert (rows.ring_rows.tolist(), rows.ring_valid_from.tolist()) == ([0], [0])


def test_a_sequence_keeps_its_ring_at_another_place_of_the_batch() -> None:
    scheduler = Scheduler(blocks=40, rows=2, drafts=0, seed=0)
    one, two = (scheduler.admit([i] * 10) for i in (3, 4))
    for seq in (one, two):
        scheduler.reserve(seq, 20)
    scheduler.run([(one, 10), (two, 10)])
    two.tokens.append(1)
    rows = scheduler.run([(two, 1)])
    assert (rows.ring_rows.tolist(), rows.ring_valid_from.tolist()) == ([1], [0])


def test_a_prefix_hit_does_not_take_the_ring_from_who_goes_on() -> None:
    scheduler = Scheduler(blocks=40, rows=4, drafts=0, seed=0)
    one = scheduler.admit([3] * (PAGE + 8))
    scheduler.reserve(one, PAGE + 9)
    scheduler.remember(one, PAGE + 8)
    scheduler.run([(one, PAGE + 8)])
    two = scheduler.admit([3] * PAGE + [4])  # its last block leads to the ring of the first
    scheduler.reserve(two, PAGE + 1)
    one.tokens.append(5)
    rows = scheduler.run([(two, 1), (one, 1)])
    assert rows.ring_valid_from.tolist() == [PAGE, 0]


class Copies(TorchDispatchMode):
    """Notes of each copy to another device whether the host goes on meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.asynchronous: list[bool] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") is not None:
            self.asynchronous.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


def test_the_host_does_not_wait_when_blocks_are_named_or_loaded() -> None:
    table = RingTable(CFG, 4, 16, 0, "meta")
    with Copies() as copies:
        table.name({3: NAMED + 5})
        table.load([3, 4], {3: NAMED + 5})
    assert copies.asynchronous == [True] * 3


@pytest.mark.gpu
def test_naming_and_loading_have_no_synchronization() -> None:
    table = RingTable(CFG, 4, 16, 0, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        table.name({3: NAMED + 5})
        table.load([3, 4], {3: NAMED + 5})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.content[3] == NAMED + 5
