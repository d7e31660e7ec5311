"""split_plan.cu: which blocks of decode attention read which part of which sequence."""

import heapq

import pytest
import torch

import cuda_on_host
from kernel_caches import DEVICE
from tightkv.kernels.cuda import backend
from tightkv.kernels.cuda.params import PlanParams
from tightkv.kernels.cuda.source import SPLIT_PLAN, included

ON_GPU = DEVICE.type == "cuda"
pytestmark = pytest.mark.skipif(
    not ON_GPU and cuda_on_host.COMPILER is None, reason="neither a GPU nor g++"
)
SETUP, MERGE = 6, 4  # tiles that take as long


def plan(lengths, pads, rings, heads, slots, num_blocks, window=0):
    """Rows of (row, split, splits, first), and (first, splits) of each sequence."""
    batch = len(lengths)
    columns = [
        torch.tensor(x, dtype=torch.int32, device=DEVICE)
        for x in (lengths, pads, rings, [7] * (4 * num_blocks), [7] * (2 * batch))
    ]
    addresses = [x.data_ptr() for x in columns]
    params = PlanParams(*addresses, batch, num_blocks, heads, slots, window, 4)
    text = included(SPLIT_PLAN)
    module = backend._loaded(text, DEVICE) if ON_GPU else cuda_on_host.of_source(text)
    module.launch("split_plan", (1, 1, 1), 1024, params)
    return columns[3].view(-1, 4).tolist(), columns[4].view(-1, 2).tolist()


def tiles_of(length, pad, ring, window):
    low = max(pad, length - window) if window else pad
    return -(-max(ring - low, 0) // 64) + -(-max(length - max(ring, low), 0) // 16)


def time_of(tiles, splits, heads, slots):
    """Of blocks that start longest first, as soon as there is room."""
    shares = [-(-t // n) for t, n in zip(tiles, splits, strict=True) for _ in range(n)]
    ends = [0.0] * slots
    for share in sorted(shares * heads, reverse=True):
        heapq.heapreplace(ends, ends[0] + share + SETUP)
    return max(ends) + (MERGE if sum(splits) > len(splits) else 0)


def drawn(kind, batch):
    generator = torch.Generator().manual_seed(batch)
    uniform = torch.rand(batch, generator=generator)
    lengths = {
        "alike": torch.full((batch,), 8155),
        "short": torch.full((batch,), 20),
        "uniform": 1 + 32_000 * uniform,
        "mostly short": 64 * 2 ** (9 * uniform),
        "one long": torch.where(torch.arange(batch) == batch // 2, 500_000, 400 + 900 * uniform),
        "some empty": torch.where(uniform < 0.3, 0, 20_000 * uniform),
    }[kind]
    return lengths.int().tolist()


@pytest.mark.sampled
@pytest.mark.parametrize("window", [0, 4096])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "kind", ["alike", "short", "uniform", "mostly short", "one long", "some empty"]
)
def test_every_sequence_is_cut_by_its_length(kind, padded, window):
    for batch, heads, slots in [
        (1, 8, 264),
        (2, 1, 264),
        (32, 8, 264),
        (33, 4, 528),
        (300, 2, 264),
    ]:
        lengths = drawn(kind, batch)
        pads = [length // 3 if padded else 0 for length in lengths]
        rings = [
            max(pad, length // 64 * 64 - 128) for length, pad in zip(lengths, pads, strict=True)
        ]
        num_blocks = batch + slots // heads
        blocks, rows = plan(lengths, pads, rings, heads, slots, num_blocks, window)
        splits = [n for _, n in rows]
        used = sum(splits)
        assert used <= num_blocks and [block[0] for block in blocks[used:]] == [-1] * (
            num_blocks - used
        )
        assert sorted(block[:2] for block in blocks[:used]) == [
            [row, split] for row in range(batch) for split in range(splits[row])
        ]
        for at, (row, split, count, first) in enumerate(blocks[:used]):
            assert [first, count] == rows[row] and at == first + split
        tiles = [tiles_of(*x, window) for x in zip(lengths, pads, rings, strict=True)]
        shares = [-(-tiles[row] // splits[row]) for row, *_ in blocks[:used]]
        assert shares == sorted(shares, reverse=True)
        # About as fast as all sequences cut into equally many, or faster: times are estimates.
        longest = max(tiles)
        alike = [
            n for n in range(1, 65) if n == 1 or (n <= longest // 4 and n * batch <= num_blocks)
        ]
        best = min(time_of(tiles, [n] * batch, heads, slots) for n in alike)
        assert time_of(tiles, splits, heads, slots) <= 1.2 * best, (batch, heads, splits)


def test_uneven_lengths_take_half_the_time():
    lengths = [1024 * (i + 1) for i in range(32)]
    rings = [n - 128 for n in lengths]
    _, rows = plan(lengths, [0] * 32, rings, 8, 264, 65)
    tiles = [tiles_of(n, 0, ring, 0) for n, ring in zip(lengths, rings, strict=True)]
    whole, cut = (time_of(tiles, n, 8, 264) for n in ([1] * 32, [n for _, n in rows]))
    assert cut < 0.6 * whole
