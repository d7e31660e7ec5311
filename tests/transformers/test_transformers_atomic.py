"""Operations on all layers happen in all of them or in none; reset leaves a cache as new."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from models import FAMILIES, prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.states import CompressedStates

QUANT = KVQuantConfig.preset("k4v4", page_size=32, sinks=2, exact_pages=1)


@torch.no_grad()
def feed(model, cache, ids, **inputs):
    return model(ids, past_key_values=cache, **inputs).logits


def content(cache):
    """Everything the cache holds, by value."""
    found = [[(row.left_pad, row.length, row.pages[:]) for row in cache.shared.table.rows]]
    for layer in cache.layers:
        if getattr(layer, "kv", None) is not None:
            found += [layer.length, *layer.kv.dequantize()]
        for value in vars(layer).values():
            for x in value.values() if isinstance(value, dict) else [value]:
                if isinstance(x, torch.Tensor):
                    found.append(x.clone())
        if hasattr(layer, "get_seq_length"):
            found.append(layer.get_seq_length())
    return found


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "falcon_h1", "lfm2", "llama"])
@pytest.mark.parametrize(
    "attempt",
    [
        lambda c: c.crop(-5),
        lambda c: c.crop(30),
        lambda c: c.reorder_cache(torch.tensor([0, 2])),
        lambda c: c.reorder_cache(torch.tensor([0, -1])),
        lambda c: c.batch_select_indices(torch.tensor([1, 7])),
        lambda c: c.batch_select_indices(torch.tensor([True])),
        lambda c: c.batch_repeat_interleave(0),
        lambda c: c.batch_repeat_interleave(-2),
    ],
)
def test_a_refused_operation_changes_no_layer(family, attempt):
    model = tiny(family)
    cache = TightCache(QUANT, model=model)
    feed(model, cache, prompt(2, 70))
    before = content(cache)
    try:
        attempt(cache)
    except (RuntimeError, ValueError, IndexError):
        assert same(before, content(cache))
    else:
        assert family == "llama", "only plain layers can be cropped without a recorded past"
        assert {layer.get_seq_length() for layer in cache.layers} in ({65}, {30})
    feed(model, cache, prompt(2, 3))


def test_a_crop_beyond_what_was_recorded_changes_no_layer():
    model = tiny("gemma3")
    cache = TightCache(QUANT, model=model)
    feed(model, cache, prompt(1, 60))
    cache.activate_past_recording()
    feed(model, cache, prompt(1, 4))
    before = content(cache)
    with pytest.raises(RuntimeError, match="has not recorded enough"):
        cache.crop(-9)
    assert same(before, content(cache))
    cache.crop(-3)
    assert {layer.get_seq_length() for layer in cache.layers} == {61}


def test_crop_by_more_than_there_is_empties_every_layer():
    model = tiny("gemma3", sliding_window=100)
    cache = TightCache(QUANT, model=model)
    expected = feed(model, cache, prompt(2, 70))
    cache.crop(-1000)
    assert {layer.get_seq_length() for layer in cache.layers} == {0}
    assert torch.equal(feed(model, cache, prompt(2, 70)), expected)


def test_crop_of_an_unused_cache_and_to_more_than_there_is():
    for family in FAMILIES:
        model = tiny(family)
        cache = TightCache(QUANT, model=model)
        cache.crop(-3)
        feed(model, cache, prompt(1, 40))
        before = content(cache)
        cache.crop(0)
        cache.crop(1000)
        assert same(before, content(cache))


def test_crop_of_a_cache_that_leaves_every_layer_alone():
    model = tiny()
    cache = TightCache({"key_bits": 16, "value_bits": 16}, model=model)
    feed(model, cache, prompt(2, 40))
    cache.crop(-7)
    assert {layer.get_seq_length() for layer in cache.layers} == {33}
    cache.crop(20)
    assert {layer.get_seq_length() for layer in cache.layers} == {20}


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_cache_without_rows_is_as_new(family):
    """Layers had the length of rows that were gone, and the next text began after it."""
    model, ids = tiny(family), prompt(3, 50, seed=2)
    mask = torch.ones_like(ids)
    mask[1, :20] = 0
    cache, new = (TightCache(QUANT, model=model) for _ in range(2))
    feed(model, cache, prompt(2, 40))
    cache.batch_select_indices(torch.tensor([False, False]))
    assert len(cache.shared.table) == cache.shared.table.used_pages == cache.get_seq_length() == 0
    for tokens in (50, 51):
        inputs = {"attention_mask": torch.nn.functional.pad(mask, (0, tokens - 50), value=1)}
        step = ids if tokens == 50 else ids[:, :1]
        assert torch.equal(feed(model, cache, step, **inputs), feed(model, new, step, **inputs))
    assert same(content(cache), content(new))


def interrupt(model, number, ids, cache, **inputs):
    """A forward pass that ends before layer `number`."""
    handle = model.model.layers[number].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            feed(model, cache, ids, **inputs)
    finally:
        handle.remove()


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_an_interrupted_pass_nothing_goes_on_unnoticed(family, number, tmp_path):
    model = tiny(family, **({"sliding_window": 200} if family == "gemma3" else {}))
    cache, ids = TightCache(QUANT, model=model), prompt(2, 90)
    feed(model, cache, ids[:, :80])
    interrupt(model, number, ids[:, 80:85], cache)
    attempts = [
        lambda: feed(model, cache, ids[:, 80:85]),
        lambda: cache.reorder_cache(torch.tensor([1, 0])),
        lambda: cache.save(tmp_path / "cache"),
        lambda: cache.crop(83),
    ]
    if family == "gemma3" and number == 1:  # no compressed layer has seen the tokens
        attempts = attempts[:1]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="have seen different tokens"):
            attempt()
    cache.crop(80)
    assert {layer.get_seq_length() for layer in cache.layers} == {80}
    fresh = TightCache(QUANT, model=model)
    feed(model, fresh, ids[:, :80])
    assert torch.equal(feed(model, cache, ids[:, 80:]), feed(model, fresh, ids[:, 80:]))


def test_an_interrupted_first_pass_can_be_cropped_to_nothing_alone():
    model, cache, ids = tiny(), TightCache(QUANT, model=tiny()), prompt(2, 80)
    interrupt(model, 2, ids, cache)
    cache.crop(40)  # layers 2 and 3 hold nothing of it
    with pytest.raises(RuntimeError, match="have seen different tokens"):
        feed(model, cache, ids[:, 40:])
    cache.crop(-80)
    fresh = TightCache(QUANT, model=model)
    assert torch.equal(feed(model, cache, ids), feed(model, fresh, ids))
    cache.reorder_cache(torch.tensor([1, 0]))


def test_tokens_that_no_attention_has_read_are_kept():
    """A layer whose states are not read in a pass writes them before the next pass begins."""
    read, unread = TightCache(QUANT), TightCache(QUANT)
    for count in (40, 1, 7, 50):
        states = [torch.randn(2, 1, count, 32) for _ in range(3)]
        for cache in (read, unread):
            for i, x in enumerate(states):
                key, _ = cache.update(x, x, i)
                if cache is read or i != 1:
                    assert isinstance(key, CompressedStates)
                    key.step.layer.commit()
    assert unread.layers[1].get_seq_length() == 98
    assert read.bytes_used() == unread.bytes_used()
    assert same(content(read), content(unread))


def test_a_pass_after_an_interrupted_one_is_refused_before_it_changes_anything():
    model, ids = tiny(), prompt(2, 90)
    cache = TightCache(QUANT, model=model)
    feed(model, cache, ids[:, :80])
    interrupt(model, 2, ids[:, 80:85], cache)
    before = content(cache)
    with pytest.raises(RuntimeError, match="have seen different tokens"):
        feed(model, cache, ids[:, 85:])
    assert same(before, content(cache))


@pytest.mark.parametrize("bad", ["rows", "dtype"])
def test_a_wrong_batch_reaches_no_layer(bad):
    model = tiny("gemma3")
    cache = TightCache(QUANT, model=model)
    feed(model, cache, prompt(2, 40))
    before = content(cache)
    with pytest.raises(ValueError, match=r"this cache holds 2 of torch\.float32"):
        if bad == "rows":
            feed(model, cache, prompt(1, 3))
        else:
            feed(model.to(torch.bfloat16), cache, prompt(2, 3))
    assert same(before, content(cache))


def held_bytes(cache):
    tensors = {}
    for layer in cache.layers:
        for part in (layer, getattr(layer, "kv", None)):
            for value in vars(part).values() if part is not None else ():
                for x in value.values() if isinstance(value, dict) else [value]:
                    if isinstance(x, torch.Tensor):
                        tensors[id(x)] = x.numel() * x.element_size()
    return sum(tensors.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_reset_a_cache_is_as_new(family):
    model = tiny(family)
    used, fresh = TightCache(QUANT, model=model), TightCache(QUANT, model=model)
    unused = held_bytes(fresh)
    feed(model, used, prompt(3, 400))
    used.reset()
    assert held_bytes(used) == unused
    # Another batch size too.
    assert torch.equal(feed(model, used, prompt(1, 10)), feed(model, fresh, prompt(1, 10)))
    assert held_bytes(used) == held_bytes(fresh)
    assert used.bytes_used() == fresh.bytes_used()
    assert used.shared.table.num_pages == fresh.shared.table.num_pages


def test_a_long_interrupted_chunk_leaves_every_layer_readable():
    """The first layers have sealed a page and lost its exact copies; the others never saw it."""
    model, ids = tiny(), prompt(2, 300)
    quant = QUANT.replace(key_bits=8, value_bits=8)
    cache, fresh = TightCache(quant, model=model), TightCache(quant, model=model)
    for each in (cache, fresh):
        feed(model, each, ids[:, :50])
    interrupt(model, 2, ids[:, 50:250], cache)
    cache.crop(50)
    for a, b in zip(cache.tight_layers, fresh.tight_layers, strict=True):
        for got, exact in zip(a.kv.dequantize(), b.kv.dequantize(), strict=True):
            assert float((got - exact).square().sum() / exact.square().sum()) < 1e-3
    more = ids[:, 50:120]
    torch.testing.assert_close(
        feed(model, cache, more), feed(model, fresh, more), atol=0.05, rtol=0.05
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.crop(-5),
        # from transformers 5.20 on, crop to a length is TightCache's own
        lambda cache: cache.crop(30 if isinstance(cache, TightCache) else -10),
        lambda cache: cache.reset(),
    ],
    ids=["reorder", "select", "repeat", "crop", "crop_to", "reset"],
)
def test_a_cache_that_compresses_nothing_does_what_transformers_does(family, change):
    """With 16 bits every layer stays transformers' own, and there is no table of sequences."""
    model = tiny(family)
    answers: list[Any] = []
    for cache in (
        TightCache(KVQuantConfig(key_bits=16, value_bits=16), model=model),
        DynamicCache(config=model.config),
    ):
        feed(model, cache, prompt(2, 40))
        try:
            change(cache)
        except RuntimeError as error:  # crop of a sliding window
            answers.append(str(error)[:40])
            continue
        rows = len(cache.layers[0].keys) if cache.get_seq_length() else 2
        answers.append(feed(model, cache, prompt(rows, 1, seed=5)))
    assert type(answers[0]) is type(answers[1])
    if isinstance(answers[0], torch.Tensor):
        torch.testing.assert_close(answers[0], answers[1])
    else:
        assert answers[0] == answers[1]
