"""The operator for exported models on a GPU: its kernel file, its counters, its results."""

import ctypes
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import cuda_on_host
from helpers import make_cache
from models import prompt, tiny
from tightkv.config import KVQuantConfig
from tightkv.export import OperatorError, StaticKV, operator_library
from tightkv.export.operator import add_kernels
from tightkv.paged.attention import attend
from tightkv.pages.layout import RING_SLACK, PageLayout, window_step

try:
    operator_library()
except OperatorError as error:
    pytest.skip(str(error), allow_module_level=True)

from tightkv.export import cuda_programs, recorder
from tightkv.export.static_shape import StaticShape
from tightkv.kernels.cuda import backend, decode_plan, driver
from tightkv.kernels.cuda.nvrtc import compile_source, load_nvrtc
from tightkv.kernels.cuda.params import StepParams
from tightkv.kernels.cuda.source import STATIC_STEP, included

SMALL = KVQuantConfig(page_size=32, exact_pages=1, sinks=2)  # ring of 64 tokens


# --- without a GPU ---
@pytest.fixture
def recorded(monkeypatch):
    """A set of kernels as an H200 would get it, its machine code left out."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(decode_plan, "_processors", lambda device: (132, 228 << 10))
    monkeypatch.setattr(backend, "compile_cubin", lambda text, arch: text.encode()[-64:])
    backend._module.cache_clear(), backend._loaded.cache_clear()
    layout = PageLayout(SMALL, 2, 64, torch.bfloat16)
    shape = StaticShape(layout, 4, 2, 512, feedback=True)
    yield cuda_programs.KernelSet(shape, torch.device("cpu"))
    backend._module.cache_clear(), backend._loaded.cache_clear()


def test_heads_that_are_no_power_of_two_are_refused(monkeypatch):
    monkeypatch.setattr(backend, "unavailable", lambda device_type, asked: None)
    shape = StaticShape(PageLayout(SMALL, 2, 96, torch.bfloat16), 4, 2, 512, False)
    with pytest.raises(ValueError, match="head_dim=96 cannot be exported to a GPU; powers of two"):
        cuda_programs.known_kernels(shape, torch.device("cpu"))


def test_every_count_of_tokens_has_its_launches(recorded):
    tokens = {kind: [p.tokens for p in recorded.programs if p.kind == kind] for kind in range(3)}
    assert tokens[recorder.STEP] == list(range(1, RING_SLACK + 1))
    assert tokens[recorder.APPEND] == [64, 128, 256, 512]
    assert not tokens[recorder.ATTEND_NEW]  # torch's attention does it
    for program in recorded.programs:
        names = [launch.name for launch, _ in program.launches]
        if program.kind == recorder.STEP:
            assert names[:3] == ["static_step", "append_and_seal", "decode"]
        else:
            assert names == ["static_step", "append", "seal", "append"]
        for launch, relocations in program.launches:
            # no address of the process that exported stays in the file
            addresses = [
                value
                for x in launch.args
                for kind, value in (
                    [(kind, getattr(x, name)) for name, kind in x._fields_]
                    if isinstance(x, ctypes.Structure)
                    else [(type(x), x.value)]
                )
                if kind is ctypes.c_void_p and value
            ]
            assert len([r for r in relocations if r.what not in (100, 101)]) == len(addresses)


def test_kernel_files_are_the_same_in_every_process(recorded):
    """A package that was compiled elsewhere finds its kernels by their key."""
    again = cuda_programs.KernelSet(recorded.shape, torch.device("cpu"))
    arguments = [
        [bytes(x) for p in kernels.programs for launch, _ in p.launches for x in launch.args]
        for kernels in (recorded, again)
    ]
    assert arguments[0] != arguments[1]  # other addresses
    assert cuda_programs.key_of(recorded.to_bytes()) == cuda_programs.key_of(again.to_bytes())


def test_a_damaged_kernel_file_is_refused(recorded):
    data = recorded.to_bytes()
    file = cuda_programs.kernel_file([data])
    add_kernels(file)
    for size in (0, 7, 30, len(file) // 2, len(file) - 8):
        with pytest.raises(OperatorError, match=r"ends too early|no file of tightkv's kernels"):
            add_kernels(file[:size])
    with pytest.raises(OperatorError, match="goes on after its end"):
        add_kernels(file + bytes(8))
    with pytest.raises(OperatorError, match="another version wrote it"):
        add_kernels(file[:8] + b"\1" + file[9:])
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):  # whatever the numbers are, nothing is read beyond the file
        changed = bytearray(file)
        at = int(torch.randint(8, len(file), (), generator=generator))
        changed[at] ^= 0xFF
        try:
            add_kernels(bytes(changed))
        except OperatorError:
            continue


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_takes_the_counters(arch):
    assert compile_source(load_nvrtc("13"), included(STATIC_STEP), arch)


def host_step(state, start, count, pads=None, cfg=SMALL, max_tokens=512):
    """static_step.cu, compiled for this machine's CPU; its numbers."""
    layout, batch = PageLayout(cfg, 2, 64), len(state)
    position = torch.arange(start, start + count)
    numbers = [torch.full((batch + (i == 5),), -7, dtype=torch.int32) for i in range(6)]
    refused = torch.zeros(1, dtype=torch.int32)
    pointers = (position.data_ptr(), 0 if pads is None else pads.data_ptr(), state.data_ptr())
    params = StepParams(
        *pointers, *[x.data_ptr() for x in numbers], refused.data_ptr(), count, batch, max_tokens,
        layout.page_size, cfg.exact_pages, layout.ring_tokens, cfg.sinks, RING_SLACK, 0,
        window_step(cfg),
    )  # fmt: skip
    cuda_on_host.static_step_module().launch("static_step", (1, 1, 1), 64, params)
    return [x.tolist() for x in numbers], bool(refused)


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no g++")
@pytest.mark.parametrize("window_bits", [8, 16])
def test_counters_are_those_of_the_cpu(window_bits):
    pads, cfg = torch.tensor([0, 9, 80]), SMALL.replace(window_bits=window_bits)
    static = StaticKV(PageLayout(cfg, 2, 64), 512, batch=3)
    state = torch.zeros(3, 5, dtype=torch.int64)
    for start, count in ((0, 70), (70, 1), (71, 17), (88, 90), (130, 3), (20, 1), (21, 33), (0, 5)):
        tokens = [torch.randn(3, heads, count, 64) for heads in (2, 2, 2)]
        before = static.state[:, 1].clone()
        static(*tokens, torch.arange(start, start + count), left_pad=pads)
        numbers, refused = host_step(state, start, count, pads, cfg)
        assert torch.equal(state, static.state) and not refused
        length, valid, read, sinks, pad = static.state.T.tolist()
        assert numbers[:4] == [length, pad, read, sinks]
        assert numbers[4] == ([0] * 3 if start == 0 else before.clamp_max(start).tolist())
        assert numbers[5] == [count * b for b in range(4)] and valid[0] >= 0


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no g++")
def test_a_bad_position_is_refused_until_position_0():
    state = torch.zeros(1, 5, dtype=torch.int64)
    assert not host_step(state, 0, 10)[1]
    for start, count in ((11, 1), (505, 10), (-1, 3)):
        again = state.clone()
        numbers, refused = host_step(again, start, count)
        assert refused and numbers[0] == [0] and numbers[5] == [0, 0]  # nothing is read or written
        assert host_step(again, 10, 1)[1]
        assert host_step(again, 0, 3)[1] is False
    state[0, 1] = 600
    assert host_step(state, 10, 1)[1]


class OnHost:
    """A StaticKV, and the programs of the same layer for a GPU, run on this machine's CPU.

    What the operator does with them (cuda_operator.cpp) is done here in Python.
    """

    def __init__(self, monkeypatch, cfg, window, pads, softcap=3.0, processors=2):
        layout = PageLayout(cfg, 1, 64, torch.bfloat16)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(decode_plan, "_processors", lambda device: (processors, 228 << 10))
        monkeypatch.setattr(backend, "compile_cubin", lambda text, arch: text.encode())
        backend._module.cache_clear(), backend._loaded.cache_clear()
        decode_plan.DecodePlan.of.cache_clear()
        rows, heads = len(pads), layout.num_kv_heads
        shape = StaticShape(layout, 2 * heads, rows, 256, False, window, softcap)
        self.programs = cuda_programs.KernelSet(shape, torch.device("cpu"))
        self.constants = [torch.frombuffer(bytearray(x), dtype=torch.uint8)
                          for x in self.programs.constants]  # fmt: skip
        self.static, own = (StaticKV(layout, 256, batch=rows, window=window) for _ in range(2))
        self.pads, self.softcap, self.refused = torch.tensor(pads), softcap, torch.zeros(1).int()
        self.own = {name: getattr(own, name) for name in ("pages", "ring", "sinks", "state")}
        self.own |= {"left_pad": self.pads, "refused": self.refused}
        backend._module.cache_clear(), backend._loaded.cache_clear()
        decode_plan.DecodePlan.of.cache_clear()

    def run(self, kind, count, **operands):
        """`operands`: a tensor, and how many of its elements come before."""
        found = [p for p in self.programs.programs if p.kind == kind and p.tokens >= count]
        program = found[0]
        scratch = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in program.scratch]
        places = {name: (x, 0) for name, x in self.own.items()} | operands
        for launch, relocations in program.launches:
            args = [type(x).from_buffer_copy(x) for x in launch.args]
            for r in relocations:
                if r.what == recorder.COUNT:
                    value = ctypes.c_int(count)
                elif r.what == recorder.SCALE:
                    value = ctypes.c_float(0.125)
                else:
                    x, skip = (
                        places[recorder.OPERANDS[r.what]] if r.what < 100
                        else (self.constants[r.what - 1000], 0) if r.what < 2000
                        else (scratch[r.what - 2000], 0)
                    )  # fmt: skip
                    value = ctypes.c_void_p(x.data_ptr() + skip * x.element_size() + r.offset)
                to = ctypes.addressof(args[r.argument]) + r.at
                ctypes.memmove(to, ctypes.addressof(value), ctypes.sizeof(value))
            module = cuda_on_host.of_source(launch.cubin.decode())
            module.launch(launch.name, launch.grid, launch.threads, *args, shared=launch.shared)

    def check(self, start, count):
        generator = torch.Generator().manual_seed(start + count)
        rows, heads, dim = len(self.pads), self.static.layout.num_kv_heads, 64
        shape = (rows, count, 4 * heads, dim)
        new = torch.randn(shape, generator=generator).bfloat16()
        query, key, value = (
            x.contiguous() for x in new.split((2 * heads, heads, heads), 2)
        )  # [B, T, H, D]
        position = torch.arange(start, start + count)
        expected = self.static(
            *(x.transpose(1, 2) for x in (query, key, value)), position,
            left_pad=self.pads, softcap=self.softcap,
        )  # fmt: skip
        out = torch.full_like(query, torch.nan)
        tokens = {"query": (query, 0), "key": (key, 0), "value": (value, 0), "out": (out, 0)}
        if count <= RING_SLACK:
            self.run(recorder.STEP, count, position=(position, 0), **tokens)
        else:
            state = torch.full((5,), 99)
            for b in range(rows):
                for next_token in range(0, count, RING_SLACK):
                    at = min(next_token, count - RING_SLACK)
                    row, first = b * count * heads * dim, (b * count + at) * 2 * heads * dim
                    self.run(
                        recorder.ATTEND_NEW, RING_SLACK, query=(query, first),
                        out=(out, first), key=(key, row), value=(value, row),
                        position=(position, at), left_pad=(self.pads, b), state=(state, 0),
                    )  # fmt: skip
            self.run(recorder.APPEND, count, position=(position, 0), **tokens)
        assert not self.refused
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        for name in ("state", "ring", "sinks"):
            assert torch.equal(self.own[name], getattr(self.static, name)), name


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no g++")
@pytest.mark.parametrize("window_bits", [8, pytest.param(16, marks=pytest.mark.thorough)])
def test_programs_of_windows_and_soft_caps(monkeypatch, window_bits):
    """Over pages, and a window that the ring holds; prompts with padding, and rewinds."""
    cache = OnHost(monkeypatch, SMALL.replace(window_bits=window_bits), 60, (0,))
    for start, count in ((0, 100), (40, 9)):
        cache.check(start, count)
    assert cache.own["pages"].numel() > 0
    cfg = KVQuantConfig(page_size=32, exact_pages=2, sinks=0, window_bits=window_bits)
    cache = OnHost(monkeypatch, cfg, 20, (0, 35))
    for start, count in ((0, 40), (40, 32), (72, 32), (104, 9), (100, 9)):
        cache.check(start, count)
    assert cache.own["pages"].numel() == 0
    tokens = torch.randn(2, 9, 2, 64).bfloat16()
    operands = dict.fromkeys(("query", "key", "value", "out"), (tokens, 0))
    cache.run(recorder.STEP, 9, position=(torch.arange(20, 29), 0), **operands)
    assert cache.refused and not tokens.any()  # the ring has forgotten what position 20 sees


@pytest.mark.skipif(cuda_on_host.COMPILER is None, reason="no g++")
def test_a_tile_of_two_pages_is_not_read_where_there_are_none(monkeypatch):
    """The first page that a window lies in is the second of a tile."""
    cache = OnHost(monkeypatch, SMALL.replace(exact_pages=3), 60, (0,), processors=132)
    assert cache.own["pages"].numel() == 0
    for start, count in ((0, 100), (100, 1), (101, 1)):
        cache.check(start, count)


# --- on a GPU ---
class Pair:
    """A StaticKV on the GPU and the PagedKV of the same kernels."""

    def __init__(
        self, cfg, *, heads=2, group=2, dim=128, rows=1, feedback=None, window=None, softcap=None
    ):
        layout = PageLayout(cfg, heads, dim, torch.bfloat16)
        self.static = StaticKV(
            layout, 512, batch=rows, feedback=feedback, device="cuda", query_heads=heads * group,
            window=window, softcap=softcap,
        )  # fmt: skip
        self.softcap = softcap
        self.options = {"window": window, "softcap": softcap}
        self.paged = make_cache(
            cfg, rows=rows, heads=heads, dim=dim, dtype=torch.bfloat16, left_pad=[0] * rows,
            encode_partial_page=False, device="cuda",
        )  # fmt: skip
        self.paged._kernels = "cuda"
        self.paged.feedback = feedback
        self.rows, self.heads, self.group, self.dim = rows, heads, group, dim
        self.length, self.seed = 0, 0

    def tokens(self, count):
        self.seed += 1
        generator = torch.Generator().manual_seed(self.seed)
        heads = self.heads
        x = torch.randn(
            self.rows, heads * (self.group + 2), count, self.dim, generator=generator
        ).to("cuda", torch.bfloat16)
        return x.split((heads * self.group, heads, heads), 1)

    def check(self, count):
        query, key, value = self.tokens(count)
        position = torch.arange(self.length, self.length + count, device="cuda")
        got = self.static(query, key, value, position, softcap=self.softcap)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        plan = [range(self.rows), [count] * self.rows]
        if count <= RING_SLACK:
            self.paged.append(self.paged.table.append(*plan), k, v)
            expected, _ = attend(self.paged, q, **self.options)
            # the same kernels; only splits may differ
            torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
        else:
            expected, _ = attend(self.paged, q, new_key=k, new_value=v, **self.options)
            self.paged.append(self.paged.table.append(*plan), k, v)
            if self.length == 0:
                torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
            else:  # pieces are read back from the cache
                assert (got - expected).float().norm() < 0.2 * expected.float().norm()
        self.length += count
        for b, row in enumerate(self.paged.table.rows):
            names = ("length", "ring_valid_from", "ring_read_from", "sink_count", "left_pad")
            state = self.static.state[b].tolist()
            if count <= RING_SLACK or self.length == count:
                assert state == [getattr(row, name) for name in names]
            sealed = row.pages[: row.length // self.paged.layout.page_size]
            sealed = sealed[: self.static.pages.shape[1]]
            assert torch.equal(self.static.pages[b, : len(sealed)], self.paged.pages[sealed])


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["k4v4", "k8v8", "k2v2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_gpu_cache_is_the_paged_cache(preset, rows):
    bits = 8 if preset == "k2v2" else 16
    cfg = KVQuantConfig.preset(preset, page_size=32, exact_pages=1, sinks=2, window_bits=bits)
    pair = Pair(cfg, rows=rows)
    for count in (70, 1, 1, 17, 32, 1, 5) + ((40, 1) if rows == 1 else ()):
        pair.check(count)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (8, 128), (8, 256)])
def test_gpu_shapes(group, dim):
    pair = Pair(SMALL, group=group, dim=dim)
    for count in (33, 1, 31, 1):
        pair.check(count)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("window", "softcap", "exact_pages"), [(None, 3.0, 1), (60, None, 1), (60, 3.0, 3)]
)
def test_windows_and_soft_caps_on_a_gpu(window, softcap, exact_pages, rows):
    """Over pages, and (exact_pages=3) in the ring alone; to the last token that has room."""
    cfg = SMALL.replace(exact_pages=exact_pages)
    pair = Pair(cfg, rows=rows, window=window, softcap=softcap)
    assert (pair.static.pages.numel() == 0) == (exact_pages == 3)
    for count in (100, 1, 1, 17, 32, 1, 5, *[32] * 10, 1, 30, 4):
        pair.check(count)
    assert pair.length == 512


@pytest.mark.gpu
def test_left_padding_of_windows_on_a_gpu():
    """As the CPU's operator has it."""
    pads, layout = torch.tensor([0, 45, 70]), PageLayout(SMALL, 2, 64, torch.bfloat16)
    options = {"batch": 3, "window": 60}
    here = StaticKV(layout, 512, **options)
    there = StaticKV(layout, 512, **options, device="cuda", query_heads=4, softcap=3.0)
    start, generator = 0, torch.Generator().manual_seed(0)
    for count in (100, 1, 20, 1):
        new = [torch.randn(3, h, count, 64, generator=generator).bfloat16() for h in (4, 2, 2)]
        at = torch.arange(start, start + count)
        expected = here(*new, at, left_pad=pads, softcap=3.0)
        got = there(*(x.cuda() for x in (*new, at)), left_pad=pads.cuda(), softcap=3.0)
        torch.testing.assert_close(got.cpu(), expected, atol=2e-2, rtol=2e-2)
        start += count
    assert torch.equal(there.state.cpu(), here.state)


@pytest.mark.gpu
def test_gemma_on_a_gpu():
    """Sliding windows and soft caps; teacher-forced, against TightCache."""
    from tightkv.integrations.transformers import TightCache
    from tightkv.integrations.transformers.export import ExportableModel

    model = tiny("gemma2", torch.bfloat16, head_dim=64).cuda().requires_grad_(False)
    static, cache = (
        ExportableModel(model, "k4v4", max_tokens=320),
        TightCache("k4v4", model),
    )
    ids, start = prompt(1, 300).cuda(), 0
    with torch.no_grad():
        for count in (100, *[1] * 200):
            new, at = ids[:, start : start + count], torch.arange(start, start + count)
            got = static(new, at.cuda())[:, -1].float()
            expected = model(new, past_key_values=cache).logits[:, -1].float()
            assert (got - expected).norm() < 0.1 * expected.norm(), start
            start += count


@pytest.mark.gpu
def test_a_gpu_step_in_a_cuda_graph():
    pair, again = Pair(SMALL), Pair(SMALL)
    pair.check(70), again.check(70)
    query, key, value = (x.clone() for x in pair.tokens(1))
    position = torch.tensor([70], device="cuda")
    for kv in (pair.static, again.static):
        kv(query, key, value, position)  # compiles, loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pair.static(query, key, value, position)
    for at in range(70, 140):
        position.fill_(at)
        for x, new in zip((query, key, value), pair.tokens(1), strict=True):
            x.copy_(new)
        graph.replay()
        expected = again.static(query, key, value, torch.tensor([at], device="cuda"))
        assert torch.equal(out, expected)
    assert torch.equal(pair.static.pages, again.static.pages)


@pytest.mark.gpu
def test_gpu_refusals():
    pair = Pair(SMALL)
    pair.check(40)
    query, key, value = pair.tokens(1)
    pair.static(query, key, value, torch.tensor([50], device="cuda"))
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="begin at position 0"):
        pair.static(query, key, value, torch.tensor([40], device="cuda"))
    with pytest.raises(RuntimeError, match="position is not on the GPU"):
        pair.static(query, key, value, torch.tensor([0]))
    with pytest.raises(RuntimeError, match=r"key has shape \[1, 2, 2, 128\]"):
        pair.static(query, key.repeat(1, 1, 2, 1), value, torch.tensor([0], device="cuda"))
    with pytest.raises(RuntimeError, match=r"softcap=3.0+; its kernels were made for 0 and 0"):
        pair.static(query, key, value, torch.tensor([0], device="cuda"), softcap=3.0)
    with pytest.raises(RuntimeError, match="masks, and attention to later tokens, are not"):
        pair.static(query, key, value, torch.tensor([0], device="cuda"), causal=False)
    pair.static.kernels = 5
    with pytest.raises(RuntimeError, match="kernels are not loaded: call tightkv_load_kernels"):
        pair.static(query, key, value, torch.tensor([0], device="cuda"))


@pytest.mark.gpu
def test_a_compiled_decode_step_on_a_gpu():
    """As one graph, replayed as a CUDA graph."""
    from tightkv.integrations.transformers.export import ExportableModel

    model = tiny("llama", torch.bfloat16, num_hidden_layers=2, head_dim=64).cuda()
    model.requires_grad_(False)
    static, other = (ExportableModel(model, "k4v4", max_tokens=320) for _ in range(2))
    step = torch.compile(other, fullgraph=True, mode="reduce-overhead")
    ids, at = prompt(1, 200).cuda(), torch.arange(200, device="cuda")
    counters = torch._dynamo.utils.counters["inductor"]
    counters.clear()
    with torch.no_grad():
        for module in (static, other):
            module(ids[:, :100], at[:100])
        for k in range(100, 200):
            expected = static(ids[:, k : k + 1], at[k : k + 1])
            got = step(ids[:, k : k + 1], at[k : k + 1].clone())
            # the compiler rounds otherwise, and a code at an edge may become the next
            error = (got - expected).float().norm() / expected.float().norm()
            assert error < 0.1, (k, error)
    assert not counters["cudagraph_skips"]
    assert torch.equal(other.caches[0].state, static.caches[0].state)


ELSEWHERE = """
import ctypes, sys, torch
library, kernels, model, inputs = sys.argv[1:]
torch.ops.load_library(library)
load = ctypes.CDLL(library).tightkv_load_kernels
load.restype = ctypes.c_char_p
assert load(kernels.encode()) == b"", load(kernels.encode())
from torch._inductor import cpu_vec_isa
cpu_vec_isa.valid_vec_isa_list = list  # half a minute less: integrations/transformers/package.py
run = torch._inductor.aoti_load_package(model, run_single_threaded=True)
ids = torch.load(inputs).cuda()
at, tokens = ids.shape[1], []
logits = run(ids, torch.arange(at, device="cuda"))
token, position, graph = ids[:, :1].clone(), torch.tensor([at], device="cuda"), None
for step in range(200):
    tokens.append(int(logits[0, -1].argmax()))
    token.fill_(tokens[-1]), position.fill_(at + step)
    if step < 100:
        logits = run(token, position)
        continue
    if graph is None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = run(token, position)
    graph.replay()
assert "tightkv" not in sys.modules
print(*tokens)
"""


@pytest.mark.gpu
def test_a_gpu_package_in_a_process_without_tightkv(tmp_path):
    """100 tokens called, 100 replayed from a CUDA graph."""
    from tightkv.integrations.transformers.export import ExportableModel
    from tightkv.integrations.transformers.package import compile_pt2

    model = tiny("llama", torch.bfloat16, num_hidden_layers=2, head_dim=64).cuda()
    exportable = ExportableModel(model.requires_grad_(False), "k4v4", max_tokens=320)
    ids = prompt(1, 100)
    compile_pt2(exportable.program(), tmp_path / "model.pt2", "cuda")
    (tmp_path / "model.kernels").write_bytes(exportable.kernel_file())
    torch.save(ids, tmp_path / "ids.pt")
    names = ("model.kernels", "model.pt2", "ids.pt")
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, operator_library(), *(tmp_path / n for n in names)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tokens = torch.tensor([int(token) for token in done.stdout.split()], device="cuda")
    # bf16 has ties, and the compiler rounds otherwise: each token is among the best of eager
    with torch.no_grad():
        logits = exportable(ids.cuda(), torch.arange(100, device="cuda"))[0, -1]
        for at, token in enumerate(tokens):
            spread = logits.float().std()
            assert logits.max() - logits[token] < 0.1 * spread, at
            logits = exportable(token[None, None], torch.tensor([100 + at], device="cuda"))[0, -1]


def test_only_the_thread_that_records_launches_nothing(monkeypatch):
    """Another model may decode meanwhile: a launch that is listed there would be lost."""

    def find(self, name, shared):
        raise RuntimeError("launched")

    monkeypatch.setattr(driver.Module, "_find", find)
    module = driver.Module(b"", torch.device("cuda", 0))
    with driver.recording() as launches, ThreadPoolExecutor(1) as other:
        module.launch("here", (1, 1, 1), 32)
        with pytest.raises(RuntimeError, match="launched"):
            other.submit(module.launch, "there", (1, 1, 1), 32).result()
    assert [launch.name for launch in launches] == ["here"]
    with pytest.raises(RuntimeError, match="launched"):
        module.launch("after", (1, 1, 1), 32)
