"""The metric of a model's queries, and caches that code their keys in it."""

import copy
import threading
import warnings

import pytest
import torch
import transformers as hf
import transformers.modeling_utils as modeling

from models import FAMILIES, prompt, tiny
from tightkv import TightCache
from tightkv.integrations.transformers.query_probe import (
    FeedbackWarning,
    probe,
    probe_tokens,
    probed,
    spread_positions,
)


def filled(model, quant="k3v3", ids=None, chunks=None):
    cache = TightCache(quant, model=model)
    ids = prompt(count=300) if ids is None else ids
    with torch.no_grad():
        for part in ids.split(chunks or ids.shape[1], 1):
            model(part, past_key_values=cache)
    return cache


def test_metrics_are_those_of_the_queries():
    model = tiny("llama")
    seen = {}
    sdpa = modeling.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watch(module, query, key, *args, **kwargs):
        q = query[:, :, 4:].unflatten(1, (key.shape[1], -1)).double()
        seen[module.layer_idx] = torch.einsum("bhgtd,bhgte->hde", q, q) / q[:, 0, 0, :, 0].numel()
        return sdpa(module, query, key, *args, **kwargs)

    ids = prompt(rows=3, count=64)
    found = probe(model, ids).metrics
    modeling.ALL_ATTENTION_FUNCTIONS["sdpa"] = watch
    try:
        model.set_attn_implementation("sdpa")
        with torch.no_grad():
            model(ids, position_ids=spread_positions(model, ids))
    finally:
        modeling.ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa
    assert sorted(found) == sorted(seen) == [0, 1, 2, 3]
    for n, metric in found.items():
        torch.testing.assert_close(metric.value.double(), seen[n], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_compressed_layers_of_every_family_have_feedback(family):
    model = tiny(family)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FeedbackWarning)
        cache = filled(model)
    assert all(layer.kv.feedback is not None for layer in cache.tight_layers)


def test_parts_of_a_model_keep_the_attention_they_have():
    text = FAMILIES["llama"]()
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    config = hf.LlavaConfig(text_config=text, vision_config=vision)
    wanted = {"": "sdpa", "text_config": "tightkv", "vision_config": "eager"}
    model = hf.AutoModelForImageTextToText.from_config(config, attn_implementation=wanted).eval()
    cache = filled(model)
    assert probed(model).problem is None
    parts = {name: getattr(model.config, name) if name else model.config for name in wanted}
    assert {name: part._attn_implementation for name, part in parts.items()} == wanted
    assert all(layer.kv.feedback is not None for layer in cache.tight_layers)


def test_it_can_be_turned_off_and_eight_bits_need_none():
    model = tiny("llama")
    for quant in ({"preset": "k3v3", "feedback": "off"}, "k8v4"):
        assert all(layer.kv.feedback is None for layer in filled(model, quant).tight_layers)
    assert model not in probed._made  # nothing was run for nothing


def test_caches_and_copies_of_a_model_share_the_factors():
    model = tiny("llama")
    cache, other = filled(model), filled(model)
    copied = copy.deepcopy(cache)
    for mine, theirs, twin in zip(
        cache.tight_layers, other.tight_layers, copied.tight_layers, strict=True
    ):
        assert mine.kv.feedback is theirs.kv.feedback is twin.kv.feedback
        assert mine.kv.pages is not twin.kv.pages
    cache.reset()
    with torch.no_grad():
        model(prompt(count=300), past_key_values=cache)
    assert torch.equal(cache.layers[0].kv.pages, other.layers[0].kv.pages)


def test_codes_do_not_depend_on_chunks_or_neighbours():
    """As long as keys themselves do not: layer 0's come from the tokens alone."""
    model, ids = tiny("llama"), prompt(rows=2, count=300)
    whole = filled(model, ids=ids).layers[0].kv
    cut = filled(model, ids=ids, chunks=77).layers[0].kv
    alone = filled(model, ids=ids[:1]).layers[0].kv
    assert torch.equal(whole.dequantize()[0], cut.dequantize()[0])
    assert torch.equal(whole.dequantize()[0][:1], alone.dequantize()[0])


def test_the_model_is_left_as_it_was():
    model = tiny("llama").train()
    model.model.layers[1].eval()  # a part that is frozen
    modes = [module.training for module in model.modules()]
    model.set_attn_implementation("sdpa")
    probed(model)
    assert [module.training for module in model.modules()] == modes
    assert model.training and model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_cannot_be_run_is_told_once_and_has_plain_codes():
    model = tiny("llama")
    model.config.vocab_size = 10**6  # the probe's tokens do not exist
    with pytest.warns(FeedbackWarning, match='feedback="off"'):
        cache = TightCache("k3v3", model=model)
    assert all(layer.metric is None for layer in cache.tight_layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TightCache("k3v3", model=model)
    assert model.config._attn_implementation == "tightkv"


def test_rows_are_spread_over_the_positions_of_the_model():
    model, ids = tiny("llama"), prompt(rows=4, count=64)
    positions = spread_positions(model, ids)
    assert positions[:, 0].tolist() == [0, 320, 640, 960] and positions.max() == 1023
    assert spread_positions(model, prompt(rows=1, count=2000)).min() == 0


def test_the_tokens_are_always_the_same():
    model = tiny("llama")
    ids = probe_tokens(model)
    assert torch.equal(ids, probe_tokens(model)) and ids.max() < 97


def test_the_default_device_does_not_matter():
    model = tiny("llama")
    wanted = probe(model, probe_tokens(model)).metrics
    with torch.device("meta"):
        ids = probe_tokens(model)
        assert ids.device.type == spread_positions(model, ids).device.type == "cpu"
    assert torch.equal(probe(model, ids).metrics[0].value, wanted[0].value)


def test_the_default_device_does_not_matter_to_a_cache(tmp_path):
    """From the constructor to a loaded file, with a model and a seed that nothing is kept of."""
    model, ids, path = tiny("qwen2"), prompt(count=300), tmp_path / "cache.safetensors"
    quant = {"preset": "k3v3", "seed": 4711, "page_size": 32}

    def generate(cache):
        options = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        more = torch.cat([ids, ids[:, :5]], 1)
        return model.generate(more, past_key_values=cache, max_new_tokens=3, **options).logits

    with torch.device("meta"):
        cache = filled(model, quant, ids)
        cache.save(path)
        loaded = TightCache.load(path, model)
        found = [generate(x) for x in (cache, loaded)]
    wanted = generate(filled(tiny("qwen2"), quant, ids))
    for logits, other in zip((*found[0], *found[1]), 2 * wanted, strict=True):
        assert torch.equal(logits, other)


def test_two_threads_that_make_the_first_caches_get_all_metrics():
    """The pass of the second thread must not lose its layers when that of the first one ends."""
    model = tiny("llama")
    inside, events = [], [threading.Event(), threading.Event()]

    def wait(module, args):
        inside.append(threading.get_ident())
        if len(inside) == 2:
            events[0].set()
        events[inside.index(threading.get_ident())].wait(0.5)

    def make(done):
        TightCache("k4v4", model=model)
        done.set()

    hook = model.model.layers[1].register_forward_pre_hook(wait)
    threads = [threading.Thread(target=make, args=(events[1],)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hook.remove()
    assert len(inside) == 1 and sorted(probed(model).metrics) == [0, 1, 2, 3]
    assert model.config._attn_implementation == "tightkv"


def test_a_loaded_cache_goes_on_with_feedback(tmp_path):
    model, ids = tiny("llama"), prompt(count=400)
    filled(model, ids=ids[:, :300]).save(tmp_path / "cache.safetensors")
    loaded = TightCache.load(tmp_path / "cache.safetensors", model)
    whole = filled(model, ids=ids, chunks=300)
    with torch.no_grad():
        model(ids[:, 300:], past_key_values=loaded)
    for mine, theirs in zip(loaded.tight_layers, whole.tight_layers, strict=True):
        assert mine.kv.feedback is theirs.kv.feedback
        assert torch.equal(mine.kv.dequantize()[0], theirs.kv.dequantize()[0])


def test_metrics_made_under_inference_mode_serve_training():
    model = tiny("llama")
    with torch.inference_mode():
        TightCache("k3v3", model=model)
        filled(model)
    assert not any(m.value.is_inference() for m in probed(model).metrics.values())
    assert not filled(model).layers[0].kv.feedback.is_inference()
