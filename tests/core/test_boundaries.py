"""What append and attend refuse; nothing leaks from one cache, device or model to another."""

import copy
import dataclasses
import gc
import pickle
from typing import Any

import pytest
import torch

from helpers import add, make_cache, tokens
from tightkv.config import KVQuantConfig
from tightkv.kernels import reference
from tightkv.kernels.constants import layout_constants
from tightkv.kernels.registry import load
from tightkv.kernels.triton.device import device_guard
from tightkv.kernels.view import AttendOptions
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout, page_layout

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=1)
KERNELS = ["reference", "cpu"]


def filled(kernels="reference", cfg=CFG, count=200, dim=64, dtype=torch.float32):
    table = SequenceTable(cfg)
    table.add_rows([0, 0])
    cache = PagedKV(PageLayout(cfg, 2, dim, dtype), table, "cpu", kernels)
    key, value = (x.to(dtype) for x in tokens(2, count, dim=dim))
    add(cache, key, value, [count, count // 2])
    return cache


# --- values that are alike are the same ---


def test_a_layout_is_a_value():
    a, b = (PageLayout(KVQuantConfig(), 8, 128) for _ in range(2))
    assert a == b and hash(a) == hash(b) and len({a, b}) == 1
    assert a != PageLayout(KVQuantConfig(), 8, 128, torch.float16)
    assert page_layout(KVQuantConfig(), 8, 128) is page_layout(KVQuantConfig(), 8, 128)
    shared = page_layout(KVQuantConfig(), 8, 128)
    assert copy.deepcopy(shared) is shared and copy.copy(shared) is shared
    assert pickle.loads(pickle.dumps(shared)) is shared
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.head_dim = 64
    with pytest.raises(TypeError):
        a.planes["key", "codes"] = None  # type: ignore[index]


def test_tables_of_many_layers_are_made_once():
    layout_constants.cache_clear()
    for _ in range(80):
        layout_constants(PageLayout(KVQuantConfig(seed=5), 8, 128))
    assert layout_constants.cache_info().misses == 1


def test_caches_that_are_alike_share_their_cuda_modules(monkeypatch):
    cuda = pytest.importorskip("tightkv.kernels.cuda.backend")
    from tightkv.kernels.cuda.decode_plan import DecodeTile

    loads = []
    monkeypatch.setattr(cuda, "compile_cubin", lambda text, arch: text.encode())
    monkeypatch.setattr(cuda, "Module", lambda cubin, device: loads.append(cubin) or cubin)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cuda._module.cache_clear(), cuda._loaded.cache_clear()
    gpu = torch.device("cuda:0")
    try:
        for sinks in (4, 4, 2):  # sinks are no part of a source
            for _ in range(32):
                layout = PageLayout(KVQuantConfig(sinks=sinks), 8, 128)
                cuda._module("append", layout, 8, None, False, gpu)
                cuda._module("decode", layout, 32, DecodeTile.of(layout, 4), False, gpu)
        assert len(loads) == 2
        cuda._module("append", layout, 8, None, False, torch.device("cuda:1"))
        assert len(loads) == 3  # a module belongs to a device
    finally:
        cuda._module.cache_clear(), cuda._loaded.cache_clear()


@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
def test_rotation_tables_are_those_of_the_rotation(rotation):
    """Copies come and go, and with them the ids of objects."""
    made = [
        Codec(PageLayout(KVQuantConfig(seed=seed, rotation=rotation), 2, dim))
        for seed in range(4)
        for dim in (64, 128)
    ]
    for i in range(160):
        codec = copy.deepcopy(made[i % 8])
        rotation = codec.key.rotation
        table = rotation.table(torch.device("cpu"))
        matrix = rotation.matrix()
        expected = matrix[0].sign() if rotation.kind == "hadamard" else matrix.T
        assert torch.equal(table, expected)
        del codec, rotation
        gc.collect(0)


def test_rotations_that_fell_out_of_the_cache_keep_their_tables():
    for seed in range(600):
        codec = Codec(PageLayout(KVQuantConfig(seed=1000 + seed), 2, 64))
        table = codec.key.rotation.table(torch.device("cpu"))
        assert torch.equal(table, codec.key.rotation.matrix()[0].sign())


def test_copies_of_caches_of_two_models_attend_as_their_originals():
    kernels = pytest.importorskip("tightkv.kernels.triton.backend")
    if not kernels.interpreted():
        pytest.skip("compares on the CPU")
    originals = [filled(dim=dim, cfg=CFG.replace(seed=dim), count=80) for dim in (64, 128)]
    cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32)
    for i in range(2):
        cache = copy.deepcopy(originals[i % 2])
        q = torch.randn(2, 2, cache.layout.head_dim)
        arguments = cache.codec, q, cache.view(), cu_seqlens
        out, _ = kernels.attend(*arguments, AttendOptions(max_queries=1))
        expected, _ = reference.attend(*arguments, AttendOptions(max_queries=1))
        torch.testing.assert_close(out, expected, atol=5e-3, rtol=5e-3)
        del cache, arguments
        gc.collect(0)


# --- dtypes ---


@pytest.mark.parametrize("kernels", KERNELS)
def test_key_and_value_have_one_dtype(kernels):
    cache = filled(kernels, dtype=torch.bfloat16)
    before = [x.clone() for x in (cache.pages, cache.ring_key, cache.ring_value)]
    key = torch.randn(2, 40, 2, 64)
    plan = cache.table.append([0, 1], [40, 40])
    with pytest.raises(ValueError, match=r"key is float32, value is bfloat16.*cast"):
        cache.append(plan, key, key.bfloat16())
    for dtype in (torch.float64, torch.int32, torch.complex64):
        with pytest.raises(ValueError, match="supported: float16, bfloat16, float32"):
            cache.append(plan, key.to(dtype), key.to(dtype))
    for old, now in zip(before, (cache.pages, cache.ring_key, cache.ring_value), strict=True):
        assert torch.equal(old, now[: len(old)])
    with pytest.raises(ValueError, match="new_key is float32, new_value is float16"):
        attend(cache, key.bfloat16()[:, :3], new_key=key[:, :3], new_value=key[:, :3].half())


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_tokens_of_another_dtype_than_the_cache(kernels, dtype):
    """A float32 key in a bfloat16 cache is rounded as the ring rounds it, and not misread."""
    cfg = CFG.replace(exact_pages=2)
    cache = make_cache(cfg, dtype=torch.bfloat16)
    cache._kernels = kernels
    key, value = (x.to(dtype) for x in tokens(2, 150))
    add(cache, key, value)
    got_key, got_value = cache.dequantize()
    for got, exact in ((got_key, key), (got_value, value)):
        error = (got.float() - exact.float()).norm() / exact.float().norm()
        assert error < 0.12


# --- operands ---


def test_attend_refuses_operands_that_are_wrong():
    cache = filled()
    q, key = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64)
    wrong: dict[str, dict[str, Any]] = {
        "query is float64": {"query": q.double()},
        "query has shape": {"query": q[0]},
        "query has 3 heads": {"query": q[:, :, :3]},
        "mask is int64": {"mask": torch.ones(1, 1, 1, 200, dtype=torch.long)},
        "mask covers 150 tokens": {"mask": torch.ones(1, 1, 1, 150, dtype=torch.bool)},
        "mask has shape": {"mask": torch.ones(3, 1, 1, 200, dtype=torch.bool)},
        "go together": {"new_key": key},
        "new_value is float16": {"new_key": key, "new_value": key.half()},
        "window=-1": {"window": -1},
        "softcap=-2.0": {"softcap": -2.0},
        "scale=nan": {"scale": float("nan")},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            attend(cache, **{"query": q, **change})


# --- devices ---


def test_queries_are_on_the_device_of_the_cache():
    with pytest.raises(ValueError, match="query is on meta; the cache is on cpu"):
        attend(filled(), torch.randn(2, 1, 4, 64, device="meta"))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
def test_the_default_device_does_not_matter(kernels, rotation):
    """torch.set_default_device("cuda") is common; "meta" stands for it where there is no GPU."""
    cfg = KVQuantConfig(page_size=32, exact_pages=1, seed=77, rotation=rotation)
    q = torch.randn(2, 5, 4, 64)
    with torch.device("meta"):
        cache = filled_on_cpu(cfg, kernels)
        out, lse = attend(cache, q)
        copy.deepcopy(cache).select([1, 0])
        whole = cache.dequantize()
        assert all(x.device.type == "cpu" for x in (out, lse, *whole, *cache.table.tensors("cpu")))
    again = filled_on_cpu(cfg, kernels)
    assert torch.equal(cache.pages, again.pages)
    assert torch.equal(out, attend(again, q)[0])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(kernels, dtype):
    cfg = KVQuantConfig(page_size=32, exact_pages=1, seed=78)
    q = torch.randn(2, 5, 4, 64)
    wanted = attend(filled_on_cpu(cfg, kernels), q)
    torch.set_default_dtype(dtype)
    try:
        found = attend(filled_on_cpu(cfg, kernels), q)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def filled_on_cpu(cfg, kernels):
    table = SequenceTable(cfg)
    table.add_rows([0, 3])
    cache = PagedKV(PageLayout(cfg, 2, 64, torch.float32), table, "cpu", kernels)
    g = torch.Generator("cpu").manual_seed(0)
    key = torch.randn(2, 300, 2, 64, generator=g, dtype=torch.float32, device="cpu")
    cache.append(table.append([0, 1], [300, 240]), key, key)
    cache.append(table.append([0, 1], [1, 1]), key[:, :1], key[:, :1])
    return cache


class FakeTensor:
    """Says that it is on a device; a guard looks at nothing else."""

    def __init__(self, device):
        self.pages = self
        self.device = torch.device(device)


def test_launches_are_made_on_the_device_of_the_tensors(monkeypatch):
    entered = []

    class Guard:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(str(self.device))

        def __exit__(self, *error):
            entered.append("back")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    seen = []
    function = device_guard(lambda codec, operand, more=0: seen.append((codec, more)))
    function("codec", FakeTensor("cuda:1"), more=2)
    assert entered == ["cuda:1", "back"] and seen == [("codec", 2)]
    function("codec", FakeTensor("cuda:0"))
    function("codec", FakeTensor("cpu"))
    assert entered == ["cuda:1", "back"] and len(seen) == 3


@pytest.mark.parametrize("module", ["cuda", "triton"])
def test_every_launching_function_is_guarded(module):
    pytest.importorskip("triton")
    backend = load(module)
    assert hasattr(backend.append, "__wrapped__") and hasattr(backend.attend, "__wrapped__")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none")
def test_a_cache_on_the_second_device():
    """The current device stays the first."""
    torch.cuda.set_device(0)
    for dtype in (torch.bfloat16, torch.float32):
        table = SequenceTable(CFG)
        table.add_rows([0, 0])
        cache = PagedKV(PageLayout(CFG, 2, 64, dtype), table, "cuda:1")
        key, value = (x.to("cuda:1", dtype) for x in tokens(2, 300))
        add(cache, key, value)
        q = torch.randn(2, 1, 4, 64, device="cuda:1", dtype=dtype)
        out, _ = attend(cache, q)
        cu_seqlens = torch.arange(3, dtype=torch.int32, device="cuda:1")
        expected, _ = reference.attend(
            cache.codec, q.flatten(0, 1), cache.view(), cu_seqlens, AttendOptions(max_queries=1)
        )
        torch.testing.assert_close(out.flatten(0, 1), expected, atol=2e-2, rtol=2e-2)
        assert torch.cuda.current_device() == 0
        with pytest.raises(ValueError, match="key is on cuda:0"):
            cache.append(table.append([0, 1], [300, 300]), key.to("cuda:0"), value.to("cuda:0"))
