import warnings
from copy import deepcopy

import pytest
import torch
import transformers as hf
from torch.nn.functional import kl_div

from models import FAMILIES, prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers import attention, states
from tightkv.paged.cache import PagedKV

SMALL = {"page_size": 32, "sinks": 2, "exact_pages": 2}
FINE = KVQuantConfig.preset("k8v8", **SMALL, window_bits=16)


@torch.no_grad()
def logits_of(model, ids, cache, cuts, **inputs):
    """Logits of a forward pass in pieces through a cache."""
    out, at = [], 0
    for cut in [*cuts, ids.shape[1]]:
        if cut > at:
            out.append(model(ids[:, at:cut], past_key_values=cache, **inputs).logits)
            at = cut
    return torch.cat(out, 1)


@torch.no_grad()
def plain_logits(model, ids, **inputs):
    implementation = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(ids, use_cache=False, **inputs).logits
    finally:
        model.set_attn_implementation(implementation)


def kl(exact, other, typical=False):
    """Mean (or median) KL a token; a router's flip in a mixture of experts spoils only a mean."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    each = kl_div(q, p, log_target=True, reduction="none").sum(-1)
    return float(each.median() if typical else each.mean())


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    """Prefill exact; decode, short and long chunks close; hybrid layers untouched."""
    model = tiny(family)
    ids = prompt(2, 230)
    exact = plain_logits(model, ids)
    cache = TightCache(FINE, model=model)
    got = logits_of(model, ids, cache, [150, 151, 152, 160])
    torch.testing.assert_close(got[:, :150], exact[:, :150], atol=2e-4, rtol=1e-3)
    loss = kl(exact[:, 150:], got[:, 150:], typical=True)
    assert float(exact.std()) > 0.5 and 0 < loss < 2e-4
    assert (
        cache.tight_layers
        and cache.get_seq_length(cache.layers.index(cache.tight_layers[0])) == 230
    )
    kinds = {type(layer).__name__ for layer in cache.layers} - {"TightLayer", "TightHybridLayer"}
    assert kinds <= {"DynamicSlidingWindowLayer", "LinearAttentionLayer"}
    rough = logits_of(
        model, ids, TightCache(FINE.replace(key_bits=2, value_bits=2), model=model), [150]
    )
    assert kl(exact[:, 150:], rough[:, 150:], typical=True) > 20 * loss, "the pages are read"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    model = tiny(dtype=dtype)
    ids = prompt(1, 150)
    exact = plain_logits(model, ids)
    got = logits_of(model, ids, TightCache(FINE, model=model), [100])
    assert got.dtype == dtype
    assert kl(exact.float(), got.float()) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_sixteen_bits_change_nothing():
    model = tiny()
    ids = prompt(2, 60)
    cache = TightCache(KVQuantConfig(key_bits=16, value_bits=16), model=model)
    torch.testing.assert_close(logits_of(model, ids, cache, [40]), plain_logits(model, ids))
    assert not cache.tight_layers


def test_a_gradient_that_would_lack_the_cache_is_refused():
    model, ids = tiny(), prompt(1, 40)
    cache = TightCache(FINE, model=model)
    first = model(ids[:, :30], past_key_values=cache).logits
    later = model(ids[:, 30:], past_key_values=cache).logits
    first.sum().backward()  # the first prefill attends exactly
    with pytest.raises(RuntimeError, match="has no gradient; train without a cache"):
        later.sum().backward()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_implementations_dequantize_and_warn_once(implementation):
    model = tiny()
    ids = prompt(2, 200)
    direct = logits_of(model, ids, TightCache(FINE, model=model), [130, 131, 140])
    model.set_attn_implementation(implementation)
    states._warn_slow.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = TightCache(FINE, model=model)
        read = logits_of(model, ids, cache, [130, 131, 140])
    assert [str(w.message) for w in caught if "dequantizes" in str(w.message)].__len__() == 1
    torch.testing.assert_close(read, direct, atol=2e-3, rtol=1e-3)  # kernels round queries


@pytest.mark.parametrize("quant", ["k4v4", FINE], ids=["8 bits", "16 bits"])
def test_steps_that_are_alike_attend_as_each_alone(quant, monkeypatch):
    """On CPUs a step keeps for the next what only lengths and windows change in."""
    model, ids = tiny(), prompt(2, 320)
    short, again = [], PagedKV.attend_again
    monkeypatch.setattr(PagedKV, "attend_again", lambda *a: short.append(again(*a)) or short[-1])
    cuts = list(range(190, 320))
    kept = logits_of(model, ids, TightCache(quant, model=model, kernels="cpu"), cuts)
    assert sum(x is not None for x in short) > 4 * 80
    monkeypatch.setattr(PagedKV, "attend_again", lambda *a: None)
    alone = logits_of(model, ids, TightCache(quant, model=model, kernels="cpu"), cuts)
    assert torch.equal(kept, alone)


def test_attention_weights_come_with_eager_attention_or_a_warning():
    model, ids = tiny(), prompt(1, 80)
    attention._warn_no_weights.cache_clear()
    with pytest.warns(UserWarning, match='"tightkv" does not support output_attentions=True'):
        model(ids, past_key_values=TightCache(FINE, model=model), output_attentions=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, output_attentions=True)  # said once
        model(ids, past_key_values=TightCache(FINE, model=model))
    model.set_attn_implementation("eager")
    cache = TightCache(FINE, model=model)
    found = model(ids, past_key_values=cache, output_attentions=True).attentions
    assert [x.shape for x in found] == [(1, 4, 80, 80)] * 4


def generate(model, cache=None, ids=None, **options):
    ids = prompt(1, 150) if ids is None else ids
    options = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, past_key_values=cache, **options)


def test_greedy_equals_the_plain_cache_at_eight_bits():
    model = tiny()
    ours = generate(model, TightCache(FINE, model=model))
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, generate(model))


def test_hand_written_loop_equals_generate():
    model = tiny()
    ids = prompt(1, 150)
    expected = generate(model, TightCache("k4v4", model=model))
    cache, step, out = TightCache("k4v4", model=model), ids, ids
    with torch.no_grad():
        for _ in range(60):
            step = model(step, past_key_values=cache).logits[:, -1:].argmax(-1)
            out = torch.cat([out, step], 1)
    assert torch.equal(out, expected)


def test_sampling_and_return_sequences():
    model = tiny()
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 40}
    torch.manual_seed(0)
    ours = generate(model, TightCache(FINE, model=model), **options)
    model.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    plain = generate(model, **options)
    assert ours.shape == plain.shape == (3, 190)
    assert float((ours == plain).float().mean()) > 0.95


def test_beam_search_follows_the_beams():
    model = tiny()
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 50}
    cache = TightCache(FINE, model=model)
    ours = generate(model, cache, **options)
    assert cache.shared.table.used_pages <= 4 + 4 * 3, "beams share the pages of the prompt"
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, generate(model, **options))


def test_assisted_decoding_crops_right():
    model, helper = tiny(), tiny(seed=3)
    expected = generate(model, TightCache(FINE, model=model, kernels="reference"))
    assisted = generate(model, TightCache(FINE, model=model), assistant_model=helper)
    lookup = generate(model, TightCache(FINE, model=model), prompt_lookup_num_tokens=5)
    # Rejected tokens leave no trace, so the greedy text is the same to the last token.
    assert torch.equal(assisted, expected) and torch.equal(lookup, expected)


def test_left_padded_batch_equals_rows_alone():
    model = tiny()
    rows = [prompt(1, n, seed=n) for n in (150, 97, 40)]
    ids = torch.zeros(3, 150, dtype=torch.long)
    mask = torch.zeros(3, 150, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 150 - row.shape[1] :] = row
        mask[i, 150 - row.shape[1] :] = 1
    cache = TightCache(FINE, model=model)
    together = generate(model, cache, ids, attention_mask=mask)[:, 150:]
    assert [row.left_pad for row in cache.shared.table.rows] == [0, 53, 110]
    for i, row in enumerate(rows):
        alone = generate(model, TightCache(FINE, model=model), row)[:, row.shape[1] :]
        assert torch.equal(together[i : i + 1], alone)


def test_chunked_prefill_is_close_to_whole_prefill():
    model = tiny()
    ids = prompt(2, 300)
    exact = plain_logits(model, ids)
    for cuts in ([100, 200], [64, 65, 66, 290], list(range(10, 300, 10))):
        got = logits_of(model, ids, TightCache(FINE, model=model), cuts)
        assert kl(exact, got) < 1e-3
    ours = generate(model, TightCache(FINE, model=model), prefill_chunk_size=50)
    assert ours.shape == (1, 210)


def test_many_turns_reuse_one_cache():
    model = tiny()
    cache, ids = TightCache(FINE, model=model), prompt(1, 80)
    for turn in range(3):
        ids = generate(model, cache, ids, max_new_tokens=30)
        assert cache.get_seq_length() == ids.shape[1] - 1
        ids = torch.cat([ids, prompt(1, 25, seed=turn)], 1)
    fresh = logits_of(model, ids, TightCache(FINE, model=model), [])
    reused = logits_of(model, ids[:, cache.get_seq_length() :], cache, [])
    assert kl(fresh[:, -20:], reused[:, -20:]) < 1e-3


def test_reset_then_another_batch_and_model():
    model = tiny()
    cache = TightCache(FINE, model=model)
    first = generate(model, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, cache), first)
    cache.reset()
    other = tiny("qwen3", seed=4)
    assert generate(other, cache, prompt(3, 70)).shape == (3, 130)


def test_a_copied_cache_goes_its_own_way():
    """transformers' recipe for reusing a prefix is copy.deepcopy of its cache."""
    model, ids = tiny(), prompt(1, 150)
    prefix = TightCache(FINE, model=model)
    logits_of(model, ids, prefix, [])
    more = [prompt(1, 40, seed=n) for n in (5, 6)]
    expected = [logits_of(model, x, deepcopy(prefix), [1]) for x in more]
    again = [
        logits_of(model, x, c, [1]) for x, c in zip(more, (deepcopy(prefix), prefix), strict=True)
    ]
    for a, b in zip(expected, again, strict=True):
        assert torch.equal(a, b)


def test_protected_layers_have_their_bits():
    model = tiny()
    quant = KVQuantConfig(key_bits=3, value_bits=2, protected_first=1, protected_last=1)
    cache = TightCache(quant, model=model)
    assert [layer.cfg.key_bits for layer in cache.tight_layers] == [8, 3, 3, 8]
    assert generate(model, cache).shape == (1, 210)
    exact = TightCache(quant.replace(protected_bits=16), model=model)
    assert [type(layer).__name__ for layer in exact.layers] == [
        "DynamicLayer",
        "TightLayer",
        "TightLayer",
        "DynamicLayer",
    ]
    assert generate(model, exact).shape == (1, 210)
    with pytest.raises(ValueError, match="need the model"):
        TightCache(quant)


def test_without_the_model_every_layer_is_compressed():
    model = tiny("gemma3")
    cache = TightCache(FINE)
    ids = prompt(2, 200)
    got = logits_of(model, ids, cache, [120])
    assert len(cache.tight_layers) == 4
    assert kl(plain_logits(model, ids), got) < 1e-4


def test_bytes_used_are_the_bytes_of_the_layout():
    model = tiny(dtype=torch.bfloat16)
    cache = TightCache("k4v4", model=model)
    logits_of(model, prompt(2, 240), cache, [])
    layers = [layer.kv.layout for layer in cache.tight_layers]
    short = sum(layout.total_bytes(240, 2, encode_partial_page=False) for layout in layers)
    assert cache.bytes_used() == {"compressed": short, "bf16": 4 * 4 * 2 * 32 * 480}
    logits_of(model, prompt(2, 160), cache, [])
    pages = sum(layout.total_bytes(400, 2, encode_partial_page=False) for layout in layers)
    assert cache.bytes_used() == {"compressed": pages, "bf16": 4 * 4 * 2 * 32 * 800}
    assert short < 4 * 4 * 2 * 32 * 480 and pages < 4 * 4 * 2 * 32 * 800


def test_padding_mask_with_other_implementation():
    model = tiny()
    model.set_attn_implementation("sdpa")
    ids, mask = prompt(2, 120), torch.ones(2, 120, dtype=torch.long)
    mask[1, :30] = 0
    exact = generate(model, None, ids, attention_mask=mask)
    ours = generate(model, TightCache(FINE, model=model), ids, attention_mask=mask)
    assert float((exact == ours).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (lambda: hf.DeepseekV3Config(), "latent attention"),
        (lambda: hf.T5Config(), "encoder-decoder"),
        (lambda: hf.MllamaConfig(), r"keeps the keys of images .*cross_attention_layers"),
        (lambda: hf.MambaConfig(), "layer"),
        (lambda: hf.LlamaConfig(attn_implementation="flex_attention"), 'use "tightkv"'),
        (lambda: hf.MistralConfig(sliding_window=64), r"can be compressed \(sliding window\)"),
    ],
)
def test_models_that_cannot_be_compressed_are_refused(config, word):
    with pytest.raises(ValueError, match=word):
        TightCache("k4v4", model=config())


def test_bad_input_leaves_the_cache_usable():
    model = tiny()
    cache = TightCache(FINE, model=model)
    ids = prompt(2, 100)
    logits_of(model, ids, cache, [])
    attempts = [
        (lambda: model(prompt(3, 1), past_key_values=cache), r"this cache holds \[2, 2, 'T', 32\]"),
        (lambda: tiny("qwen2")(prompt(2, 1), past_key_values=cache), "another model or batch"),
        (lambda: model.to(torch.bfloat16)(prompt(2, 1), past_key_values=cache), "torch.bfloat16"),
    ]
    for attempt, word in attempts:
        with pytest.raises(ValueError, match=word):
            attempt()
        model.to(torch.float32)
    more = prompt(2, 30, seed=5)
    exact = plain_logits(model, torch.cat([ids, more], 1))[:, 100:]
    assert kl(exact, logits_of(model, more, cache, [1])) < 1e-3


def test_odd_head_dim_is_refused():
    config = FAMILIES["llama"]()
    config.head_dim = 20
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="tightkv")
    with pytest.raises(ValueError, match="head_dim=20; supported: multiples of 16"):
        model(prompt(), past_key_values=TightCache("k4v4", model=model))


def test_an_interrupted_forward_pass_can_be_cropped_away():
    model = tiny()
    ids = prompt(1, 120)
    cache = TightCache(FINE, model=model)
    logits_of(model, ids[:, :100], cache, [])
    layer = model.model.layers[2]
    handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        model(ids[:, 100:105], past_key_values=cache)
    handle.remove()
    with pytest.raises(RuntimeError, match="crop the interrupted tokens"):
        model(ids[:, 100:105], past_key_values=cache)
    cache.crop(100)
    assert kl(plain_logits(model, ids)[:, 100:], logits_of(model, ids[:, 100:], cache, [1])) < 1e-3


def test_biased_keys_need_page_centering():
    """Plain TurboQuant fails where key biases dwarf the keys, as in Qwen2.x; centering does not.

    Trained models have their large biases where RoPE turns slowly, and so has this one.
    """
    model = tiny("qwen2", hidden_size=256, initializer_range=0.05)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias.view(2, 2, 32)  # [heads, halves, frequencies]
            bias[:, :, 24:].normal_(0, 40)
    ids = prompt(1, 520)
    exact = plain_logits(model, ids)[:, 320:]
    quant = KVQuantConfig.preset("k4v4")
    ours = kl(exact, logits_of(model, ids, TightCache(quant, model=model), [320])[:, 320:])
    plain = quant.replace(key_centering="none", key_scale="norm", value_scale="norm")
    theirs = kl(exact, logits_of(model, ids, TightCache(plain, model=model), [320])[:, 320:])
    budget = 0.002
    assert ours < budget < theirs, (ours, theirs)
