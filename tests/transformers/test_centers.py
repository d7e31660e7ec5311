"""Centers: tokens held relative to a key and a value, which no answer depends on."""

import copy

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.math.centers import Centers
from tightkv.tools.eval.layer_bits.sensitivity import Moments

FAR = 3.0  # how far centers are from the keys and values of tiny models, which are below 1


def centers_of(model, size=FAR):
    config, g = model.config, torch.Generator().manual_seed(3)
    shape = (config.num_key_value_heads, config.head_dim)
    return {
        n: Centers(*(size * torch.randn(shape, generator=g) for _ in range(2)))
        for n in range(config.num_hidden_layers)
    }


def use_centers(cache, centers):
    for number, layer in enumerate(cache.layers):
        layer.centers = centers.get(number)


def cache_of(model, preset="k8v8", centers=True, **options):
    cache = TightCache(KVQuantConfig.parse(preset), model=model, **options)
    if centers:
        use_centers(cache, centers_of(model))
    return cache


def logits(model, cache, ids, chunks=(30, 90, 1, 40, 1, 1)):
    found, at = [], 0
    with torch.no_grad():
        for count in chunks:
            found.append(model(ids[:, at : at + count], past_key_values=cache).logits)
            at += count
    return torch.cat(found, 1)


@pytest.mark.parametrize("implementation", ["tightkv", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_tokens_do_not_see_them(implementation, dtype):
    model, ids = tiny(dtype=dtype, attn_implementation=implementation), prompt(2, 163)
    exact = {"preset": "k8v8", "window_bits": 16}
    caches = (cache_of(model, exact, centers=own) for own in (False, True))
    plain, moved = (logits(model, cache, ids).float() for cache in caches)
    noise = 2e-3 if dtype == torch.float32 else 0.05  # rings have 16 bits, and numbers up to FAR
    assert (plain - moved).abs().max() < noise * plain.abs().max()


def test_codes_give_the_same_answers():
    model, ids = tiny(), prompt(1, 600)
    chunks = (300, *[20] * 15)
    with torch.no_grad():
        right = model(ids).logits
    moved = logits(model, cache_of(model), ids, chunks)
    without = logits(model, cache_of(model, centers=False), ids, chunks)
    assert (moved - right).abs().max() < 20 * (without - right).abs().max()  # codes of FAR numbers
    assert (moved - right).abs().max() < 0.05 * right.abs().max()


def test_good_centers_make_errors_smaller():
    """Keys and values around a common vector: relative to it only their rest is coded."""
    model = tiny(num_hidden_layers=1, attention_bias=True)
    attention, config = model.model.layers[0].self_attn, model.config
    middle = torch.randn(config.num_key_value_heads, config.head_dim) * 4
    with torch.no_grad():
        attention.v_proj.bias.copy_(middle.flatten())
    ids = prompt(1, 500)
    with torch.no_grad():
        right = model(ids).logits
    errors = {}
    for size in (0, 1):
        cache = TightCache("k2v2", model=model)
        use_centers(cache, {0: Centers(torch.zeros_like(middle), size * middle)})
        errors[size] = (logits(model, cache, ids, (200, *[20] * 15)) - right).square().mean()
    assert errors[1] < errors[0] / 10


def test_files_and_copies_keep_them(tmp_path):
    model, ids = tiny(), prompt(2, 300)
    cache = cache_of(model, "k4v4")
    logits(model, cache, ids, (250,))
    cache.save(tmp_path / "cache.safetensors")
    loaded = TightCache.load(tmp_path / "cache.safetensors", model=model)
    assert torch.equal(loaded.layers[1].centers.value, cache.layers[1].centers.value)
    rest, copied = ids[:, 250:], copy.deepcopy(cache)
    expected = logits(model, cache, rest, (50,))
    assert torch.equal(logits(model, copied, rest, (50,)), expected)
    assert torch.allclose(logits(model, loaded, rest, (50,)), expected, atol=1e-3)


def test_beams_crops_and_resets_keep_them():
    model, ids = tiny(), prompt(2, 300)
    cache = cache_of(model, "k4v4")
    logits(model, cache, ids, (250,))
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(240)
    after = logits(model, cache, ids[[1, 1], 240:], (60,))
    fresh = cache_of(model, "k4v4")
    logits(model, fresh, ids[[1, 1]], (250,))
    fresh.crop(240)
    assert torch.allclose(after, logits(model, fresh, ids[[1, 1], 240:], (60,)), atol=1e-5)
    cache.reset()
    assert cache.layers[0].centers is not None
    again = logits(model, cache, ids, (300,))
    assert torch.allclose(again, logits(model, cache_of(model), ids, (300,)), atol=1e-5)


def test_soft_caps_and_sink_logits_refuse_them():
    model = tiny("gemma2")
    cache = TightCache("k8v8", model=model)
    shape = model.config.num_key_value_heads, model.config.head_dim
    for layer in cache.layers:
        if isinstance(layer, TightLayer):
            layer.centers = Centers(torch.ones(shape), torch.ones(shape))
    with pytest.raises(ValueError, match="soft cap or a sink logit"):
        model(prompt(1, 20), past_key_values=cache)


def test_centers_of_other_shapes_are_refused():
    model = tiny()
    cache = TightCache("k4v4", model=model)
    use_centers(cache, {0: Centers(torch.zeros(1, 8), torch.zeros(1, 8))})
    with pytest.raises(ValueError, match="another model"):
        model(prompt(1, 20), past_key_values=cache)
    with pytest.raises(ValueError, match="NaN or Inf"):
        Centers(torch.zeros(1, 8), torch.full((1, 8), torch.nan))
    with pytest.raises(ValueError, match="shape"):
        Centers(torch.zeros(1, 8), torch.zeros(2, 8))


def test_means_of_nothing_are_zero():
    none = Moments(torch.zeros(2, 4, 4), torch.zeros(2, 1), torch.zeros(2, 4), torch.zeros(2, 4))
    assert not none.centers().key.any()
    one = Moments(torch.zeros(2, 4, 4), torch.ones(2, 1), torch.ones(2, 4), 3 * torch.ones(2, 4))
    assert torch.equal((one + one).centers().value, 3 * torch.ones(2, 4))
