"""A TightCache in a training loop and under autocast: the gradient of 16 bits, or an error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from models import prompt, tiny
from tightkv import TightCache

ATTENTION = ("tightkv", "sdpa", "eager")


def gradients(model, cache, ids):
    model.zero_grad()
    model(ids, past_key_values=cache).logits.square().mean().backward()
    return {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_first_step_has_the_gradient_of_a_dynamic_cache(attention):
    model, ids = tiny(), prompt(2, 90)
    model.set_attn_implementation(attention)
    expected = gradients(model, DynamicCache(config=model.config), ids)
    got = gradients(model, TightCache("k8v8", model=model), ids)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, msg=name)
    assert got["model.layers.0.self_attn.k_proj.weight"].any()


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("trained", ["", "k_proj", "v_proj"])
def test_later_steps_refuse_a_gradient(attention, trained):
    """Of a single projection, too: its gradient does not come by way of the queries."""
    model, ids = tiny(), prompt(1, 70)
    model.set_attn_implementation(attention)
    for name, x in model.named_parameters():
        x.requires_grad_(not trained or f"layers.3.self_attn.{trained}" in name)
    cache = TightCache("k8v8", model=model)
    model(ids[:, :60], past_key_values=cache)
    loss = model(ids[:, 60:], past_key_values=cache).logits.square().mean()
    with pytest.raises(RuntimeError, match=r"has no gradient; train without a cache"):
        loss.backward()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])  # a soft cap, sink logits
def test_dropout(family):
    model, ids = tiny(family).train(), prompt(1, 70)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.set_attn_implementation("tightkv")
    with torch.no_grad():
        one, two = (model(ids, use_cache=False).logits for _ in range(2))
        assert not torch.equal(one, two)
        cache = TightCache("k8v8", model=model)
        model(ids[:, :60], past_key_values=cache)
        with pytest.raises(ValueError, match=r"dropout of 0\.5 over a TightCache.*model\.eval\(\)"):
            model(ids[:, 60:], past_key_values=cache)


@pytest.mark.parametrize("attention", ATTENTION)
def test_autocast(attention):
    """Rotated keys are float32 there and values are not; pages are coded without it."""
    model, ids = tiny(), prompt(2, 400)
    model.set_attn_implementation(attention)
    cache, plain = TightCache("k8v8", model=model), DynamicCache(config=model.config)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for part in (ids[:, :390], ids[:, 390:391], ids[:, 391:]):
            got = model(part, past_key_values=cache).logits.float()
            expected = model(part, past_key_values=plain).logits.float()
    assert (got - expected).norm() < 0.02 * expected.norm()


def test_a_cache_that_has_seen_a_mask_is_pickled():
    model, ids = tiny(), prompt(1, 40)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    cache = TightCache("k8v8", model=model)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        again = pickle.loads(pickle.dumps(cache))
        one, two = (model(ids[:, :3], past_key_values=x).logits for x in (cache, again))
    assert torch.equal(one, two)


def test_wrapped_models_and_what_is_none():
    model = tiny()
    compiled: Any = torch.compile(model)
    for wrapped in (compiled, torch.nn.DataParallel(model), torch.nn.DataParallel(compiled)):
        assert TightCache("k4v4", model=wrapped).weights == TightCache("k4v4", model=model).weights
    no_models: list[Any] = ["folder", {}, torch.nn.Linear(2, 2)]
    for wrong in no_models:
        with pytest.raises(
            TypeError, match=rf"model is a {type(wrong).__name__}; TightCache takes"
        ):
            TightCache("k4v4", model=wrong)
