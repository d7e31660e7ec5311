import copy
import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.model_shape import read_model_shape
from tightkv.model_shape.planner import config_plan


def test_a_long_prefill_and_decode_hold_what_the_plan_says():
    """32k tokens at once, then decoding past several pages: within 5% of `tightkv plan`."""
    model = tiny(num_hidden_layers=2, dtype=torch.bfloat16, max_position_embeddings=40_000)
    quant = KVQuantConfig.preset("k4v4")
    cache = TightCache(quant, model=model)
    layer, tokens = cache.tight_layers[0], 32_768
    key = torch.randn(1, 2, tokens, 32, dtype=torch.bfloat16)
    for tight in cache.tight_layers:  # the cache alone: what the model would hand it
        tight.update(key, key)
        tight.commit()
    with torch.no_grad():
        for _ in range(3):
            for tight in cache.tight_layers:
                tight.update(key[:, :, :200], key[:, :, :200])
                tight.commit()
        model(prompt(1, 4), past_key_values=cache)
    shape = read_model_shape(model.config)
    planned = config_plan("k4v4", shape, quant).total_bytes(layer.length)
    held = cache.bytes_used()["compressed"]
    assert layer.length == tokens + 604
    assert abs(held - planned) / planned < 0.05, (held, planned)


@pytest.mark.parametrize("known", [True, False])
def test_a_dropped_cache_is_freed_at_once(known, tmp_path):
    """Without a garbage collection, which memory of a GPU does not cause."""
    model, path = tiny(), tmp_path / "cache.safetensors"
    options = {"model": model} if known else {}
    gc.disable()
    try:
        cache = TightCache("k4v4", **options)
        with torch.no_grad():
            model(prompt(1, 300), past_key_values=cache)
        cache.save(path)
        caches = [cache, TightCache.load(path, **options), copy.deepcopy(cache)]
        held = [weakref.ref(x) for x in (*caches, *(x.layers[0].kv.pages for x in caches))]
        assert all(x() is not None for x in held)
        del cache, caches
        assert not any(x() is not None for x in held)
    finally:
        gc.enable()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "quant",
    [
        KVQuantConfig.preset("k2v2"),
        KVQuantConfig.preset("k4v4"),
        KVQuantConfig.preset("k8v8"),
        KVQuantConfig.preset("k3v2", layer_bits="1=k8v8", page_size=32),
    ],
    ids=["k2v2", "k4v4", "k8v8", "k3v2 and k8v8"],
)
def test_no_length_takes_more_than_bf16(quant, rows, dtype):
    """Token by token, from a few (sinks are kept beside the ring) to several pages."""
    cache, layers, heads, dim = TightCache(quant), 2, 1, 64
    new = torch.randn(rows, heads, 1, dim).to(dtype)
    for tokens in range(1, 1201):
        for i in range(layers):
            cache.update(new, new, i)
        bf16 = layers * rows * tokens * heads * dim * 4
        assert tokens < 16 or cache.bytes_used()["compressed"] < bf16, tokens


@pytest.mark.parametrize(
    "quant",
    [
        KVQuantConfig.preset("k4v4"),
        KVQuantConfig.preset("k4v4", window_bits=16),
        KVQuantConfig.preset("k8v8", exact_pages=1),
        KVQuantConfig.preset("k8v8", exact_pages=1, sinks=0),
        KVQuantConfig(key_bits=16, value_bits=8),
    ],
    ids=["8 bits", "16 bits", "one page", "no sinks", "keys exact"],
)
def test_from_break_even_on_every_length_takes_less(quant):
    """A length that seals a page may take more than bf16 again after shorter ones took less."""
    cache, new = TightCache(quant), torch.randn(1, 2, 1, 64)
    cache.update(new, new, 0)
    layer = cache.layers[0]
    even = cache_size([layer]).break_even
    layout = layer.kv.layout
    more = [
        tokens
        for tokens in range(1, 2000)
        if layout.total_bytes(tokens, encode_partial_page=False) >= tokens * 2 * 2 * 64 * 2
    ]
    assert even == max(more, default=0) + 1


@pytest.mark.parametrize("tokens", [1, 256, 1024, 4096])
@pytest.mark.parametrize("options", [{}, {"protected_first": 1}])
@pytest.mark.parametrize("preset", ["k2v2", "k4v4", "k8v8"])
def test_the_plan_says_what_is_allocated(preset, options, tokens):
    model = tiny(num_hidden_layers=3)
    quant = KVQuantConfig.preset(preset, **options)
    cache = TightCache(quant, model=model)
    new = torch.randn(2, 2, tokens, 32)
    for i in range(3):
        cache.update(new, new, i)
    plan = config_plan(preset, read_model_shape(model.config), quant)
    assert cache.bytes_used()["compressed"] == plan.total_bytes(tokens, sequences=2)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_the_peak_on_a_gpu_is_what_the_plan_says(preset):
    """Weights and cache, as the allocator of a process of their own sees them."""
    command = [sys.executable, Path(__file__).parents[1] / "support" / "gpu_peak.py", preset]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    peak, left, plan, layer = json.loads(run.stdout.splitlines()[-1])
    assert abs(left - plan) / plan < 0.05, (left, plan)
    # The pool of one layer is there twice while it grows.
    assert peak < 1.05 * plan + layer, (peak, plan, layer)
