"""The operators: torch.compile sees through them, and a CUDA graph replays with other lengths."""

from dataclasses import replace

import pytest
import torch

from helpers import add, make_cache, tokens
from tightkv.config import KVQuantConfig
from tightkv.kernels import ops
from tightkv.kernels.registry import select

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=1)


def filled(count=90):
    cache = make_cache(CFG, device=DEVICE, dtype=DTYPE)
    add(cache, *(x.to(DEVICE, DTYPE) for x in tokens(2, count)))
    cache.reserve(40)
    rows = cache.table.tensors(DEVICE)
    table = torch.cat([rows.block_table, torch.arange(20, 36, device=DEVICE).int().view(2, 8)], 1)
    return cache, replace(cache.view(), block_table=table)


def step_inputs(seed):
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, heads, 64, generator=g) for heads in (4, 2, 2)]
    return [x.to(DEVICE, DTYPE) for x in made]


def decode_step(spec, view, query, key, value, cu_seqlens):
    """What an engine compiles: grow by a token, append, attend; lengths live on the device."""
    ring = view.ring_key.shape[1]
    before = view.lengths
    ring_valid_from = torch.clamp(before - ring, min=0)
    lengths = before + 1
    newest = torch.div(lengths - 1, CFG.page_size, rounding_mode="floor")
    ring_read_from = torch.clamp((newest - CFG.exact_pages + 1) * CFG.page_size, min=0)
    after = replace(view, lengths=lengths, ring_read_from=ring_read_from.int())
    ops.append(
        spec,
        after,
        key,
        value,
        cu_seqlens,
        ring_valid_from.int(),
        max_new=1,
        encode_partial_page=True,
    )
    out, lse = ops.attend(spec, query, after, cu_seqlens, max_queries=1)
    return out, lse, lengths


def test_the_operators_do_what_the_kernels_do():
    cache, view = filled()
    spec = ops.spec_of(cache.layout)
    kernels = select("auto", DEVICE, cache.layout)
    query, key, value = step_inputs(0)
    cu_seqlens = torch.arange(3, dtype=torch.int32, device=DEVICE)
    after = replace(view, lengths=view.lengths + 1)
    ops.append(
        spec, after, key, value, cu_seqlens, view.left_pad, max_new=1, encode_partial_page=True
    )
    written = view.pages.clone()
    kernels.append(
        cache.codec,
        after,
        key,
        value,
        cu_seqlens,
        view.left_pad,
        max_new=1,
        encode_partial_page=True,
    )
    assert torch.equal(written, view.pages)
    options = {"max_queries": 1, "softcap": 5.0, "window": 60}
    out, lse = ops.attend(spec, query, after, cu_seqlens, **options)
    expected, expected_lse = kernels.attend(cache.codec, query, after, cu_seqlens, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_opcheck():
    cache, view = filled()
    query, key, value = step_inputs(0)
    cu_seqlens = torch.arange(3, dtype=torch.int32, device=DEVICE)
    spec = ops.spec_of(cache.layout)
    tests = ("test_schema", "test_faketensor")
    append = (spec, key, value, cu_seqlens, view.left_pad, 1, True, *ops._tensors(view))
    torch.library.opcheck(torch.ops.tightkv.append, append, test_utils=tests)
    options = (1, 0.125, True, 0, 0.0, None, None, None)
    attend = (spec, query, cu_seqlens, *options, *ops._tensors(view))
    torch.library.opcheck(torch.ops.tightkv.attend, attend, test_utils=tests)


def test_a_compiled_step_is_the_same_step():
    """fullgraph: no graph break anywhere in append and attend."""
    (cache, one), (_, two) = filled(), filled()
    spec = ops.spec_of(cache.layout)
    cu_seqlens = torch.arange(3, dtype=torch.int32, device=DEVICE)
    backend = "inductor" if DEVICE.type == "cuda" else "aot_eager"
    compiled = torch.compile(decode_step, fullgraph=True, backend=backend)
    for seed in range(8):  # over a page's end
        inputs = step_inputs(seed)
        plain, plain_lse, lengths = decode_step(spec, one, *inputs, cu_seqlens)
        one = replace(one, lengths=lengths)
        fast, fast_lse, lengths = compiled(spec, two, *inputs, cu_seqlens)
        two = replace(two, lengths=lengths)
        torch.testing.assert_close(fast, plain)
        torch.testing.assert_close(fast_lse, plain_lse)
    assert torch.equal(one.pages, two.pages) and int(one.lengths[0]) == 98


@pytest.mark.gpu
def test_a_graph_replays_with_growing_lengths():
    (cache, one), (_, two) = filled(), filled()
    spec = ops.spec_of(cache.layout)
    cu_seqlens = torch.arange(3, dtype=torch.int32, device=DEVICE)
    inputs = step_inputs(0)
    start = two.lengths.clone()
    saved = [getattr(two, n).clone() for n in ("pages", "ring_key", "ring_value")]

    def step():
        out, _, lengths = decode_step(spec, two, *inputs, cu_seqlens)
        two.lengths.copy_(lengths)
        return out

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    two.lengths.copy_(start)
    for name, x in zip(("pages", "ring_key", "ring_value"), saved, strict=True):
        getattr(two, name).copy_(x)
    for seed in range(8):
        fresh = step_inputs(seed)
        for target, x in zip(inputs, fresh, strict=True):
            target.copy_(x)
        graph.replay()
        expected, _, lengths = decode_step(spec, one, *fresh, cu_seqlens)
        one = replace(one, lengths=lengths)
        assert torch.equal(captured, expected)
    assert torch.equal(one.pages, two.pages)
