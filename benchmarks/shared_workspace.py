"""Prompts after cached prefixes: the shared workspace against the kernel that reads pages.

PYTHONPATH=src:tests/support python benchmarks/shared_workspace.py [--long]    on a Hopper GPU with vLLM
DRY=1 TRITON_INTERPRET=1 ... python benchmarks/shared_workspace.py             small shapes on the CPU, no times
"""

import os
import random
import statistics
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import torch

from tightkv.bench import inputs
from tightkv.config import KVQuantConfig
from tightkv.kernels import ragged_plan, reference, sdpa
from tightkv.kernels.options import AttendOptions
from tightkv.kernels.triton import ragged as ragged_ops
from tightkv.layout import PageLayout

DRY = bool(os.environ.get("DRY"))
T0 = time.perf_counter()
if DRY:
    sys.path.insert(0, "tests/support")
    from ragged_caches import plain_varlen as attention
    from tightkv.kernels.triton import backend as kernels

    DEVICE, HQ, HKV, D, DTYPE = torch.device("cpu"), 4, 2, 64, torch.float16
else:
    from tightkv.integrations.vllm.flash_attention import varlen_flash_attention_3 as attention
    from tightkv.kernels.cuda import backend as kernels

    DEVICE, HQ, HKV, D, DTYPE = torch.device("cuda", 0), 32, 8, 128, torch.bfloat16
sdpa._VARLEN[:] = [attention]
LAYOUT = PageLayout(KVQuantConfig.preset("k4v4"), HKV, D, DTYPE)
ROOM = ragged_plan.workspace_tokens(LAYOUT)
if DRY:
    ROOM = 1500


def say(*words):
    print(f"[{time.perf_counter() - T0:5.1f} s]", *words, flush=True)


def case(lengths, counts, seed=0):
    shape = SimpleNamespace(
        batch=len(lengths), tokens=max(max(lengths), 1), lengths=lengths, ragged=True
    )
    layer = inputs.fill(LAYOUT, shape, kernels, DEVICE, seed)
    total = sum(counts)
    qkv = torch.randn(total, HQ + 2 * HKV, D, device=DEVICE).to(DTYPE)
    query, key, value = qkv.split((HQ, HKV, HKV), 1)
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(DEVICE)
    out = torch.empty(total, HQ, D, dtype=DTYPE, device=DEVICE)
    options = AttendOptions(max(counts), new_key=key, new_value=value, out=out)
    groups = ragged_plan.plan_groups(counts, lengths, ROOM, starts, layer.view.lengths)
    return SimpleNamespace(
        codec=layer.codec, view=layer.view, shared=replace(layer.view, ragged=groups),
        query=query, starts=starts, options=options, groups=groups, counts=counts, lengths=lengths,
    )  # fmt: skip


def attend(c, view):
    return kernels.attend(c.codec, c.query, view, c.starts, c.options)


def both(c):
    calls = []
    sdpa._VARLEN[:] = [lambda *a: (calls.append(1), attention(*a))[1]]
    new, new_lse = (x.clone() for x in attend(c, c.shared))
    old, old_lse = (x.clone() for x in attend(c, c.view))
    assert len(calls) == len(c.groups), (len(calls), len(c.groups))
    return (new.float(), new_lse), (old.float(), old_lse)


def check(name, c):
    (new, new_lse), (old, old_lse) = both(c)
    half = 2.0**-8 if DTYPE == torch.bfloat16 else 2.0**-11
    size = float(old.abs().max())
    error, lse_error = float((new - old).abs().max()), float((new_lse - old_lse).abs().max())
    finite = bool(torch.isfinite(new).all() and torch.isfinite(new_lse).all())
    ok = finite and error <= 8 * half * size and lse_error <= 40 * half
    # A few sequences against the reference, whose arithmetic is float32.
    rows = slice(0, min(2, len(c.lengths)))
    tokens = slice(0, sum(c.counts[rows]))
    names = ("block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows")
    few = replace(c.view, **{n: getattr(c.view, n)[rows] for n in names})
    cut = c.options._replace(
        new_key=c.options.new_key[tokens].float(), new_value=c.options.new_value[tokens].float(),
        out=None, max_queries=max(c.counts[rows]),
    )  # fmt: skip
    starts = c.starts[: rows.stop + 1]
    exact, _ = reference.attend(c.codec, c.query[tokens].float(), few, starts, cut)
    rms = float(exact.square().mean().sqrt())
    off = [float((x[tokens] - exact).square().mean().sqrt()) / rms for x in (new, old)]
    say(
        f"{'OK  ' if ok else 'FAIL'} {name}: groups {len(c.groups)}, max error {error:.2e} of "
        f"{size:.2e}, LSE {lse_error:.2e}; rms error to the reference: workspace {off[0]:.2e}, "
        f"pages {off[1]:.2e}"
    )
    return ok


def median_ms(run, repeats=10):
    """Of the device by events, and of the host alone."""
    if DRY:
        run()
        return 0.0, 0.0
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    device, host = [], []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        t = time.perf_counter()
        run()
        host.append((time.perf_counter() - t) * 1e3)
        end.record()
        end.synchronize()
        device.append(begin.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def pieces(c):
    """Device ms of filling the workspaces, of attention, and of both rotations."""
    room = max(g.tokens for g in c.groups)
    key, value = (torch.zeros(room, HKV, D, dtype=DTYPE, device=DEVICE) for _ in "kv")
    rotated = ragged_ops.rotate_queries(c.codec, c.query)
    mixed, o = torch.empty_like(rotated), c.options

    def fill():
        for g in c.groups:
            new = o.new_key[g.queries], o.new_value[g.queries]
            ragged_ops.load_workspace(
                c.codec, c.shared, g, *new, key[: g.tokens], value[: g.tokens]
            )

    def call():
        for g in c.groups:
            k, v = key[: g.tokens], value[: g.tokens]
            attention(rotated[g.queries], k, v, g, D**-0.5, mixed[g.queries])

    def turn():
        ragged_ops.unrotate(c.codec, ragged_ops.rotate_queries(c.codec, c.query), o.out)

    return [median_ms(f)[0] for f in (fill, call, turn)]


def one_by_one(c):
    """Each prompt by `extend`, as long ones go."""
    first = [0, *torch.tensor(c.counts).cumsum(0).tolist()]
    names = ("block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows")
    parts = []
    for i, length in enumerate(c.lengths):
        rows, mine = slice(i, i + 1), slice(first[i], first[i + 1])
        view = replace(c.view, same_length=length, **{n: getattr(c.view, n)[rows] for n in names})
        starts = torch.tensor([0, c.counts[i]], dtype=torch.int32, device=DEVICE)
        cut = c.options._replace(
            max_queries=c.counts[i],
            **{n: getattr(c.options, n)[mine] for n in ("new_key", "new_value", "out")},
        )
        parts.append((c.query[mine], view, starts, cut))

    def run():
        for part in parts:
            kernels.attend(c.codec, *part)

    return run


def main():
    torch.manual_seed(0)
    choose = random.Random(0)
    small = 20 if DRY else 1
    good = check("5 tiny prefixes", case([0, 1, 3, 65, 130], [64, 70, 1, 33, 90]))
    lengths = [
        8000 // small + choose.randint(-150 if not DRY else -40, 150)
        for _ in range(32 // small + 2)
    ]
    counts = [choose.randint(64, 200) // (4 if DRY else 1) for _ in lengths]
    good &= check(f"{len(lengths)} ragged prefixes", case(lengths, counts))
    say("all OK" if good else "SOME FAILED")
    shapes = [
        (32, 8192, 128),
        (8, 32768, 128),
        (256, 1024, 96),
        (4, 2048, 64),
        (32, 8192, 40),
        (32, 512, 64),
    ]
    if DRY:
        shapes = [(3, 200, 20), (2, 400, 20)]
    print(
        "| case | groups | worth | pages ms | host | workspace ms | host | x | fill | attention | rotations |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    sdpa._VARLEN[:] = [attention]
    for batch, before, count in shapes:
        c = case([before] * batch, [count] * batch)
        old, old_host = median_ms(lambda: attend(c, c.view))
        new, new_host = median_ms(lambda: attend(c, c.shared))
        parts = " | ".join(f"{x:.3f}" for x in pieces(c))
        worth = ragged_plan.is_worth(c.counts, c.lengths)
        print(
            f"| {batch} x {before}, {count} new | {len(c.groups)} | {'yes' if worth else 'no'} | {old:.3f} | "
            f"{old_host:.3f} | {new:.3f} | {new_host:.3f} | {old / max(new, 1e-9):.2f} | {parts} |",
            flush=True,
        )
        del c
    if "--long" in sys.argv:
        from tightkv.integrations.vllm.flash_attention import flash_attention_3

        sdpa._PREFERRED[:] = [flash_attention_3]
        for batch, before, count in (
            (32, 8192, 300),
            (8, 8192, 1000),
            (8, 0, 1000),
            (1, 8192, 300),
            (1, 32768, 2000),
        ):
            c = case([before] * batch, [count] * batch)
            old, old_host = median_ms(one_by_one(c), 5)
            new, new_host = median_ms(lambda: attend(c, c.shared), 5)
            say(
                f"long: {batch} x {before}, {count} new: one by one {old:.3f} (host {old_host:.3f}), "
                f"workspace {new:.3f} (host {new_host:.3f}) ms"
            )
            del c
    say("done")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
