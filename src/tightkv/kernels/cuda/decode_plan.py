"""How decode attention is cut into tiles and splits."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from tightkv.pages.layout import PageLayout

_MAX_SPLITS = 64
_HOPPER_BYTES = 228 << 10  # of shared memory of a processor
_DRIVER_BYTES = 1024  # of shared memory that the driver takes of each block
_MOST_ROWS = 2048  # that split_plan.cu takes
# Programs for each processor:
_FEW_PROGRAMS, _SOME_PROGRAMS = 1, 2
_MANY_PROGRAMS = 3.8  # 64 sequences of 8 KV heads on an H200
_MERGE_BLOCKS, _MERGE_WARPS = 5, 8  # that a processor holds, and of a block
_WHOLE_PROGRAMS = 8  # sequences are not cut
_BLOCK_TILES, _MERGE_TILES = 6, 4  # as many take as long as a block's setup, and as a merge


@dataclass(frozen=True)
class DecodeTile:
    """How decode.cu is cut: what a warp works on, what is on its way, what fits a processor."""

    blocks_of_32: int  # tokens a warp works on at a time
    stages: int  # tiles in shared memory, the one being read among them
    blocks: int  # that a processor can hold
    columns: int  # queries: 4, 8, 12 or 16
    warps: int = 4  # of a block
    sum_levels: bool = False  # of 4 bits: one product a code and more arithmetic, or two
    shared_queries: bool = False  # their operands are read again for each tile, or in registers
    exact_tokens: int = 16  # that a warp works on at a time: 16 or 8

    @staticmethod
    def of(
        layout: PageLayout, columns: int, programs: float = 0.0, memory: int = _HOPPER_BYTES
    ) -> DecodeTile:
        """The tile that was fastest on an H200 (docs/log.md), as far as registers and memory allow.

        A processor has `memory` bytes of shared memory, and runs `programs` in all.
        """
        tile = DecodeTile._for_bits(layout, columns, programs, memory)
        if tile.fits(layout, memory) and layout.head_dim <= 128:
            return tile
        return replace(tile, exact_tokens=8)

    @staticmethod
    def _for_bits(layout: PageLayout, columns: int, programs: float, memory: int) -> DecodeTile:
        tuned = _tuned(layout, columns, programs)
        if tuned is not None and tuned.fits(layout, memory):
            return tuned
        key_bits, value_bits = layout.cfg.key_bits, layout.cfg.value_bits
        if layout.head_dim > 256:  # a block has a processor to itself
            tile = DecodeTile(1, 2, 1, columns, 4, shared_queries=True, exact_tokens=8)
            while tile.warps > 1 and not tile.fits(layout, memory):
                tile = replace(tile, warps=tile.warps // 2)
            return tile
        wide_codes = padded_dim(layout) * max(key_bits, value_bits) >= 128 * 8
        if layout.head_dim > 128:  # sm_89 has 99 KiB of shared memory for a block
            return DecodeTile(1, 2, 2, columns, 2 if 8 in (key_bits, value_bits) else 4)
        if columns > 8 or wide_codes:
            return DecodeTile(1, 2, 2, columns)
        # Two bits wait for arithmetic, not for memory: more warps.
        few_bits = key_bits + value_bits <= 4
        return DecodeTile(2, 2, 2, columns, 6 if few_bits and columns <= 4 else 4)

    def fits(self, layout: PageLayout, memory: int) -> bool:
        """Whether its blocks all fit a processor of so much shared memory."""
        return self.blocks * (self.shared_bytes(layout) + _DRIVER_BYTES) <= memory

    @property
    def least_split(self) -> int:
        """The shortest split in tiles of 64 tokens: most warps have a tile of their own."""
        return 2 * self.blocks_of_32

    def shared_bytes(self, layout: PageLayout) -> int:
        """sizeof(SharedMemory) in epilogue.cuh."""
        cfg, d, columns = layout.cfg, padded_dim(layout), self.columns
        both = (cfg.key_bits, cfg.value_bits)
        words = [bits // 2 if d == 64 and bits >= 4 else bits for bits in both]
        loads = -(-d // 128) * sum(words)  # of 16 bytes a lane
        own = layout.head_dim
        mean = {16: own // 8, 8: own // 16 + 1}.get(cfg.mean_bits if cfg.centered else 0, 1)
        span = max(1, 32 * self.blocks_of_32 // layout.page_size)  # pages in a tile
        stage = span * _round_up(self.blocks_of_32 // span * (512 * loads + 128) + 16 * mean)
        stage = max(stage, _round_up(4 * (d + 8) * self.exact_tokens))
        found = 2 * 4 * columns * (d + 6)
        warp = _round_up(max(self.stages * stage, found))
        queries = 8 * columns * (d // 2 + 4) + 2 * columns * (d + 16)  # halves, bytes
        queries += 2 * columns * d if self.shared_queries else 0
        barriers = 8 * self.warps * self.stages
        return _round_up(self.warps * warp + queries + barriers + 4 * self.warps + d // 8 + 64)


def padded_dim(layout: PageLayout) -> int:
    """The next power of two, DP of the sources, which sizes registers and shared memory."""
    return 1 << (layout.head_dim - 1).bit_length()


def _round_up(size: int) -> int:
    return -(-size // 128) * 128


def _tuned(layout: PageLayout, columns: int, programs: float) -> DecodeTile | None:
    """A faster tile, for the bits and sizes at which one was measured."""
    bits, d = (layout.cfg.key_bits, layout.cfg.value_bits), padded_dim(layout)
    if bits == (4, 4) and d == 64 and (columns == 4 or (columns == 8 and programs > _FEW_PROGRAMS)):
        return DecodeTile(2, 2, 2, columns, 8)
    if bits not in ((4, 4), (3, 3), (2, 2)) or d != 128:
        return None
    if columns == 4 and programs >= _MANY_PROGRAMS:
        return DecodeTile(2, 2, 4, columns, 3)
    if columns > 8:
        # Of two blocks of a processor one is favoured, and the other is alone at the end.
        blocks = 1 if programs <= _FEW_PROGRAMS else 2
        sums = bits == (4, 4)
        return DecodeTile(2, 2, blocks, columns, 8 // blocks, sum_levels=sums, shared_queries=True)
    return None


@dataclass(frozen=True)
class DecodePlan:
    """How one call of decode.cu is launched."""

    tile: DecodeTile
    num_q_tiles: int  # tiles of `columns` queries
    num_splits: int  # of each sequence's tokens; 0: as many as split_plan.cu finds
    shared_bytes: int
    slots: int  # blocks that run at a time
    num_blocks: int = 0  # at most, for each KV head and tile of queries, where split_plan.cu cuts
    merged_heads: int = 1  # of a query, by a block of merge.cu

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(
        layout: PageLayout,
        group: int,
        max_queries: int,
        batch: int,
        pages: int,
        gpu: torch.device,
        by_length: bool = False,
    ) -> DecodePlan:
        """The plan for `batch` sequences of at most `pages` pages, `group` query heads per KV head.

        `by_length`: sequences may be much shorter, and the device cuts them if that is worthwhile.
        """
        processors, memory = _processors(gpu)
        columns = max_queries * group
        widths = (4, 8, 12, 16) if layout.head_dim <= 128 else (4, 8)  # registers are for so many
        width = next((w for w in widths if columns <= w), widths[-1])
        num_q_tiles = -(-columns // width)
        programs = batch * layout.num_kv_heads * num_q_tiles
        tiles = pages * layout.page_size // 64
        tile = DecodeTile.of(layout, width, programs / processors, memory)
        by_length = by_length and programs < _WHOLE_PROGRAMS * processors and batch <= _MOST_ROWS
        num_splits = num_splits_heuristic(programs, processors, tile, tiles)
        if num_splits > 1 and not by_length:  # small blocks are for whole sequences
            tile = DecodeTile.of(layout, width, min(programs / processors, _SOME_PROGRAMS), memory)
            num_splits = num_splits_heuristic(programs, processors, tile, tiles)
        # As much memory as keeps further blocks off a processor: another would miss them. No more,
        # so that blocks of the append and of the merge fit beside them.
        share = memory // (tile.blocks + 1) // 16 * 16 + 16 - _DRIVER_BYTES
        shared, slots = max(tile.shared_bytes(layout), share), processors * tile.blocks
        heads, queries = group * layout.num_kv_heads, batch * max_queries
        shares = [n for n in range(1, heads + 1) if heads % n == 0]
        if not by_length:
            few = num_splits <= splits_at_once(layout)  # a warp has a head
            merged = max(n for n in shares if n <= _MERGE_WARPS) if few else 1
            return DecodePlan(tile, num_q_tiles, num_splits, shared, slots, merged_heads=merged)
        num_blocks = batch + slots // (layout.num_kv_heads * num_q_tiles)
        # Most blocks of the merge have nothing to do: few enough that all are there at once.
        most = _MERGE_BLOCKS * processors
        merged = next(n for n in shares if n == heads or queries * heads // n <= most)
        return DecodePlan(tile, num_q_tiles, 0, shared, slots, num_blocks, merged)


def splits_at_once(layout: PageLayout) -> int:
    """The number of splits that a warp of merge.cu loads at once."""
    return 5 if layout.head_dim <= 256 else 3


def num_splits_heuristic(programs: int, processors: int, tile: DecodeTile, tiles: int) -> int:
    """The number of splits of sequences of `tiles` tiles of 64 tokens: full waves of blocks.

    Many programs are not cut: a last wave that is not full costs them little, and sequences may be
    much shorter than the longest that fits the block table.
    """
    slots = processors * tile.blocks
    if programs >= _WHOLE_PROGRAMS * processors:
        return 1
    best, best_time = 1, math.inf
    for splits in range(1, max(1, min(_MAX_SPLITS, tiles // tile.least_split)) + 1):
        merging = 0 if splits == 1 else _MERGE_TILES
        time = -(-programs * splits // slots) * (tiles / splits + _BLOCK_TILES) + merging
        if time < best_time:
            best, best_time = splits, time
    return best


def processor_count(device: torch.device) -> int:
    return _processors(device)[0]


@functools.lru_cache(maxsize=16)
def _processors(device: torch.device) -> tuple[int, int]:
    """The number of processors, and the bytes of shared memory of each."""
    found = torch.cuda.get_device_properties(device)
    return int(found.multi_processor_count), int(found.shared_memory_per_multiprocessor)
