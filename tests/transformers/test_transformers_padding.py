"""Left padding: chunks that are padding alone, masks that kernels need not see, hostile masks."""

from copy import deepcopy

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers import layer as layer_module
from tightkv.integrations.transformers import steps

QUANT = KVQuantConfig.preset("k3v2", page_size=32, sinks=2, exact_pages=1)
PADS = (0, 40, 131)


def padding_mask(pads, length):
    return (torch.arange(length) >= torch.tensor(pads)[:, None]).long()


@torch.no_grad()
def feed(model, cache, ids, mask, cuts=()):
    """Logits of ids through a cache, in chunks; each chunk gets its part of a mask [B, tokens]."""
    past, out, at = cache.get_seq_length(), [], 0
    for cut in [*cuts, ids.shape[1]]:
        part = None if mask is None else mask[:, : past + cut]
        positions = (
            None if mask is None else (part.cumsum(1) - 1).clamp_min(0)[:, past + at : past + cut]
        )
        out.append(
            model(
                ids[:, at:cut], past_key_values=cache, attention_mask=part, position_ids=positions
            ).logits
        )
        at = cut
    return torch.cat(out, 1)


@pytest.fixture
def attended(monkeypatch):
    """What `attend` is called with: whether it got a mask, and the causal flag."""
    calls, real = [], layer_module.attend

    def attend(cache, query, **options):
        calls.append((options["mask"] is not None, options["causal"]))
        return real(cache, query, **options)

    monkeypatch.setattr(layer_module, "attend", attend)
    return calls


@pytest.mark.parametrize(
    "cuts", [[64], [32, 64, 96, 128], [10, 140], [150], list(range(5, 170, 7))]
)
def test_chunks_of_padding_alone_give_the_sinks_and_starts_of_one_prefill(cuts):
    model, ids, mask = tiny(), prompt(3, 170), padding_mask(PADS, 170)
    whole, chunked = TightCache(QUANT, model=model), TightCache(QUANT, model=model)
    feed(model, whole, ids, mask)
    feed(model, chunked, ids, mask, cuts)
    rows, expected = chunked.shared.table.rows, whole.shared.table.rows
    assert [row.left_pad for row in expected] == list(PADS)
    assert [(row.left_pad, row.sink_count) for row in rows] == [(pad, 2) for pad in PADS]
    # The first layer sees the same keys either way, so its tokens are the same bytes.
    ours, theirs = chunked.layers[0].kv, whole.layers[0].kv
    torch.testing.assert_close(ours.sink_key, theirs.sink_key)
    for row in range(3):
        for table in (whole.shared.table, chunked.shared.table):
            table.crop(row, 170)  # the window of the newest token
    for a, b in zip(ours.dequantize(), theirs.dequantize(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_a_cache_cropped_to_nothing_takes_another_padding():
    model, cache = tiny(), TightCache(QUANT, model=tiny())
    feed(model, cache, prompt(2, 100), padding_mask((0, 60), 100))
    cache.crop(-100)
    ids, mask = prompt(2, 100, seed=5), padding_mask((30, 0), 100)
    feed(model, cache, ids[:, :99], mask[:, :99])
    fresh = TightCache(QUANT, model=model)
    feed(model, fresh, ids[:, :99], mask[:, :99])
    assert [row.left_pad for row in cache.shared.table.rows] == [30, 0]
    last = ids[:, 99:], mask
    assert torch.equal(feed(model, cache, *last), feed(model, fresh, *last))


def test_crop_into_the_padding_forgets_where_it_ended():
    model, cache = tiny(), TightCache(QUANT, model=tiny())
    feed(model, cache, prompt(2, 100), padding_mask((0, 60), 100))
    cache.crop(-70)
    more = prompt(2, 70, seed=5)
    feed(model, cache, more, padding_mask((0, 35), 100))
    assert [row.left_pad for row in cache.shared.table.rows] == [0, 35]
    feed(model, cache, prompt(2, 1), padding_mask((0, 35), 101))


@pytest.mark.parametrize("count", [1, 5, 40])
def test_kernels_get_no_mask_for_padding_they_know(attended, count):
    model, ids, pads = tiny(), prompt(3, 150), (0, 40, 111)
    cache = TightCache(QUANT, model=model)
    feed(model, cache, ids, padding_mask(pads, 150))
    other = deepcopy(cache)
    more, mask = prompt(3, count, seed=4), padding_mask(pads, 150 + count)
    got = feed(model, cache, more, mask)
    assert attended == [(False, True)] * 4
    attended.clear()
    causal = torch.ones(count, 150 + count, dtype=torch.bool).tril(150)
    full = mask[:, None, None].bool() & causal  # the same as a mask of the caller's own
    positions = (mask.cumsum(1) - 1)[:, 150:]
    with torch.no_grad():
        expected = model(
            more, past_key_values=other, attention_mask=full, position_ids=positions
        ).logits
    assert attended == [(True, False)] * 4
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


def test_generate_never_needs_the_mask_after_the_prompt(attended):
    model, ids, mask = tiny(), prompt(2, 90), padding_mask((0, 33), 90)
    cache = TightCache(QUANT, model=model)
    model.generate(
        ids, past_key_values=cache, attention_mask=mask, max_new_tokens=6, pad_token_id=0
    )
    assert attended == [(False, True)] * 4 * 5


def exact_model_logits(model, ids, masks, splits):
    """The same passes through transformers' own cache and attention."""
    from transformers import DynamicCache

    model.set_attn_implementation("sdpa")
    cache, at, out = DynamicCache(config=model.config), 0, None
    for mask, end in zip(masks, splits, strict=True):
        with torch.no_grad():
            positions = torch.arange(at, end).expand(ids.shape[0], -1)
            out = model(
                ids[:, at:end], past_key_values=cache, attention_mask=mask, position_ids=positions
            ).logits
        at = end
    model.set_attn_implementation("tightkv")
    return out


def holes(mask):
    mask[1, 70] = 0


def more_padding(mask):
    mask[1, :60] = 0


def less_padding(mask):
    mask[1, 20:40] = 1


def no_padding(mask):
    mask[:] = 1


def right_padding(mask):
    mask[0, 117:120] = 0


CHANGES = [holes, more_padding, less_padding, no_padding, right_padding]
HOSTILE = [(change, kind) for change in CHANGES for kind in ("2d", "4d", "float")]


@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize(("change", "kind"), [*HOSTILE, (no_padding, "none")])
def test_masks_that_change_mean_what_they_mean_to_transformers(change, kind, count, attended):
    """With a ring that holds everything, the logits are those of an exact cache."""
    quant = KVQuantConfig.preset("k8v8", page_size=32, exact_pages=8, window_bits=16)
    model, ids = tiny(), prompt(2, 121 + count)
    first = padding_mask((0, 40), 120)
    second = padding_mask((0, 40), 121)
    last = padding_mask((0, 40), 121 + count)
    change(last)
    if kind == "none":
        last = None
    elif kind != "2d":
        causal = torch.ones(count, 121 + count, dtype=torch.bool).tril(121)
        last = last[:, None, None].bool() & causal
        if kind == "float":
            last = torch.zeros(last.shape).masked_fill(~last, torch.finfo(torch.float32).min)
    splits = (120, 121, 121 + count)
    expected = exact_model_logits(model, ids, (first, second, last), splits)
    cache, at = TightCache(quant, model=model), 0
    with torch.no_grad():
        for mask, end in zip((first, second, last), splits, strict=True):
            attended.clear()
            positions = torch.arange(at, end).expand(2, -1)
            got = model(
                ids[:, at:end], past_key_values=cache, attention_mask=mask, position_ids=positions
            ).logits
            at = end
    masked = (
        (False, True) if kind == "none" or (kind, change) == ("2d", no_padding) else (True, False)
    )
    if (kind, change) == ("2d", less_padding):
        masked = (False, True)  # the table has followed it
    assert attended == [masked] * 4
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)


def test_a_mask_changed_in_place_is_not_what_it_was():
    from tightkv.integrations.transformers.attention import tightkv_mask
    from tightkv.integrations.transformers.steps import noted_padding

    mask = tightkv_mask(2, 1, 10, q_offset=9, attention_mask=padding_mask((0, 3), 10))
    assert mask is not None
    assert noted_padding(mask, 2).starts == (0, 3)
    mask[0, 0, 0, 5] = False
    assert noted_padding(mask, 2) is None
    assert noted_padding(mask.clone(), 2) is None


def test_the_device_is_asked_once_a_forward_pass(monkeypatch):
    """A foreign mask is looked at by the first layer alone."""
    looked, real = [], steps.seen_padding
    monkeypatch.setattr(steps, "seen_padding", lambda *a: looked.append(1) or real(*a))
    model, ids = tiny(), prompt(2, 60)
    cache = TightCache(QUANT, model=model)
    feed(model, cache, ids, padding_mask((0, 20), 60))
    assert not looked
    for total in (61, 62):
        with torch.no_grad():
            mask = padding_mask((0, 20), total)[:, None, None].bool()
            model(ids[:, :1], past_key_values=cache, attention_mask=mask)
    assert len(looked) == 2
