"""Keys whose bias RoPE turns get more bits from a loaded model's weights, and the user is told."""

import copy
import warnings

import pytest
import torch
from transformers import DynamicCache

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.attention import KeyBitsWarning, measured_noise
from tightkv.integrations.transformers.fitting import LoadedTensor
from tightkv.tools.eval.results import model_fingerprint

NOISY = 2  # the layer with the bias


def biased(layer=NOISY, size=10.0, family="qwen2", **options):
    """A model with one layer whose queries and keys have a large bias."""
    model = tiny(family, **options)
    for name, value in model.named_parameters():
        if f"layers.{layer}.self_attn" in name and name.endswith(("q_proj.bias", "k_proj.bias")):
            value.data.fill_(size)
    return model


def told(make):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        made = make()
    return made, [str(w.message) for w in seen if issubclass(w.category, KeyBitsWarning)]


def bits(cache):
    return [(layer.cfg.key_bits, layer.cfg.value_bits) for layer in cache.tight_layers]


@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k2v2"])
def test_a_noisy_layer_gets_more_bits_and_the_user_is_told_once(preset):
    model = biased()
    cache, lines = told(lambda: TightCache(preset, model=model))
    cfg = KVQuantConfig.preset(preset)
    own = (cfg.key_bits, cfg.value_bits)
    assert bits(cache) == [own, own, (8, cfg.value_bits), own]
    assert cache.quant.layer_bits == f"2=k8v{cfg.value_bits}"
    (line,) = lines
    assert f"tightkv {preset}: 8-bit keys in layer 2" in line and "protect_keys=false" in line
    again, lines = told(lambda: TightCache(preset, model=model))
    assert again.quant == cache.quant and not lines


def test_what_is_asked_for_is_done():
    model = biased()
    cache, lines = told(lambda: TightCache({"preset": "k4v4", "protect_keys": False}, model=model))
    assert bits(cache) == [(4, 4)] * 4 and not lines
    named = {"preset": "k4v4", "layer_bits": "2=k3v2,0=k4v8"}
    cache, lines = told(lambda: TightCache(named, model=model))
    assert bits(cache) == [(4, 8), (4, 4), (3, 2), (4, 4)] and not lines
    cache, lines = told(lambda: TightCache("k8v4", model=model))
    assert bits(cache) == [(8, 4)] * 4 and not lines


@pytest.mark.parametrize("family,layer", [("llama", 99), ("gemma3", 0)])
def test_bits_of_a_layer_that_is_not_compressed_are_refused(family, layer):
    """No such layer, or one with a sliding window."""
    named = {"preset": "k4v4", "layer_bits": f"{layer}=k8v4"}
    with pytest.raises(ValueError, match=f"names layer {layer}; layers that can be compressed are"):
        TightCache(named, model=tiny(family))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "lfm2"])
def test_quiet_models_stay_as_they_are(family):
    model = tiny(family)
    cache, lines = told(lambda: TightCache("k2v2", model=model))
    assert not cache.quant.layer_bits and not lines and not cache.shared.watch


def test_protection_keeps_the_answers():
    """The prompt is long enough that most of it is read from pages."""
    model = tiny("qwen2")
    bias = model.model.layers[NOISY].self_attn.k_proj.bias.data
    bias.copy_(150 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(0)))
    ids = prompt(1, 700)
    chunks = ids.split(100, 1)

    def logits(cache):
        with torch.no_grad():
            return torch.cat([model(x, past_key_values=cache).logits for x in chunks], 1)

    exact = logits(DynamicCache(config=model.config))

    def error(**options):
        plain = {
            "exact_pages": 1,
            "page_size": 32,
            "feedback": "off",
        }  # no scales of channels either
        cache = TightCache(KVQuantConfig.preset("k4v4", **plain, **options), model=model)
        return cache.quant.layer_bits, float((logits(cache) - exact).norm() / exact.norm())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer_bits, protected = error()
        assert layer_bits == "2=k8v4"
        assert protected < 0.85 * error(protect_keys=False)[1]


def test_without_weights_the_first_keys_are_looked_at():
    model, ids = biased(), prompt(2, 90)
    for make in (lambda: TightCache("k4v4", model=model.config), lambda: TightCache("k4v4")):
        cache = make()
        assert cache.shared.watch
        _, lines = told(lambda cache=cache: model(ids, past_key_values=cache))
        assert len(lines) == 1 and "keys of layer 2 need more bits" in lines[0]
        assert 'layer_bits="2=k8v4"' in lines[0]
        _, lines = told(lambda cache=cache: model(ids[:, :3], past_key_values=cache))
        assert not lines
    following = TightCache({"preset": "k4v4", "layer_bits": "2=k8v4"})
    _, lines = told(lambda: model(ids, past_key_values=following))
    assert not lines and bits(following) == [(4, 4), (4, 4), (8, 4), (4, 4)]
    silent = TightCache({"preset": "k4v4", "protect_keys": False})
    assert not told(lambda: model(ids, past_key_values=silent))[1]
    quiet = tiny("qwen2")
    assert not told(lambda: quiet(ids, past_key_values=TightCache("k4v4")))[1]


def test_after_a_reset_keys_are_looked_at_again():
    """Another model may come, of whose weights nothing is known."""
    quiet, ids = tiny("qwen2"), prompt(2, 90)
    cache = TightCache("k4v4", model=quiet)
    assert not told(lambda: quiet(ids, past_key_values=cache))[1]
    cache.reset()
    (line,) = told(lambda: biased()(ids, past_key_values=cache))[1]
    assert "keys of layer 2 need more bits" in line


def test_weights_that_cannot_be_read_are_told_where_no_alarm_would_come():
    model = biased()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight = torch.nn.Parameter(
            layer.self_attn.q_proj.weight.to(torch.float8_e4m3fn), requires_grad=False
        )
        layer.self_attn.k_proj.weight = torch.nn.Parameter(
            layer.self_attn.k_proj.weight.to(torch.float8_e4m3fn), requires_grad=False
        )
    cache, lines = told(lambda: TightCache("k4v4", model=model))  # by the biases alone
    assert bits(cache)[NOISY] == (8, 4) and len(lines) == 1
    llama = tiny()
    weight = llama.model.layers[1].self_attn.k_proj.weight
    llama.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(
        weight.to(torch.float8_e4m3fn), requires_grad=False
    )
    cache, lines = told(lambda: TightCache("k4v4", model=llama))
    assert cache.shared.watch and not lines  # the attention "tightkv" sees the keys
    llama.config._attn_implementation = "sdpa"
    cache, lines = told(lambda: TightCache("k3v3", model=llama))
    assert len(lines) == 1 and "not checked" in lines[0] and "k_proj" in lines[0]


class Int8Params(torch.nn.Parameter):
    """As of bitsandbytes: a parameter of its own class."""


class Quantized(torch.nn.Module):
    """A linear layer with int8 weights, kept under the names of GPTQ and AWQ, or others."""

    def __init__(self, linear, kind):
        super().__init__()
        scales = linear.weight.data.abs().amax(1, keepdim=True) / 127
        codes = (linear.weight.data / scales).round().to(torch.int8)
        self.kind = kind
        if kind == "weight":
            self.weight = Int8Params(codes, requires_grad=False)
        elif kind == "weight_packed":  # compressed-tensors
            self.weight_packed = torch.nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("qweight", codes)
        self.register_buffer("scales", scales)

    def forward(self, x):
        return x @ (getattr(self, self.kind) * self.scales).T.to(x)


def quantized(kind):
    model = tiny()
    if kind.endswith("Config"):
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(model, getattr(torchao, kind)())
        return model
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            old = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, Quantized(old, kind))
    return model


@pytest.mark.parametrize(
    "kind",
    ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "qweight", "weight", "weight_packed"],
)
def test_quantized_models_are_told_once_and_served(kind, tmp_path):
    model, ids = quantized(kind), prompt(1, 300)
    model.set_attn_implementation("sdpa")
    cache, lines = told(lambda: TightCache("k4v4", model=model))
    assert len(lines) == 1 and "not checked" in lines[0]
    assert not told(lambda: TightCache("k4v4", model=model))[1]
    assert all(layer.metric is not None for layer in cache.tight_layers)
    model.set_attn_implementation("tightkv")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors")
        again = TightCache.load(tmp_path / "cache.safetensors", model=model)
        found = [model(ids[:, :1], past_key_values=x).logits for x in (cache, again)]
    assert torch.equal(*found)
    assert len(model_fingerprint(model)) == 16


def test_saved_copied_and_loaded_caches_keep_their_bits(tmp_path):
    model, ids = biased(), prompt(1, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cache = TightCache("k3v3", model=model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache")
        others = [
            copy.deepcopy(cache),
            TightCache.load(tmp_path / "cache"),
            TightCache.load(tmp_path / "cache", model=model),
        ]
        expected = model(ids[:, :1], past_key_values=cache).logits
        for other in others:
            assert other.quant == cache.quant and bits(other) == bits(cache)
            assert torch.equal(model(ids[:, :1], past_key_values=other).logits, expected)


def test_files_from_before_there_were_bits_of_layers_load(tmp_path):
    """With the model, too: its weights must not change what is written."""
    model, ids = biased(), prompt(1, 200)
    cache = TightCache({"preset": "k3v3", "protect_keys": False}, model=model)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    cache.quant = cache.quant.replace(protect_keys=True)  # all that old files could say
    cache.save(tmp_path / "cache")
    loaded, lines = told(lambda: TightCache.load(tmp_path / "cache", model=model))
    assert bits(loaded) == [(3, 3)] * 4 and not lines


def test_measured_noise_is_that_of_the_formula():
    g = torch.Generator().manual_seed(0)
    query = 3 * torch.randn(2, 8, 200, 64, generator=g)
    key = 5 * torch.randn(2, 2, 200, 64, generator=g) + torch.randn(2, 2, 1, 64, generator=g)
    noise = measured_noise(query, key, 0.1, 64)
    assert noise == pytest.approx(0.01 / 64 * (9 * 64) * (25 * 64), rel=0.05)
    assert measured_noise(query[:, :, :20], key[:, :, :20], 0.1, 64) is None
    assert measured_noise(query[:, :, :40], key[:, :, :40], 0.1, 64) is not None


def test_tensors_that_are_not_there_are_no_numbers():
    meta = LoadedTensor("x", torch.empty(4, 4, device="meta"))
    assert not meta.is_float
    with pytest.raises(ValueError, match="on meta"):
        meta.read()
    half = LoadedTensor("x", torch.arange(8.0).view(4, 2).half())
    assert half.is_float and half.bytes == 16 and half.shape == (4, 2)
    assert torch.equal(half.read(2), half.value[::2])
