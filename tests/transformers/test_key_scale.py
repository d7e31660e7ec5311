"""Scales of key channels: no answer depends on them, and codes of uneven keys are better."""

import copy

import pytest
import torch

from models import prompt, tiny
from tightkv import TightCache
from tightkv.files.tensor_file import checksum
from tightkv.integrations.transformers import query_probe
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import MOST, KeyScale, balanced_scale
from tightkv.math.rotation import make_rotation

LARGE = 12.0


def uneven(dtype=torch.float32, **options):
    """A model whose keys have a few large channels that its queries hardly look at."""
    model = tiny("llama", dtype, head_dim=64, **options)
    for layer in model.model.layers:
        attention = layer.self_attn
        for name, factor in (("k_proj", LARGE), ("q_proj", 1 / LARGE)):
            rows = getattr(attention, name).weight.data.unflatten(0, (-1, 64))
            rows[:, [3, 7, 35, 39]] *= factor  # pairs of RoPE
    return model


def logits(model, cache, ids, chunks):
    found, at = [], 0
    with torch.no_grad():
        for count in chunks:
            found.append(model(ids[:, at : at + count], past_key_values=cache).logits)
            at += count
    return torch.cat(found, 1).float()


def cache_of(model, preset="k3v3", scales=True, **options):
    cache = TightCache(preset, model=model, **options)
    if not scales:
        metrics = query_probe.probed(model).metrics
        for number, layer in enumerate(cache.layers):
            layer.scale = None
            layer.use_metric(metrics.get(number))
    return cache


def test_uneven_heads_get_powers_of_two():
    energy = torch.ones(2, 64)
    energy[1, :4] = 64.0
    energy[1, 10] = 0.0  # a dead channel
    assert balanced_scale(energy[:1]) is None
    scale = balanced_scale(torch.cat([energy, 3 * energy[1:]])).value
    assert torch.equal(scale[0], torch.ones(64)) and torch.equal(scale[1], scale[2])
    assert scale[1, 0] == 2 * scale[1, 20] and 2.0**-MOST <= scale[1, 10] < scale[1, 20]
    assert balanced_scale(torch.full((1, 64), torch.nan)) is None


@pytest.mark.parametrize(
    "value", [torch.full((1, 4), 3.0), torch.full((1, 4), 2.0**9), torch.zeros(1, 4), torch.ones(4),
              torch.full((1, 4), torch.nan), -torch.ones(1, 4)]
)  # fmt: skip
def test_what_is_no_scale_is_refused(value):
    with pytest.raises(ValueError, match="key scale"):
        KeyScale(value)


def test_a_metric_in_the_frame_of_scaled_queries():
    g = torch.Generator().manual_seed(0)
    scale = KeyScale(torch.exp2(torch.randint(-2, 3, (2, 8), generator=g).float()))
    queries = torch.randn(50, 6, 8, generator=g)
    grouped = queries.unflatten(1, (2, 3)).transpose(0, 1).flatten(1, 2)
    metric = QueryMetric(grouped.mT @ grouped)
    again = scale.times(queries).unflatten(1, (2, 3)).transpose(0, 1).flatten(1, 2)
    torch.testing.assert_close(metric.scaled(scale).value, again.mT @ again)
    # equal ones too, as every file has: a server that loads many keeps one metric
    assert metric.scaled(scale) is metric.scaled(KeyScale(scale.value))
    assert metric.scaled(scale) is not metric.scaled(KeyScale(2 * torch.ones(2, 8)))
    assert metric.scaled(None) is metric


def test_two_models_and_a_copy_are_apart():
    """Each cache keeps the scales of its own model."""
    one, two = uneven(), uneven()
    two.model.layers[0].self_attn.k_proj.weight.data.unflatten(0, (-1, 64))[:, [5, 37]] *= LARGE
    ids, chunks = prompt(1, 400), (300, 1, 40, 1)
    alone = [logits(model, cache_of(model), ids, chunks) for model in (one, two)]
    caches = [cache_of(model) for model in (one, two)]
    assert not torch.equal(*(cache.layers[0].scale.value for cache in caches))
    found: list[list[torch.Tensor]] = [[], []]
    at = 0
    for count in chunks:
        for i, model in enumerate((one, two)):
            found[i].append(logits(model, caches[i], ids[:, at : at + count], (count,)))
        at += count
    assert all(torch.equal(torch.cat(x, 1), y) for x, y in zip(found, alone, strict=True))
    copied = copy.deepcopy(caches[0])
    assert torch.equal(*(logits(one, cache, ids[:, :7], (7,)) for cache in (caches[0], copied)))


def test_only_uneven_models_have_scales():
    assert not query_probe.probed(tiny("llama", head_dim=64)).scales
    cache = cache_of(uneven())
    assert all(
        (layer.scale.value[:, 3] > layer.scale.value[:, 4]).all() for layer in cache.tight_layers
    )
    for preset in ("k8v8", {"preset": "k3v3", "feedback": "off"}):
        assert all(x.scale is None for x in cache_of(uneven(), preset).tight_layers)


@pytest.mark.parametrize("implementation", ["tightkv", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_tokens_do_not_see_them(implementation, dtype):
    model = uneven(dtype, attn_implementation=implementation)
    ids, chunks = prompt(2, 163), (30, 90, 1, 40, 1, 1)
    plain, scaled = (logits(model, cache_of(model, scales=s), ids, chunks) for s in (False, True))
    noise = 1e-3 if dtype == torch.float32 else 0.03  # rings of float32 models have 16 bits
    assert (plain - scaled).abs().max() < noise * plain.abs().max()


@pytest.mark.sampled
@pytest.mark.parametrize("implementation", ["tightkv", "sdpa"])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_codes_are_better(bits, implementation):
    preset = {"preset": "k4v4", "key_bits": bits, "value_bits": 8}
    model = uneven(attn_implementation=implementation)
    ids, chunks = prompt(1, 600), (300, *[20] * 15)
    with torch.no_grad():
        right = model(ids).logits
    plain, scaled = (
        (logits(model, cache_of(model, preset, s), ids, chunks) - right).norm()
        for s in (False, True)
    )
    assert scaled < 0.6 * plain, (scaled, plain)


def test_a_file_has_them(tmp_path):
    model, ids = uneven(), prompt(1, 400)
    cache = cache_of(model)
    before = logits(model, cache, ids, (300,))
    assert before.isfinite().all()
    cache.save(tmp_path / "cache.safetensors")
    again = TightCache.load(tmp_path / "cache.safetensors", model)
    alone = TightCache.load(tmp_path / "cache.safetensors")
    for x in (again, alone):
        assert torch.equal(x.layers[0].scale.value, cache.layers[0].scale.value)
    rest = [logits(model, x, ids[:, 300:], (1, 99)) for x in (cache, again)]
    assert torch.equal(*rest)


def test_a_metric_keeps_what_few_scales_and_configs_asked_for():
    """Loaded files bring scales and seeds of their own, and a model may live for months."""
    metric = QueryMetric(torch.eye(16).expand(2, 16, 16))
    scales = [KeyScale(torch.full((2, 16), 2.0**n)) for n in range(-4, 5)]
    own = metric.scaled(scales[0])
    for number, scale in enumerate(scales):
        assert metric.scaled(scales[0]) is own
        metric.scaled(scale).factors(make_rotation("haar", 16, number), 4, torch.device("cpu"))
        own.factors(make_rotation("haar", 16, number), 4, torch.device("cpu"))
    assert len(metric._scaled) == len(own._made) == 4


def test_files_with_other_scales_are_refused(tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    model = uneven()
    cache = cache_of(model)
    logits(model, cache, prompt(1, 300), (300,))
    cache.save(tmp_path / "cache.safetensors")
    with safe_open(tmp_path / "cache.safetensors", "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (name,) = [name for name in tensors if name.endswith("0.key_scale")]
    for bad, message in (
        (torch.ones(1, 3).bfloat16(), r"key scale of a layer is .* gives bfloat16 \(2, 64\)"),
        (torch.full((2, 64), 3.0).bfloat16(), "powers of two"),
        (torch.ones(2, 64), "key scale of a layer is"),
    ):
        changed = {**tensors, name: bad}
        text = metadata["tightkv"] + metadata.get("weights", "")
        whole = {**metadata, "checksum": checksum(text, changed)}
        save_file(changed, tmp_path / "bad.safetensors", whole)
        with pytest.raises(ValueError, match=message):
            TightCache.load(tmp_path / "bad.safetensors", model)


def test_exported_models_have_them():
    """Token for token as the cache that they come from."""
    model = uneven().requires_grad_(False)
    static = ExportableModel(model, "k3v3", max_tokens=400)
    cache, ids = TightCache("k3v3", model=model), prompt(1, 360)
    assert static.caches[0].key_scale is not None
    at = 0
    with torch.no_grad():
        for count in (120, *[1] * 40, 30, *[1] * 40):
            new, position = ids[:, at : at + count], torch.arange(at, at + count)
            got = static(new, position)[:, -1]
            expected = model(new, past_key_values=cache).logits[:, -1]
            assert (got - expected).norm() < 0.02 * expected.norm(), at
            at += count


def test_another_model_is_refused():
    cache = cache_of(uneven())
    with pytest.raises(ValueError, match="keys have 2 heads of 32; this layer's scales"):
        logits(tiny("llama", head_dim=32), cache, prompt(1, 20), (20,))
