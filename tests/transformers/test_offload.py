"""Pages in host memory: right answers, few copies, and no device memory for idle layers."""

from copy import deepcopy

import pytest
import torch

from helpers import make_cache
from models import FAMILIES, prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.states import CompressedStates
from tightkv.paged.offload import DeviceBuffers, OffloadedPages

QUANT = KVQuantConfig.preset("k3v2", page_size=32, sinks=2, exact_pages=1)


@torch.no_grad()
def greedy(model, cache, ids, count=20, chunk=None):
    out, step = [], ids
    for part in ids.split(chunk or ids.shape[1], 1)[:-1]:
        model(part, past_key_values=cache)
        step = step[:, part.shape[1] :]
    for _ in range(count):
        logits = model(step, past_key_values=cache).logits[:, -1:]
        step = logits.argmax(-1)
        out.append(logits)
    return torch.cat(out, 1)


def buffers_in_use(cache):
    return [layer.kv._offloaded._buffer is not None for layer in cache.tight_layers]


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", ["tightkv", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits_as_a_plain_cache(family, implementation):
    model, ids = tiny(family), prompt(2, 150)
    model.set_attn_implementation(implementation)
    plain = greedy(model, TightCache(QUANT, model=model), ids, chunk=60)
    cache = TightCache(QUANT, model=model, offloading=True)
    assert torch.equal(greedy(model, cache, ids, chunk=60), plain)


def test_only_the_next_layer_is_on_the_device_between_passes():
    model = tiny()
    cache = TightCache(QUANT, model=model, offloading=True)
    greedy(model, cache, prompt(2, 150), 3)
    assert buffers_in_use(cache) == [True, False, False, False]
    held = cache.shared.buffers
    assert len(held._free) + 1 <= 2, "two buffers serve all layers"


def test_at_most_two_layers_have_device_memory_at_any_time(monkeypatch):
    model, most = tiny(), []
    cache = TightCache(QUANT, model=model, offloading=True)
    real = DeviceBuffers.take

    def take(self, size, device):
        buffer = real(self, size, device)
        most.append(1 + sum(buffers_in_use(cache)) + len(self._free))
        return buffer

    greedy(model, cache, prompt(2, 150), 2)
    monkeypatch.setattr(DeviceBuffers, "take", take)
    greedy(model, cache, prompt(2, 1), 100)
    assert most and max(most) <= 2 + 1, "a pool that grows needs both sizes for a moment"


def test_saving_brings_one_layer_at_a_time_to_the_device(monkeypatch, tmp_path):
    model, others = tiny(), []
    cache = TightCache(QUANT, model=model, offloading=True)
    greedy(model, cache, prompt(2, 150), 2)
    real = DeviceBuffers.take

    def take(self, size, device):
        others.append(sum(buffers_in_use(cache)))
        return real(self, size, device)

    monkeypatch.setattr(DeviceBuffers, "take", take)
    cache.save(tmp_path / "cache")
    assert others == [0, 0, 0], "the first layer is there already"
    assert not any(buffers_in_use(cache))


def test_copies_to_the_host_are_of_written_pages_alone(monkeypatch):
    model, written, fetched = tiny(), [], []
    cache = TightCache(QUANT, model=model, offloading=True)
    greedy(model, cache, prompt(2, 150), 2)
    release, fetch = OffloadedPages.release, OffloadedPages.fetch
    monkeypatch.setattr(
        OffloadedPages, "release", lambda self: written.append(len(self._dirty)) or release(self)
    )
    monkeypatch.setattr(
        OffloadedPages,
        "fetch",
        lambda self: fetched.append(int(self._buffer is None)) or fetch(self),
    )
    greedy(model, cache, prompt(2, 1), 20)  # 151 tokens and 20 more: one page is sealed, at 160
    assert sum(written) == 4 * 2, "a page of each row and layer"
    assert sum(fetched) == 4 * 20, "each layer is fetched once a pass"


def test_a_layer_is_read_before_it_leaves():
    """transformers offloads in `update`, before attention; here it is after it."""
    model = tiny()
    cache = TightCache(QUANT, model=model, offloading=True)
    greedy(model, cache, prompt(1, 100), 1)
    key = torch.randn(1, 2, 1, 32)
    states, _ = cache.update(key, key, 0)
    assert buffers_in_use(cache)[0]
    assert torch.isfinite(states + 0).all() and not buffers_in_use(cache)[0]


def test_batches_files_copies_and_reset(tmp_path):
    model, ids = tiny(), prompt(3, 100)
    caches = [TightCache(QUANT, model=model, offloading=x) for x in (False, True)]
    for cache in caches:
        greedy(model, cache, ids, 3)
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        cache.crop(-20)
    plain, away = caches
    more = prompt(3, 30, seed=2)
    expected = greedy(model, deepcopy(plain), more, 40)
    assert torch.equal(greedy(model, deepcopy(away), more, 40), expected)
    away.save(tmp_path / "away")
    assert not any(buffers_in_use(away))
    for offloading, count in ((False, 40), (True, 3)):
        loaded = TightCache.load(tmp_path / "away", model=model, offloading=offloading)
        held = sum(layer.kv._pages.numel() for layer in loaded.tight_layers)
        assert loaded.offloading == offloading and (held == 0) == offloading
        assert torch.equal(greedy(model, loaded, more, count), expected[:, :count])
    copy = deepcopy(away)
    assert torch.equal(greedy(model, away, more, 40), expected), "the copy is another's"
    assert copy.shared.buffers is not away.shared.buffers
    away.reset()
    assert not away.shared.buffers._free
    fresh = TightCache(QUANT, model=model)
    assert torch.equal(greedy(model, away, ids, 3), greedy(model, fresh, ids, 3))


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_filled_under_inference_mode_and_used_outside(kernels, offloading, tmp_path):
    model, ids, more = tiny(num_hidden_layers=2), prompt(2, 150), prompt(2, 70, seed=2)
    options = {"model": model, "kernels": kernels, "offloading": offloading}

    def fill():
        cache = TightCache(QUANT, **options)
        greedy(model, cache, ids, 1)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.save(tmp_path / "cache.safetensors")
        return cache, deepcopy(cache), TightCache.load(tmp_path / "cache.safetensors", **options)

    with torch.inference_mode():
        caches = fill()
    wanted = greedy(model, fill()[0], more, 2, chunk=30)
    for cache in caches:
        assert torch.equal(greedy(model, cache, more, 2, chunk=30), wanted)
        stored = [layer.kv for layer in cache.tight_layers]
        assert not any(x.is_inference() for kv in stored for x in (kv.ring_key, kv.pages))


def test_bytes_used_count_the_pages_once():
    model = tiny()
    plain, away = (TightCache(QUANT, model=model, offloading=x) for x in (False, True))
    for cache in (plain, away):
        greedy(model, cache, prompt(2, 150), 1)
    assert away.bytes_used() == plain.bytes_used()


def test_an_interrupted_pass_leaves_pages_right():
    model, ids = tiny(), prompt(1, 100)
    cache, fresh = (TightCache(QUANT, model=model, offloading=x) for x in (True, False))
    for each in (cache, fresh):
        greedy(model, each, ids, 1)
    handle = model.model.layers[2].mlp.register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        greedy(model, cache, ids[:, :30], 1)  # what a ring has beside its window
    handle.remove()
    cache.crop(100)
    assert torch.equal(greedy(model, cache, ids, 9), greedy(model, fresh, ids, 9))


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_of_pages_comes_and_goes_unchanged(seed):
    layout = make_cache(QUANT).layout
    g = torch.Generator().manual_seed(seed)
    pool = OffloadedPages(layout, torch.device("cpu"), DeviceBuffers())
    mirror = layout.new_pages(0)
    for _ in range(30):
        if torch.rand((), generator=g) < 0.3:
            grown = layout.new_pages(len(mirror) + int(torch.randint(1, 9, (), generator=g)))
            grown[: len(mirror)] = mirror
            mirror = grown
            pool.grow(len(grown))
        if len(mirror):
            some = torch.randperm(len(mirror), generator=g)[
                : int(torch.randint(1, 6, (), generator=g))
            ]
            data = torch.randint(0, 256, mirror[some].shape, generator=g, dtype=torch.uint8)
            mirror[some] = data
            pool.tensor()[some] = data
            pool.mark(some.tolist())
        if torch.rand((), generator=g) < 0.5:
            pool.release()
            pool.buffers.give(torch.full((10**6,), 255, dtype=torch.uint8))  # another layer's
        assert torch.equal(pool.tensor(), mirror)


# --- on a GPU ---


@pytest.mark.gpu
def test_gpu_the_same_text_in_less_device_memory():
    """Long runs ahead of the device: nothing waits for it, and every answer must be the same."""
    model = tiny(dtype=torch.bfloat16, head_dim=64).cuda()
    ids = prompt(4, 900).cuda()
    plain = TightCache("k4v4", model=model)
    away = TightCache("k4v4", model=model, offloading=True)
    expected, got = (greedy(model, cache, ids, 90, chunk=400) for cache in (plain, away))
    assert torch.equal(got, expected)
    for a, b in zip(plain.tight_layers, away.tight_layers, strict=True):
        assert torch.equal(a.kv.pages[: a.kv.table.num_pages], b.kv.pages[: a.kv.table.num_pages])
    copy = deepcopy(away)
    more = prompt(4, 40, seed=3).cuda()
    expected = greedy(model, plain, more, 40)
    for cache in (away, copy):
        assert torch.equal(greedy(model, cache, more, 40), expected)


@pytest.mark.gpu
def test_gpu_idle_layers_hold_no_device_memory():
    """16 layers of 8 MiB of pages: a plain cache holds all, an offloaded one those of two."""
    cfg = KVQuantConfig.preset("k4v4")
    layers = {}
    for offloading in (False, True):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        cache = TightCache(cfg, offloading=offloading)
        for step in (16384, 1, 1):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            for i in range(16):
                key, value = (
                    torch.randn(1, 8, step, 64, device="cuda", dtype=torch.bfloat16) for _ in "kv"
                )
                states, _ = cache.update(key, value, i)
                assert isinstance(states, CompressedStates)
                layer = states.step.layer
                query = key[:, :, -1:].repeat(1, 4, 1, 1).transpose(1, 2)
                if step == 1:
                    layer.attend(states.step, query, causal=True, mask=None)
                else:
                    layer.commit()
                del key, value, states
        torch.cuda.synchronize()
        pages = cache.layers[0].kv.layout.page_bytes * cache.shared.table.num_pages
        layers[offloading] = (torch.cuda.memory_allocated() - before) / pages
        if offloading:  # while decoding
            assert (torch.cuda.max_memory_allocated() - before) / pages < 6
        del cache, layer
    assert layers[False] >= 16
    assert layers[True] < layers[False] - 12


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(3))
def test_gpu_copies_wait_for_what_they_copy(seed):
    """Layers take turns with two buffers while the device is far behind the host."""
    layout = make_cache(QUANT, dim=128, heads=8).layout
    device, buffers = torch.device("cuda", 0), DeviceBuffers()
    pools = [OffloadedPages(layout, device, buffers) for _ in range(6)]
    count = 2048
    mirrors = []
    for number, pool in enumerate(pools):
        pool.grow(count)
        pool.tensor().fill_(number + 1)
        pool.mark(range(count))
        pool.release()
        mirrors.append(torch.full_like(layout.new_pages(count, device), number + 1))
    sums, expected = [], []
    g = torch.Generator().manual_seed(seed)
    for turn in range(40):
        number = turn % len(pools)
        pools[(number + 1) % len(pools)].fetch()
        torch.cuda._sleep(2_000_000)  # the device is late
        pages = pools[number].tensor()
        some = torch.randperm(count, generator=g)[:50]
        pages[some.to(device)] += 1
        mirrors[number][some.to(device)] += 1
        sums.append(pages.float().sum())
        expected.append(mirrors[number].float().sum())
        pools[number].mark(some.tolist())
        pools[number].release()
    assert torch.equal(torch.stack(sums), torch.stack(expected))
    for pool, mirror in zip(pools, mirrors, strict=True):
        assert torch.equal(pool.tensor(), mirror)
