import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import FAMILIES, prompt, tiny
from tightkv import KVQuantConfig, TightCache

QUANT = KVQuantConfig.preset("k3v2", page_size=32, sinks=2, exact_pages=2, protected_first=1)


@torch.no_grad()
def greedy(model, cache, ids, count):
    out = []
    for _ in range(count):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        out.append(ids)
    return torch.cat(out, 1)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "falcon_h1"])
def test_resuming_from_a_file_gives_the_same_tokens(family, tmp_path):
    model, ids = tiny(family), prompt(2, 150)
    straight = TightCache(QUANT, model=model)
    expected = greedy(model, straight, ids, 50)
    stopped = TightCache(QUANT, model=model)
    first = greedy(model, stopped, ids, 20)
    stopped.save(tmp_path / "cache.safetensors")
    resumed = TightCache.load(tmp_path / "cache.safetensors", model=model)
    assert [type(x) for x in resumed.layers] == [type(x) for x in stopped.layers]
    rest = greedy(model, resumed, first[:, -1:], 30)
    assert torch.equal(torch.cat([first, rest], 1), expected)
    assert resumed.get_seq_length() == straight.get_seq_length()


def test_hybrid_layer_and_half_precision(tmp_path):
    model, ids = tiny("falcon_h1", dtype=torch.bfloat16), prompt(1, 100)
    cache = TightCache("k4v4", model=model)
    first = greedy(model, cache, ids, 5)
    cache.save(tmp_path / "c.safetensors")
    resumed = TightCache.load(tmp_path / "c.safetensors", model=model)
    assert torch.equal(
        greedy(model, resumed, first[:, -1:], 5), greedy(model, cache, first[:, -1:], 5)
    )


def saved(tmp_path, **options):
    model = tiny()
    cache = TightCache(KVQuantConfig.preset("k4v4", page_size=32), model=model, **options)
    greedy(model, cache, prompt(2, 100), 3)
    cache.save(tmp_path / "cache.safetensors")
    return model, cache, tmp_path / "cache.safetensors"


def test_without_a_model_and_after_beams(tmp_path):
    model, cache, path = saved(tmp_path)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.save(path)
    loaded = TightCache.load(path)
    assert loaded.quant == cache.quant
    assert loaded.shared.table.used_pages == cache.shared.table.used_pages == 3
    step = prompt(2, 1)
    with torch.no_grad():
        a, b = (model(step, past_key_values=c).logits for c in (cache, loaded))
    assert torch.equal(a, b)


def test_only_used_pages_are_written(tmp_path):
    _, cache, path = saved(tmp_path)
    for layer in cache.tight_layers:
        layer.kv.reserve(1000)
    cache.save(path)
    assert load_file(path)["layers.0.pages"].shape[0] == cache.shared.table.used_pages


def test_an_empty_cache_round_trips(tmp_path):
    model = tiny()
    TightCache("k4v4", model=model).save(tmp_path / "c.safetensors")
    cache = TightCache.load(tmp_path / "c.safetensors", model=model)
    assert greedy(model, cache, prompt(1, 50), 3).shape == (1, 3)


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.99])
def test_every_flipped_bit_is_noticed(tmp_path, where):
    model, _, path = saved(tmp_path)
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|truncated or no safetensors"):
        TightCache.load(path, model=model)


@pytest.mark.parametrize("length", [0, 5, 200, -1, -1000])
def test_truncated_files(tmp_path, length):
    model, _, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="truncated or no safetensors"):
        TightCache.load(path, model=model)


def rewrite(path, **changes):
    """The same file with another header and a right checksum."""
    from safetensors import safe_open

    from tightkv.integrations.transformers.saving.container import checksum

    with safe_open(path, framework="pt") as file:
        header = {**json.loads(file.metadata()["tightkv"]), **changes}
    tensors, text = load_file(path), json.dumps(header)
    save_file(tensors, path, {"tightkv": text, "checksum": checksum(text, tensors)})


def test_other_versions_files_and_models_are_refused(tmp_path):
    model, _, path = saved(tmp_path)
    for other, word in (
        (tiny("qwen2"), r"\(2, 32\)\]; this model has \(2, 16\)"),
        (tiny("gemma3"), "holds 4 layers"),
        (tiny("llama", num_hidden_layers=2), "holds 4 layers .* this model has 2"),
    ):
        with pytest.raises(ValueError, match=word):
            TightCache.load(path, model=other)
    rewrite(path, fingerprint="0" * 16)
    with pytest.raises(ValueError, match="fingerprint"):
        TightCache.load(path, model=model)
    rewrite(path, format_version=99)
    with pytest.raises(ValueError, match="format version 99"):
        TightCache.load(path, model=model)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"not one that TightCache\.save wrote"):
        TightCache.load(path, model=model)
    with pytest.raises(FileNotFoundError, match="is not a file"):
        TightCache.load(tmp_path / "missing", model=model)


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    from tightkv.integrations.transformers.saving import writing

    _, cache, path = saved(tmp_path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(writing, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
