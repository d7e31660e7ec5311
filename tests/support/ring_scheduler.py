"""A small scheduler that shares, frees and reuses blocks, and checks what each step would read."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tightkv import KVQuantConfig
from tightkv.integrations.vllm.step import ring_kernel
from tightkv.integrations.vllm.step.ring_table import NAMED, BatchRings, RingTable, sink_rows

PAGE = 32
CFG = KVQuantConfig(page_size=PAGE, exact_pages=2, sinks=4, window_bits=16)
LATER = [CFG.replace(exact_pages=pages) for pages in (1, 2, 3)]  # the last: pages wait


@dataclass
class Sequence:
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    drafted: int = 0  # of the newest tokens
    freed: int = 0  # of its first blocks, which have left the window


class Scheduler:
    """Blocks with reference counts and a prefix cache, as an engine keeps them."""

    def __init__(
        self,
        blocks: int,
        rows: int,
        drafts: int,
        seed: int,
        has_store: bool = False,
        has_kernel: bool = False,
        window: int | None = None,
        later: KVQuantConfig | None = None,
    ) -> None:
        """`later`: the config of a table whose layers seal pages after the step."""
        self.random = random.Random(seed)
        self.has_kernel, self.kernel_steps = has_kernel, [0, 0]  # without and with copies
        self.has_store, self.loads = has_store, 0
        self.free = list(range(1, blocks))
        self.users = [0] * blocks
        self.known: dict[tuple[int, ...], int] = {}  # tokens up to a block's end -> block
        self.holds: dict[int, tuple[int, ...]] = {}
        self.store: set[tuple[int, ...]] = set()  # what a KV connector could load
        self.running: list[Sequence] = []
        self.drafts, self.rows = drafts, rows
        self.window = window
        cfg, queue = later or CFG, later is not None
        self.table = RingTable(cfg, rows, blocks, drafts, "cpu", window=window, seals_later=queue)
        self.codes: list[list[Any]] = [[None] * PAGE for _ in range(blocks)]
        self.plain: dict[int, int] = {}  # complete pages that are to be sealed -> steps they wait
        self.said: list[list[int]] = []
        self.completed_by: dict[int, Sequence] = {}  # those of this step
        self.longest_wait = self.sealed = 0
        self.out = torch.empty(len(BatchRings._fields), 128, dtype=torch.int32)
        ring = self.table.ring
        self.ring = [[None] * ring for _ in range(rows + 1)]
        self.sink = [[None] * CFG.sinks for _ in range(sink_rows(rows))]

    # --- blocks ---
    def admit(self, tokens: list[int], hits: bool = True) -> Sequence:
        seq = Sequence(tokens)
        for count in range((len(tokens) - 1) // PAGE if hits else 0, 0, -1):
            ends = range((self.left(count * PAGE) + 1) * PAGE, count * PAGE + 1, PAGE)
            found = [self.known.get(tuple(tokens[:end])) for end in ends]
            if None not in found:
                seq.freed = self.left(count * PAGE)
                seq.blocks = [0] * seq.freed + [block for block in found if block is not None]
                break
        for block in seq.blocks[seq.freed :]:
            self.users[block] += 1
            if block in self.free:
                self.free.remove(block)
        seq.computed = len(seq.blocks) * PAGE
        self.running.append(seq)
        return seq

    def left(self, computed: int) -> int:
        """How many blocks of a sequence have left its window."""
        return 0 if self.window is None else max(0, computed - self.window + 1) // PAGE

    def free_left(self, seq: Sequence) -> None:
        """The sequence's table still names them, whoever writes them next."""
        left = self.left(seq.computed)
        self.give_back(seq.blocks[seq.freed : left])
        seq.freed = max(seq.freed, left)

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def load(self, seq: Sequence, forget: bool = True) -> list[int]:
        """Further blocks of a prefix come from a store, without a step of the model."""
        loaded = []
        while (end := (len(seq.blocks) + 1) * PAGE) < len(seq.tokens):
            if tuple(seq.tokens[:end]) not in self.store or not self.reserve(seq, end):
                break
            loaded.append(seq.blocks[-1])
        if loaded and forget:
            first = loaded[0] == seq.blocks[0]
            self.table.load(loaded, {loaded[0]: self.first_name(seq)} if first else {})
        seq.computed = len(seq.blocks) * PAGE
        self.remember(seq, seq.computed)
        return loaded

    def release(self, seq: Sequence) -> None:
        self.give_back(seq.blocks[seq.freed :])
        seq.blocks, seq.computed, seq.freed = [], 0, 0

    def reserve(self, seq: Sequence, length: int) -> bool:
        while len(seq.blocks) * PAGE < length:
            if not self.free:
                return False
            block = self.free.pop(0 if self.random.random() < 0.5 else -1)
            self.known.pop(self.holds.pop(block, ()), None)
            self.users[block] = 1
            seq.blocks.append(block)
        return True

    def remember(self, seq: Sequence, length: int) -> None:
        """Full blocks become findable as soon as they are scheduled, before they are written."""
        for i in range(seq.freed, length // PAGE):
            key = tuple(seq.tokens[: (i + 1) * PAGE])
            self.store.add(key)
            if key not in self.known:
                self.known[key] = seq.blocks[i]
                self.holds[seq.blocks[i]] = key

    # --- one step ---
    def run(self, work: list[tuple[Sequence, int]]) -> BatchRings:
        """Compute `count` tokens of each sequence; check every exact copy that would be read."""
        first = torch.tensor([0, *(count for _, count in work)]).cumsum(0).int()
        width = max(len(seq.blocks) for seq, _ in work)
        # behind a sequence's blocks vLLM has those of who was in its place before
        stale = self.random.choices(range(len(self.users)), k=width + 2)
        blocks = [seq.blocks + stale[len(seq.blocks) :] for seq, _ in work]
        lengths = torch.tensor([seq.computed + count for seq, count in work]).int()
        slots = [
            seq.blocks[at // PAGE] * PAGE + at % PAGE
            for seq, count in work
            for at in range(seq.computed, seq.computed + count)
        ]
        copies = any(count > 1 + self.drafts for _, count in work)  # as with prompts
        rows = self.step(torch.tensor(blocks).int(), lengths, first, torch.tensor(slots), copies)
        values = [
            dict(zip(rows._fields, row, strict=True))
            for row in zip(*map(torch.Tensor.tolist, rows), strict=True)
        ]
        owned = [v["ring_rows"] for v in values if v["ring_rows"] < self.rows]
        assert len(set(owned)) == len(owned), "two sequences own one ring"
        for (seq, count), v in zip(work, values, strict=True):
            assert (v["before"], v["lengths"]) == (seq.computed, seq.computed + count)
            self.check_ring(seq, v["ring_rows"], v["ring_valid_from"], seq.computed, seq.computed)
        sinks = [list(self.sink[v["sink_sources"]]) for v in values]
        saved = [list(self.sink[v["ring_rows"]]) for v in values]
        for v, copied, old in zip(values, sinks, saved, strict=True):
            if not copies:
                assert (v["sink_sources"], v["saved_at"]) == (v["ring_rows"], self.rows)
                continue
            assert v["saved_at"] >= self.rows
            self.sink[v["saved_at"]] = old
            self.sink[v["ring_rows"]] = copied
        for (seq, _), v in zip(work, values, strict=True):
            for at in range(v["context_sink_counts"]):
                assert self.sink[v["ring_rows"]][at] == self.name(seq, at)
        self.seal()
        self.check_pages(work, values, "context_ring_read_from")
        for (seq, count), v in zip(work, values, strict=True):
            sealable_from = seq.computed + count if copies else v["ring_valid_from"]
            self.write_pages(seq, count, v["ring_rows"], sealable_from)
            for at in range(seq.computed, seq.computed + count):
                self.ring[v["ring_rows"]][at % self.table.ring] = self.name(seq, at)
                if at < CFG.sinks:
                    self.sink[v["ring_rows"]][at] = self.name(seq, at)
        for (seq, count), v in zip(work, values, strict=True):
            end = seq.computed + count
            self.check_ring(seq, v["ring_rows"], v["ring_read_from"], end, end)
            self.check_ring(seq, v["ring_rows"], v["context_ring_read_from"], seq.computed, end)
            for at in range(v["sink_counts"]):
                assert self.sink[v["ring_rows"]][at] == self.name(seq, at)
            assert v["context_sink_counts"] <= min(v["sink_counts"], seq.computed)
            if self.has_store and len(seq.tokens) >= PAGE:
                self.table.name({seq.blocks[0]: self.first_name(seq)})
        self.check_pages(work, values, "ring_read_from")
        for seq, count in work:
            seq.computed += count
        return rows

    # --- pages that are sealed after the step ---
    def seal(self) -> None:
        """What the queue chose is complete, and the ring has what the page has codes of."""
        queue = self.table.queue
        if queue is None:
            return
        chosen = queue.chosen[1 : 1 + int(queue.chosen[0, 0])].tolist()
        assert len({page for _, _, page, _ in chosen}) == len(chosen)
        for row, at, page, exact_from in chosen:
            for i in range(max(at, exact_from), at + PAGE):
                assert self.ring[row][i % self.table.ring] == self.codes[page][i - at]
            self.plain.pop(page, None)
            self.sealed += 1
        self.plain = {page: steps + 1 for page, steps in self.plain.items()}
        self.longest_wait = max([self.longest_wait, *self.plain.values()])

    def write_pages(self, seq: Sequence, count: int, row: int, sealable_from: int) -> None:
        """Sealing changes nothing of tokens before `sealable_from`, of which the ring has none."""
        for at in range(seq.computed, seq.computed + count):
            page = seq.blocks[at // PAGE]
            self.codes[page][at % PAGE] = self.name(seq, at)
            self.plain.pop(page, None)
            if at % PAGE == PAGE - 1 and row < self.rows and at - PAGE + 1 >= sealable_from:
                self.plain[page], self.completed_by[page] = 0, seq

    def check_pages(
        self, work: list[tuple[Sequence, int]], values: list[dict[str, int]], start: str
    ) -> None:
        """No page is read before it is sealed, but for those that others complete in this step."""
        if self.table.queue is None:
            return
        for (seq, _), v in zip(work, values, strict=True):
            for block in seq.blocks[seq.freed : -(-v[start] // PAGE)]:
                assert not self.plain.get(block)
                assert block not in self.plain or self.completed_by[block] is not seq

    def step(
        self,
        blocks: Tensor,
        lengths: Tensor,
        first: Tensor,
        slots: Tensor,
        copies: bool,
        drafting: bool = False,
    ) -> BatchRings:
        """The table's step, and the kernel's on a copy, which must agree."""
        given = (blocks, lengths, first, slots)
        twin = copy.deepcopy(self.table) if self.has_kernel else None
        rows = self.table.step(*given, self.out, copies, drafting)
        rows = BatchRings(*(column.clone() for column in rows))
        if twin is not None:
            self.kernel_steps[copies] += 1
            assert_kernel_agrees(self.table, rows, twin, given, copies, drafting)
        return rows

    @staticmethod
    def first_name(seq: Sequence) -> int:
        return NAMED + hash(tuple(seq.tokens[:PAGE])) % NAMED

    @staticmethod
    def name(seq: Sequence, at: int) -> tuple[int, ...]:
        return tuple(seq.tokens[: at + 1])

    def check_ring(self, seq: Sequence, row: int, start: int, end: int, newest: int) -> None:
        """The ring holds positions [start, end) of this sequence when its newest is `newest`."""
        assert 0 <= start <= end
        for at in range(max(start, newest - self.table.ring), end):
            assert self.ring[row][at % self.table.ring] == self.name(seq, at), (row, at)

    def admit_alike(self) -> None:
        """Sequences that complete pages together, and some that go on from what others said."""
        choose, said = self.random, [seq.tokens[: seq.computed] for seq in self.running]
        if len(self.running) < 3 and choose.random() < 0.3:
            length = choose.randint(PAGE - 9, 3 * PAGE)
            for first in choose.sample(range(4, 40), 5):
                self.admit([first] * length)
        elif said and len(self.running) < 9 and choose.random() < 0.1:
            text = choose.choice([*said, *self.said[-4:]])
            end = len(text) // PAGE * PAGE if choose.random() < 0.8 else len(text)
            self.admit([*text[:end], choose.randint(0, 3)])
        self.said += said[:1]

    def random_step(self) -> None:
        choose = self.random
        prompts = [[7] * 200, [7] * 64 + [9] * 70, [5] * 33]
        prompts += [[6] * 120, [8] * 150] if self.window else []
        if self.table.queue is not None:
            self.admit_alike()
        elif len(self.running) < 6 and choose.random() < 0.4:
            base = choose.choice(prompts)[: choose.randint(1, 200)]
            hits = not self.has_store or choose.random() < 0.5
            seq = self.admit([*base, choose.randint(0, 3)], hits)
            if self.has_store:
                self.loads += len(self.load(seq))
        work: list[tuple[Sequence, int]] = []
        for seq in list(self.running):
            if choose.random() < (0.15 if self.table.queue is None else 0.02):
                continue  # not scheduled in this step
            self.free_left(seq)
            left = len(seq.tokens) - seq.computed
            count = choose.randint(1, left) if choose.random() < 0.5 else left
            drafts = choose.randint(0, self.drafts) if count == left else 0
            seq.tokens += [choose.randint(0, 3) for _ in range(drafts)]
            if not self.reserve(seq, seq.computed + count + drafts):
                del seq.tokens[len(seq.tokens) - drafts :]
                self.release(seq)  # preempted: all of it is computed again later
                continue
            seq.drafted = drafts
            work.append((seq, count + drafts))
            self.remember(seq, seq.computed + count)
        if not work:
            return
        self.run(work)
        for seq, _ in work:
            if seq.computed == len(seq.tokens):
                rejected = choose.randint(0, seq.drafted)
                seq.computed -= rejected
                del seq.tokens[len(seq.tokens) - rejected :]
                seq.tokens.append(choose.randint(0, 3))
            if len(seq.tokens) > 300 or choose.random() < 0.03:
                self.release(seq)
                self.running.remove(seq)


def assert_kernel_agrees(
    table: RingTable,
    rows: BatchRings,
    twin: RingTable,
    given: tuple[Tensor, ...],
    copies: bool,
    drafting: bool,
) -> None:
    """`twin` is `table` before its step with `given`. Block 0 and the last row are nobody's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there the interpreter
    tensors = [name for name, x in vars(twin).items() if isinstance(x, Tensor)]
    queues = (table.queue, twin.queue)
    waiting = [name for name, x in vars(twin.queue or object).items() if isinstance(x, Tensor)]
    for owner, names in ((twin, tensors), (twin.queue, waiting)):
        for name in names:
            setattr(owner, name, getattr(owner, name).to(device))
    out = torch.empty(len(BatchRings._fields), 16, dtype=torch.int32, device=device)
    there: Any = [x.to(device) for x in given]
    ring_kernel.step(twin, *there, out=out, copies=copies, drafting=drafting)
    for name, expected, found in zip(rows._fields, rows, out, strict=True):
        assert torch.equal(expected, found.cpu()[: len(expected)]), name
    for name in tensors:
        expected, found = getattr(table, name), getattr(twin, name).cpu()
        if expected.dim():
            nobody = 0 if len(expected) == table.pages else table.rows
            expected, found = (torch.cat([x[:nobody], x[nobody + 1 :]]) for x in (expected, found))
        if name == "sink_row":  # of sequences with the same first block, one is named
            other = (expected != found).nonzero().squeeze(1)
            assert torch.equal(table.first_block[found[other]], other + 1)
            assert torch.equal(table.first_block[expected[other]], other + 1)
            continue
        assert torch.equal(expected, found), name
    assert twin.claims is not None and (twin.claims == ring_kernel.NOBODY).all()
    for name in waiting:
        expected, found = (getattr(queue, name).cpu() for queue in queues)
        if name == "chosen":
            expected, found = (x[: 1 + int(x[0, 0])] for x in (expected, found))
        elif expected.dim():
            expected, found = (x[: table.rows] for x in (expected, found))
        assert torch.equal(expected, found), name
