"""Prompts after cached prefixes: the shared workspace against what serves them without it.

python benchmarks/shared_workspace.py [--out ROWS.jsonl]                   on a Hopper GPU with vLLM
DRY=1 TRITON_INTERPRET=1 PYTHONPATH=src:tests/support python benchmarks/shared_workspace.py
    small shapes on the CPU: checks, and times that say nothing

One layer, k4v4, bfloat16, 32 query heads, 8 KV heads of 128. Prefixes were found in the prefix
cache, so that no token of them is in a ring. Without the workspace ("now"), up to 16 new tokens of
a sequence go to the CUDA decode kernel, up to 255 to the Triton kernel that reads pages, and more
to FlashAttention 3, one sequence after another. Times are the longer of the device's, after a flush
of its L2 cache, and the host's.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.extras import installed_version
from tightkv.integrations.vllm.step.batch_split import ALONE_FROM, SHORT_PROMPT
from tightkv.kernels import prefill, ragged_plan, reference, sdpa
from tightkv.kernels.triton import ragged as ragged_ops
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench import inputs
from tightkv.tools.rows import append_rows, provenance

DRY = bool(os.environ.get("DRY"))
SECONDS = 70  # no case begins later
BEGUN = time.perf_counter()
if DRY:
    from ragged_caches import plain_varlen as attention
    from tightkv.kernels.triton import backend as kernels

    DEVICE, HQ, HKV, D, DTYPE = torch.device("cpu"), 4, 2, 64, torch.float16
    POOL, UNIT = (2, 256), 1
    CASES = [(2, 128, 20), (2, 64, 8), (1, 256, 17), (2, 0, 20)]
else:
    from tightkv.integrations.vllm.step.flash_attention import flash_attention_3
    from tightkv.integrations.vllm.step.flash_attention import varlen_flash_attention_3 as attention
    from tightkv.kernels.cuda import backend as kernels  # type: ignore[no-redef]

    sdpa._PREFERRED[:] = [flash_attention_3]
    DEVICE, HQ, HKV, D, DTYPE = torch.device("cuda", 0), 32, 8, 128, torch.bfloat16
    POOL, UNIT = (32, 32768), 1024
    # Sequences, thousands of tokens before the new ones, new ones. The most telling first.
    CASES = [
        (32, 8, 160), (32, 8, 64), (32, 8, 32), (32, 8, 16), (32, 8, 8), (32, 8, 1), (32, 8, 512),
        (8, 8, 160), (8, 8, 64), (8, 8, 32), (8, 8, 512), (4, 8, 160), (4, 8, 64), (4, 8, 512),
        (1, 8, 160), (1, 8, 64), (1, 8, 24), (128, 1, 160), (128, 1, 64), (128, 1, 8),
        (32, 1, 160), (32, 1, 64), (32, 1, 32), (32, 1, 8), (32, 1, 512), (8, 1, 160), (8, 1, 64),
        (4, 1, 160), (4, 1, 64), (1, 1, 160), (8, 32, 160), (8, 32, 64), (8, 32, 32), (8, 32, 8),
        (1, 32, 160), (1, 32, 64), (1, 32, 24), (1, 32, 512), (4, 32, 160), (32, 32, 64),
        (128, 8, 64), (32, 0, 160), (8, 0, 512), (4, 8, 1024), (4, 8, 2048),
        (1, 8, 512), (1, 8, 2048), (1, 32, 2048), (2, 8, 4096),
    ]  # fmt: skip
LAYOUT = PageLayout(KVQuantConfig.preset("k4v4"), HKV, D, DTYPE)
ROOM = 1500 if DRY else ragged_plan.workspace_tokens(LAYOUT)
HALF = torch.finfo(DTYPE).eps / 2
ROWS = ("block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class Case:
    """New tokens of sequences after cached ones."""

    codec: Codec
    view: CacheView
    counts: list[int]
    lengths: list[int]

    def __post_init__(self) -> None:
        total = sum(self.counts)
        # As a model has them: parts of one tensor. Large queries weigh tokens unevenly.
        qkv = torch.randn(total, HQ + 2 * HKV, D, device=DEVICE)
        qkv[:, :HQ] *= 3
        self.query, self.key, self.value = qkv.to(DTYPE).split((HQ, HKV, HKV), 1)
        self.out = torch.empty(total, HQ, D, dtype=DTYPE, device=DEVICE)
        self.first = [0, *accumulate(self.counts)]
        self.starts = torch.tensor(self.first, dtype=torch.int32, device=DEVICE)
        numbers = self.counts, self.lengths, ROOM, self.starts, self.view.lengths
        self.groups = ragged_plan.plan_groups(*numbers)
        self.shared = replace(self.view, ragged=self.groups)

    @property
    def is_short(self) -> bool:
        """Decoded, in an engine."""
        return max(self.counts) <= SHORT_PROMPT

    def by_workspace(self) -> tuple[Tensor, Tensor]:
        return self._attend(self.shared, new=True)

    def by_pages(self) -> tuple[Tensor, Tensor]:
        return self._attend(self.view, new=True)

    def _attend(self, view: CacheView, new: bool) -> tuple[Tensor, Tensor]:
        given = {"new_key": self.key, "new_value": self.value} if new else {}
        options = AttendOptions(max(self.counts), out=self.out, **given)
        return kernels.attend(self.codec, self.query, view, self.starts, options)

    def now(self) -> Callable[[], object]:
        """What these prompts take without a workspace."""
        if self.is_short:  # their tokens are in the cache already
            return lambda: self._attend(self.view, new=False)
        if max(self.counts) < prefill.MIN_QUERIES:
            return self.by_pages
        parts = [self._alone(i) for i in range(len(self.counts))]

        def one_by_one() -> None:
            for part in parts:
                kernels.attend(self.codec, *part)

        return one_by_one

    def _alone(self, row: int) -> tuple[Tensor, CacheView, Tensor, AttendOptions]:
        mine, count = slice(self.first[row], self.first[row + 1]), self.counts[row]
        rows = {name: getattr(self.view, name)[row : row + 1] for name in ROWS}
        view = replace(self.view, same_length=self.lengths[row], **rows)
        starts = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        new = {"new_key": self.key[mine], "new_value": self.value[mine]}
        return self.query[mine], view, starts, AttendOptions(count, out=self.out[mine], **new)

    def by_reference(self, row: int) -> Tensor:
        """Of one sequence, in float32."""
        query, view, starts, options = self._alone(row)
        new = {"new_key": options.new_key.float(), "new_value": options.new_value.float()}
        options = options._replace(out=None, **new)
        return reference.attend(self.codec, query.float(), view, starts, options)[0].float()


def filled(lengths: list[int], counts: list[int]) -> Case:
    """Sequences of any length with rings."""
    shape = SimpleNamespace(
        batch=len(lengths), tokens=max(lengths), lengths=lengths, ragged=True
    )  # as inputs.Shape, whose lengths are not free
    layer = inputs.fill(LAYOUT, shape, kernels, DEVICE, 0)
    return Case(layer.codec, layer.view, counts, lengths)


def cut(pool: inputs.Layer, batch: int, before: int, count: int) -> Case:
    """Sequences of pages of a full pool; they have sinks and no rings."""
    cfg, view = LAYOUT.cfg, pool.view
    each = before // cfg.page_size
    table = view.block_table[:, : POOL[1] // cfg.page_size].reshape(-1)[: batch * max(each, 1)]
    number = torch.full((batch,), before, dtype=torch.int32, device=DEVICE)
    row = torch.arange(batch, dtype=torch.int32, device=DEVICE)
    taken = replace(
        view, block_table=table.view(batch, -1).contiguous(), lengths=number,
        left_pad=torch.zeros_like(number), ring_read_from=number,
        sink_counts=number.clamp(max=cfg.sinks), ring_rows=row % POOL[0], same_length=None,
    )  # fmt: skip
    return Case(pool.codec, taken, [count] * batch, [before] * batch)


def check(name: str, case: Case, rows: tuple[int, ...] = (0, -1)) -> bool:
    """The workspace against the kernel that reads pages, and both against the reference."""
    calls: list[int] = []
    sdpa._VARLEN[:] = [lambda *given: (calls.append(1), attention(*given))[1]]
    case.out.fill_(math.nan)
    new, new_lse = (x.clone() for x in case.by_workspace())
    sdpa._VARLEN[:] = [attention]
    ok = len(calls) == len(case.groups) and bool(torch.isfinite(new).all())
    old, old_lse = new, new_lse
    if not case.is_short:  # else that kernel is not asked, and need not be compiled
        old, old_lse = (x.clone() for x in case.by_pages())
    error = float((new.float() - old.float()).abs().max() / old.float().abs().max())
    lse_error = float((new_lse - old_lse).abs().max())
    # Scores of large queries reach 15; their terms are rounded to 8 bits once rotated.
    ok &= error <= 12 * HALF and lse_error <= 40 * HALF
    off = [0.0, 0.0]
    for row in rows:
        row %= len(case.counts)
        mine = slice(case.first[row], case.first[row + 1])
        exact = case.by_reference(row)
        rms = exact.square().mean().sqrt()
        for i, x in enumerate((new, old)):
            off[i] = max(off[i], float((x[mine].float() - exact).square().mean().sqrt() / rms))
    ok &= off[0] <= 3 * HALF
    if not ok or name:
        what = f"error {error:.1e} LSE {lse_error:.1e}, to the reference {off[0]:.1e}"
        say(f"{'OK' if ok else 'FAIL'} {name}: {what} (pages {off[1]:.1e})")
    return ok


def milliseconds(run: Callable[[], object]) -> float:
    """Median of the device, or of the host where that is longer."""
    if DRY:
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e3
    flush = torch.empty(inputs.L2_BYTES, dtype=torch.uint8, device=DEVICE)
    device: list[float] = []
    host: list[float] = []
    run()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    while len(device) < 3 or (len(device) < 11 and time.perf_counter() - begun < 0.06):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        t = time.perf_counter()
        run()
        host.append((time.perf_counter() - t) * 1e3)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end))
    return max(statistics.median(device), statistics.median(host))


def pieces(case: Case) -> list[float]:
    """ms of filling the workspaces, of attention, and of both rotations."""
    if case.groups[0].is_fresh:
        return [0.0, 0.0, 0.0]
    room = max(group.tokens for group in case.groups)
    key, value = (torch.zeros(room, HKV, D, dtype=DTYPE, device=DEVICE) for _ in "kv")
    codec, rotated = case.codec, ragged_ops.rotate_queries(case.codec, case.query)
    mixed = torch.empty_like(rotated)

    def fill() -> None:
        for group in case.groups:
            new = case.key[group.queries], case.value[group.queries]
            held = key[: group.tokens], value[: group.tokens]
            ragged_ops.load_workspace(codec, case.shared, group, *new, *held)

    def attend() -> None:
        for group in case.groups:
            mine, held = group.queries, (key[: group.tokens], value[: group.tokens])
            attention(rotated[mine], *held, group, D**-0.5, mixed[mine])

    def rotate() -> None:
        ragged_ops.unrotate(codec, ragged_ops.rotate_queries(codec, case.query), case.out)

    return [round(milliseconds(f), 4) for f in (fill, attend, rotate)]


def peak_mib(run: Callable[[], object]) -> int:
    if DRY:
        return 0
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - held) >> 20


@dataclass(frozen=True)
class Row:
    """ms of one shape, without the workspace and with it."""

    batch: int
    before: int
    count: int
    now: float
    shared: float
    pieces: list[float]
    calls: int
    mib: tuple[int, int]

    def as_result(self) -> dict[str, Any]:
        return {
            "bench": "shared_workspace",
            "shape": {
                "batch": self.batch, "before": self.before, "new": self.count,
                "query_heads": HQ, "kv_heads": HKV, "head_dim": D,
            },
            "preset": "k4v4",
            "ms": {"now": round(self.now, 4), "shared": round(self.shared, 4)},
            "pieces_ms": dict(zip(("fill", "attend", "rotate"), self.pieces, strict=True)),
            "calls": self.calls,
            "peak_mib": {"now": self.mib[0], "shared": self.mib[1]},
        }  # fmt: skip

    @property
    def is_prompt(self) -> bool:
        """The rule decides: it is no decode, and has a prefix."""
        return self.count > SHORT_PROMPT and self.before > 0

    def is_chosen(self, min_queries: int, min_pairs: int) -> bool:
        length = self.before + self.count
        tokens = self.batch * length
        return self.count * tokens >= max(min_pairs, min_queries * tokens)

    def regret(self, min_queries: int, min_pairs: int) -> float:
        """How many times the better one's time is taken, as a logarithm."""
        taken = self.shared if self.is_chosen(min_queries, min_pairs) else self.now
        return math.log(taken / min(self.now, self.shared))


def advise(rows: list[Row]) -> None:
    """Constants that would have cost least, among powers of two and some between."""
    short = [row for row in rows if row.is_prompt and row.count < ALONE_FROM]
    if short:
        queries = (1, 24, 32, 48, 64, 96, 128, 256)
        pairs = [1 << i for i in range(14, 25)]
        # of equal ones those that use the workspace least
        cost = {
            (q, p): round(sum(row.regret(q, p) for row in short), 3) for q in queries for p in pairs
        }
        best = min(cost, key=lambda x: (cost[x], -x[0], -x[1]))
        mine = ragged_plan.MIN_READS, ragged_plan.MIN_PAIRS
        lost = [math.expm1(sum(row.regret(*x) for row in short) / len(short)) for x in (mine, best)]
        say(
            f"MIN_READS {mine[0]}, MIN_PAIRS 2^{math.log2(mine[1]):g}: {lost[0]:.1%} above the "
            f"best; {best[0]}, 2^{math.log2(best[1]):g}: {lost[1]:.1%}"
        )
    long = [row for row in rows if row.before and row.count >= prefill.MIN_QUERIES]
    wins = [f"{row.count} ({row.now / row.shared:.2f})" for row in long if row.shared < row.now]
    say(f"ALONE_FROM {ALONE_FROM}: the workspace is faster for {', '.join(wins) or 'none'}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file that rows of right results are appended to")
    args = parser.parse_args()
    if DRY and args.out is not None:
        parser.error("--out with DRY: times of the CPU say nothing")
    torch.manual_seed(0)
    sdpa._VARLEN[:] = [attention]
    choose = random.Random(0)
    good = check("tiny prefixes", filled([0, 1, 3, 65, 130], [64, 70, 1, 33, 90]), (0, 1, 2, 3, 4))
    most = 200 if DRY else 9000
    lengths = [most + choose.randint(-150, 150) for _ in range(3 if DRY else 16)]
    counts = [choose.randint(17, 40 if DRY else 230) for _ in lengths]
    good &= check(f"{len(lengths)} prefixes and rings", filled(lengths, counts))
    pool = inputs.fill(LAYOUT, inputs.Shape(*POOL, HQ, HKV, D), kernels, DEVICE, 1)
    for x in (pool.view.sink_key, pool.view.sink_value):
        x.normal_()  # as tokens are
    say(
        "seqs x before + new | now ms | shared | x | fill, attend, rotate | calls | MiB now, shared"
    )
    rows: list[Row] = []
    for i, (batch, before, count) in enumerate(CASES):
        if time.perf_counter() - BEGUN > SECONDS:
            say(f"{len(CASES) - i} cases left out: time is up")
            break
        case = cut(pool, batch, before * UNIT, count)
        right = check("", case, (0,))
        good &= right
        now = case.now()
        times = milliseconds(now), milliseconds(case.by_workspace)
        mib = peak_mib(now), peak_mib(case.by_workspace)
        row = Row(batch, before * UNIT, count, *times, pieces(case), len(case.groups), mib)
        rows.append(row)
        mine = row.is_chosen(ragged_plan.MIN_READS, ragged_plan.MIN_PAIRS)
        wrong = row.is_prompt and mine != (row.shared < row.now)
        sides = " ".join(f"{x:.2f}" for x in row.pieces)
        shape = f"{batch} x {before}{UNIT // 1024 * 'k'} + {count}"
        say(
            f"{shape} | {row.now:.3g} | {row.shared:.3g} | "
            f"{row.now / row.shared:.2f}{'!' if wrong else ''} | {sides} | {row.calls} | "
            f"{mib[0]} {mib[1]}{'' if right else ' FAIL'}",
        )
    say("!: the rule chooses the slower one")
    advise(rows)
    if good and args.out is not None:
        facts = {**provenance(DEVICE), "vllm": installed_version("vllm")}
        append_rows(args.out, [{**row.as_result(), **facts} for row in rows])
    say(f"{'OK' if good else 'FAIL'}, {time.perf_counter() - BEGUN:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
