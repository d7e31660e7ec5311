import copy
import hashlib
import json

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from models import FAMILIES, prompt, sliding, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.config import FORMAT_VERSION
from tightkv.files.tensor_file import checksum
from tightkv.integrations.transformers.saving import header as headers
from tightkv.integrations.transformers.saving.file import WeightsSample
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable

QUANT = KVQuantConfig.preset("k3v2", page_size=32, sinks=2, exact_pages=2, protected_first=1)


@torch.no_grad()
def greedy(model, cache, ids, count):
    out = []
    for _ in range(count):
        ids = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        out.append(ids)
    return torch.cat(out, 1)


@pytest.mark.sampled
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


def saved(tmp_path, tokens=100, window_bits=16, before=False, exact_pages=1, **options):
    """`before`: as when pages were sealed as soon as they were complete."""
    model = tiny()
    quant = KVQuantConfig.preset("k4v4", page_size=32, exact_pages=exact_pages)
    quant = quant.replace(window_bits=window_bits)
    cache = TightCache(quant, model=model, **options)
    if before:
        cache.shared.table.lag = 0
    greedy(model, cache, prompt(2, tokens), 3)
    cache.save(tmp_path / "cache.safetensors")
    return model, cache, tmp_path / "cache.safetensors"


@pytest.mark.parametrize("window_bits", [8, 16])
def test_without_a_model_and_after_beams(tmp_path, window_bits):
    model, cache, path = saved(tmp_path, window_bits=window_bits)
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.save(path)
    loaded = TightCache.load(path)
    assert loaded.quant == cache.quant
    assert loaded.shared.table.used_pages == cache.shared.table.used_pages == 3
    step = prompt(2, 1)
    with torch.no_grad():
        a, b = (model(step, past_key_values=c).logits for c in (cache, loaded))
    assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [20, 70, 150])
def test_files_of_before_rings_grew(tmp_path, tokens):
    """Rings of full length in the model's dtype, and pages as soon as they were complete."""
    model, cache, path = saved(tmp_path, tokens, before=True)
    header, tensors = parts(path)
    full = cache.layers[0].kv.layout.ring_tokens
    for name, x in tensors.items():
        if "pages" not in name:
            more = full - x.shape[1] if "ring" in name else 0
            tensors[name] = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, more))
    write(path, header, tensors)
    loaded = TightCache.load(path, model=model)
    assert loaded.layers[0].kv.ring_key.dtype == torch.float16
    step, more = prompt(2, 1), 5 if tokens == 20 else 20  # no page yet
    rest = [greedy(model, c, step, more) for c in (cache, loaded)]
    assert torch.equal(*rest)


def test_files_of_before_pages_were_sealed_late(tmp_path):
    model, cache, path = saved(tmp_path, 158, before=True)
    assert cache.shared.table.used_pages == 10
    loaded = TightCache.load(path, model=model)
    assert loaded.shared.table.used_pages == 8
    step = prompt(2, 1)
    rest = [greedy(model, c, step, 40) for c in (cache, loaded)]
    assert torch.equal(*rest)
    loaded.save(path)
    assert TightCache.load(path, model=model).bytes_used() == loaded.bytes_used()


@pytest.mark.parametrize("offloading", [False, True])
@pytest.mark.parametrize("tokens", [3, 31, 70, 100])
def test_files_of_before_short_sequences_were_exact(tmp_path, tokens, offloading):
    """Their rings had all tokens, more than today's have, and there were no pages and sinks."""
    model, cache, path = saved(tmp_path, tokens, exact_pages=4)
    assert not cache.shared.table.used_pages
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    cache.save(path)
    header, tensors = parts(path)
    for quant in (header["quant"], *(layer["tight"]["quant"] for layer in header["layers"])):
        quant["exact_pages"] = 1
    for row in header["rows"]:
        row["sink_count"] = 0
    for name, x in tensors.items():
        tensors[name] = x[:, :0] if "sink" in name else x
    write(path, header, tensors)
    loaded = TightCache.load(path, model=model, offloading=offloading)
    table = SequenceTable(loaded.quant, encode_partial_page=False)
    plan = table.append(table.add_rows([0] * 3), [tokens + 2] * 3)
    for own, layer in zip(loaded.tight_layers, cache.tight_layers, strict=True):
        if offloading:
            assert not own.kv._pages.numel() and own.kv._offloaded._buffer is None
        fresh = PagedKV(own.kv.layout, table)
        fresh.feedback = layer.kv.feedback
        assert fresh.feedback is not None  # the pages are coded as those of any other sequence
        fresh.append(plan, layer.kv.ring_key, layer.kv.ring_value)
        for one, other in zip(own.kv.dequantize(), fresh.dequantize(), strict=True):
            assert torch.equal(one, other)
    assert loaded.shared.table.rows == table.rows
    assert greedy(model, loaded, prompt(3, 1), 40).shape == (3, 40)
    loaded.save(path)
    assert TightCache.load(path, model=model).get_seq_length() == tokens + 42


@pytest.mark.parametrize("tokens", [1, 20])
def test_sequences_without_pages_go_on_from_a_file(tmp_path, tokens):
    model, cache, path = saved(tmp_path, tokens)
    assert not cache.shared.table.used_pages
    loaded = TightCache.load(path, model=model)
    assert loaded.bytes_used() == cache.bytes_used()
    step = prompt(2, 1)
    rest = [greedy(model, c, step, 40) for c in (cache, loaded)]
    assert torch.equal(*rest)
    assert loaded.bytes_used() == cache.bytes_used()


def test_a_row_without_pages_is_no_longer_than_its_ring(tmp_path):
    _, _, path = saved(tmp_path)
    header, tensors = parts(path)
    for row in header["rows"]:
        row.update(pages=[], exact_start=0, ring_start=0, sink_count=0)
    for name, x in tensors.items():
        tensors[name] = x[:0] if "pages" in name else x
    write(path, header, tensors)
    refuses(path, "a ring of 64 tokens, and rows of 102")


@pytest.mark.parametrize("tokens", [20, 100])
@pytest.mark.parametrize("change", [{"ring_start": 7}, {"sink_count": 5}])
def test_rows_without_pages_are_states_of_a_table(tmp_path, tokens, change):
    _, _, path = saved(tmp_path, tokens, exact_pages=4)
    header, tensors = parts(path)
    assert not any(row["pages"] for row in header["rows"])
    for row in header["rows"]:
        row.update(change)
    write(path, header, tensors)
    refuses(path, r"rows\[0\]\.(ring_read_from=7|sink_count=5); allowed: 0")


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
    header, tensors = parts(path)
    write(path, {**header, **changes}, tensors)


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


def test_a_cache_of_other_weights_is_refused(tmp_path):
    """A fine-tuned model has the shapes of its base, and its keys mean something else."""
    path, model = tmp_path / "cache.safetensors", tiny(num_hidden_layers=2)
    cache = TightCache(QUANT, model=model)
    greedy(model, cache, prompt(1, 20), 2)
    cache.save(path)
    with pytest.raises(ValueError, match="was saved with other weights"):
        TightCache.load(path, model=tiny(num_hidden_layers=2, seed=1))
    again = TightCache.load(path, model=model)
    assert again.weights == cache.weights and TightCache.load(path).get_seq_length() == 21
    assert WeightsSample(copy.deepcopy(model).to(torch.bfloat16)).mark() == cache.weights
    again.reset()  # another model may use it next
    assert not again.weights
    greedy(model, again, prompt(1, 20), 2)
    again.save(path)
    with pytest.warns(UserWarning, match="does not say which weights it is from"):
        TightCache.load(path, model=model)


def test_the_mark_is_that_of_the_weights_which_the_cache_was_made_with(tmp_path):
    """Also where they change without a trace before it is saved, as by an adapter's merge."""
    path, model = tmp_path / "cache.safetensors", tiny(num_hidden_layers=2)
    cache, before = TightCache(QUANT, model=model), copy.deepcopy(model)
    greedy(model, cache, prompt(1, 20), 2)
    model.model.layers[0].mlp.up_proj.weight.data += 1
    copy.deepcopy(cache).save(path)
    assert TightCache.load(path, model=before).get_seq_length() == 21
    with pytest.raises(ValueError, match="was saved with other weights"):
        TightCache.load(path, model=model)


def test_a_cache_that_is_not_saved_reads_no_weights():
    """A copy for each parameter, or a number that is read, takes longer than all the rest."""
    names: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    model = tiny(num_hidden_layers=2)
    TightCache(QUANT, model=model)  # measures the model, once
    with Seen():
        TightCache(QUANT, model=model)
    assert names.count("cat") == names.count("_to_copy") == 1
    assert "_local_scalar_dense" not in names


def test_the_mark_counts_parameters_of_every_kind():
    """As it did when each was read for itself: files of before must load."""
    model = tiny(num_hidden_layers=2)
    model.scalar = torch.nn.Parameter(torch.tensor(1.5))
    model.turned = torch.nn.Parameter(torch.arange(60.0).view(6, 10).T)
    model.small = torch.nn.Parameter(torch.arange(3.0).to(torch.float8_e4m3fn), requires_grad=False)
    model.codes = torch.nn.Parameter(torch.arange(20), requires_grad=False)
    model.model.layers[0].half()
    digest, numbers = hashlib.sha256(), []
    for name, x in model.named_parameters():
        digest.update(name.encode())
        first = x.detach()[(0,) * (x.dim() - 1)][:8] if x.dim() else x.detach()[None]
        numbers.append(first.bfloat16().float())
    digest.update(torch.cat(numbers).numpy().tobytes())
    assert WeightsSample(model).mark() == f"all-{digest.hexdigest()[:16]}"


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "o_proj", "down_proj", "input_layernorm"])
def test_every_kind_of_weight_counts(part):
    """Of 291 parameters every third was looked at, and a layer has nine."""
    model = tiny(num_hidden_layers=32)
    before, early = (
        WeightsSample(model).mark(),
        WeightsSample(model, like="0123456789abcdef").mark(),
    )
    assert len(early) == 16
    with torch.no_grad():
        for name, x in model.named_parameters():
            if part in name:
                x.mul_(2)
    assert WeightsSample(model).mark() != before


def test_files_with_an_early_mark_are_compared_by_it(tmp_path):
    path, model = tmp_path / "cache.safetensors", tiny(num_hidden_layers=2)
    cache = TightCache(QUANT, model=model)
    cache._weights = WeightsSample(model, like="0123456789abcdef").mark()
    greedy(model, cache, prompt(1, 20), 2)
    cache.save(path)
    assert TightCache.load(path, model=model).get_seq_length() == 21
    with pytest.raises(ValueError, match="was saved with other weights"):
        TightCache.load(path, model=tiny(num_hidden_layers=2, seed=1))


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    from tightkv.integrations.transformers.saving import file

    _, cache, path = saved(tmp_path)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(file, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# --- files of an attacker: right checksums, wrong content ---
def parts(path):
    """Header and tensors of a file."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["tightkv"]), load_file(path)


def write(path, header, tensors):
    text = header if isinstance(header, str) else json.dumps(header)
    metadata = {"tightkv": text, "checksum": checksum(text, tensors)}
    save_file({name: x.contiguous() for name, x in tensors.items()}, path, metadata)


def put(header, where, value):
    """Set a field of a header, given as rows.0.length."""
    *names, last = [int(name) if name.isdigit() else name for name in where.split(".")]
    for name in names:
        header = header[name]
    header[last] = value


def refuses(path, match, **options):
    with pytest.raises(ValueError, match=match) as caught:
        TightCache.load(path, **options)
    assert str(path) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("rows.0.pages.0", 1000000, r"rows\[0\]\.pages\[0\]=1000000; allowed: 0 to 5"),
        ("rows.0.pages.0", -1, r"pages\[0\]=-1; allowed"),
        ("rows.0.pages.0", 1, "share a page at the same place"),
        ("rows.0.pages.0", 0.0, r"pages\[0\]=0.0; allowed: a whole number"),
        ("rows.0.pages.0", False, r"pages\[0\]=False; allowed: a whole number"),
        ("rows.1.pages", [3, 4], r"number of rows\[1\]\.pages=2; allowed: 3 to 4"),
        ("rows.0.pages", None, r"pages=None; allowed: a list"),
        ("rows.0.length", 100, r"length=102; allowed: 100"),
        ("rows.0.length", 2**62, r"length=4611686018427387904; allowed: a whole number from 0"),
        ("rows.0.ring_start", 1, r"ring_read_from=1; allowed: 64, 96"),
        ("rows.0.exact_start", 97, r"ring_valid_from=97; allowed: 38 to 96"),
        ("rows.0.sink_count", 5, r"sink_count=5; allowed: 0 to 4"),
        ("rows.0.start", 101, r"sink_count=4; allowed: 0 to 1"),
        ("rows.0.start", 2**31 - 1, r"start=2147483647; allowed"),
        ("rows.0.more", 1, "names .* allowed: exactly"),
        ("rows", [], "rows"),
        ("layers.0.tight.length", 104, r"length=104; allowed: a whole number from 102 to 102"),
        ("layers.0.tight.layout", None, r"layout=None; allowed: a list"),
        ("layers.0.tight.layout", [2, 64, "torch.float32"], "tensor 'pages' of a layer is"),
        ("layers.0.tight.layout.0", 2**40, r"layout\[0\]=1099511627776; allowed"),
        ("layers.0.tight.layout.1", 10**6, r"layout\[1\]=1000000; allowed"),
        ("layers.0.tight.layout.2", "torch.float64", r"layout\[2\]='torch.float64'; allowed"),
        ("layers.0.tight.quant.page_size", 64, "not what the cache's config gives"),
        ("layers.0.tight.quant.key_bits", 3, "not what the cache's config gives"),
        ("layers.0.kind", "logger", r"layers\[0\]\.kind='logger'; allowed: TightLayer"),
        ("layers.0.kind", "DynamicLayer", r"layers\[0\] has the names"),
        ("layers.0.kind", ["TightLayer"], r"kind=\['TightLayer'\]; allowed"),
        ("layers.0.state", {"shared": 1}, r"layers\[0\] has the names"),
        ("quant.exact_pages", 2**60, r"exact_pages"),
        ("quant", {"preset": "k4v4"}, "no config fields"),
        ("quant.key_method", "x" * 10**6, "at most 64 characters"),
        ("grows", 1, "grows=1; allowed: true or false"),
        ("format_version", True, "format_version=True"),
    ],
)
def test_hostile_fields(tmp_path, where, value, match):
    model, _, path = saved(tmp_path)
    header, tensors = parts(path)
    put(header, where, value)
    write(path, header, tensors)
    refuses(path, match)
    refuses(path, match, model=model)


@pytest.mark.parametrize(
    ("where", "value", "match"),
    [
        ("layers.0.state.update", 1, r"has not the attributes of a .*'update'"),
        ("layers.0.state.__class__", "x", "has not the attributes"),
        ("layers.0.state.cumulative_length", 10**6, r"cumulative_length=1000000; allowed: 103"),
        ("layers.0.state.sliding_window", 4, r"sliding_window|_sliding_window_tensor"),
        ("layers.0.state.is_initialized", False, "is_initialized"),
        ("layers.0.state.dtype", "torch.float16", r"keys is torch.float32"),
        ("layers.0.state.keys", 5, "attributes|null, or a tensor"),
        ("layers.0.kind", "DynamicLayer", "has not the attributes of a DynamicLayer"),
        ("layers.0.kind", "StaticSlidingWindowLayer", "kind='StaticSlidingWindowLayer'"),
    ],
)
def test_hostile_states(tmp_path, where, value, match):
    model, path = tiny("gemma3"), tmp_path / "c.safetensors"
    cache = TightCache(KVQuantConfig.preset("k4v4", page_size=32), model=model)
    greedy(model, cache, prompt(2, 100), 4)
    cache.save(path)
    header, tensors = parts(path)
    put(header, where, value)
    write(path, header, tensors)
    refuses(path, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("layers.1.pages"), "tensor 'pages' of a layer is None"),
        (lambda t: t.update({"layers.0.pages": t["layers.0.pages"][:-1]}), "'pages' of a layer"),
        (lambda t: t.update({"layers.0.ring_key": t["layers.0.ring_key"][:1]}), "'ring_key' of"),
        (lambda t: t.update({"layers.0.sink_key": t["layers.0.sink_key"].long()}), "'sink_key' of"),
        (lambda t: t.update({"layers.0.sink_key": t["layers.0.sink_key"][:, :0]}), "'sink_key' of"),
        (lambda t: t.update({"layers.0.ring_key": t["layers.0.ring_key"][:, :31]}), "'ring_key'"),
        (lambda t: t.update({"layers.0.state.kv": torch.zeros(1)}), "no part of a TightLayer"),
        (lambda t: t.update({"layers.7.pages": torch.zeros(1)}), "is of no layer"),
        (lambda t: t.update({"x": torch.zeros(0, 5)}), "is of no layer"),
    ],
)
def test_hostile_tensors(tmp_path, change, match):
    _, _, path = saved(tmp_path)
    header, tensors = parts(path)
    change(tensors)
    write(path, header, tensors)
    refuses(path, match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"rows": [], "rows": []}', "'rows' twice"),
        ('{"format_version": NaN}', "NaN"),
        ('{"format_version": 1e999}', "1e999"),
        ('{"format_version": ' + "9" * 9999 + "}", "64 bits"),
        ("[" * 200000, "nested too deeply"),
        ("[]", "allowed: an object"),
        ("{", "Expecting|property name"),
    ],
)
def test_hostile_json(tmp_path, text, match):
    _, _, path = saved(tmp_path)
    write(path, text, parts(path)[1])
    refuses(path, match)


def test_layers_of_a_header_are_not_compared_with_each_other(monkeypatch):
    """The number of layers is the file's: work per layer must not grow with it."""
    compared = 0

    class Number(int):
        __hash__ = int.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return int(self) == other

    def numbered(items):
        return ((Number(i), item) for i, item in enumerate(items))

    quant, count = KVQuantConfig(), 200
    tight = {"length": 0, "quant": quant.to_dict(), "layout": None}
    text = {
        "format_version": FORMAT_VERSION,
        "quant": quant.to_dict(),
        "fingerprint": quant.fingerprint(),
        "grows": False,
        "rows": [],
        "layers": [{"kind": "TightLayer", "tight": tight} for _ in range(count)],
    }
    monkeypatch.setattr(headers, "enumerate", numbered, raising=False)
    assert len(headers.parse_header(json.dumps(text)).layers) == count
    assert compared <= 4 * count


def test_any_bytes_in_pages_are_harmless(tmp_path):
    model, _, path = saved(tmp_path)
    header, tensors = parts(path)
    for byte in (0x7C, 0x7E, 0xFC, 0xFF):
        hostile = {n: torch.full_like(x.view(torch.uint8), byte) for n, x in tensors.items()}
        write(path, header, {n: x.view(tensors[n].dtype) for n, x in hostile.items()})
        cache = TightCache.load(path, model=model)
        with torch.no_grad():
            assert model(prompt(2, 40), past_key_values=cache).logits.shape == (2, 40, 97)


def test_layers_that_saw_different_tokens_are_not_saved(tmp_path):
    _, cache, path = saved(tmp_path)
    cache.layers[1].length += 1
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="have seen different tokens"):
        cache.save(path)
    assert path.read_bytes() == before


def test_an_empty_grown_cache_goes_on_with_a_model(tmp_path):
    model, path = tiny(), tmp_path / "c.safetensors"
    TightCache("k4v4").save(path)
    cache = TightCache.load(path, model=model)
    assert greedy(model, cache, prompt(1, 50), 3).shape == (1, 3)


def test_a_model_whose_full_layers_have_a_head_dim_of_their_own(tmp_path, monkeypatch):
    own = sliding(global_head_dim=64, vocab_size_per_layer_input=97, hidden_size_per_layer_input=16)
    monkeypatch.setitem(FAMILIES, "gemma4", lambda: transformers.Gemma4TextConfig(**own))
    model, path = tiny("gemma4"), tmp_path / "c.safetensors"
    cache = TightCache("k4v4", model=model)
    first = greedy(model, cache, prompt(1, 90), 3)
    cache.save(path)
    assert cache.layers[1].kv.layout.head_dim == 64
    resumed = TightCache.load(path, model=model)
    rest = [greedy(model, c, first[:, -1:], 3) for c in (resumed, cache)]
    assert torch.equal(*rest)


def test_a_window_of_another_model_is_refused(tmp_path):
    model, path = tiny("gemma3"), tmp_path / "c.safetensors"
    TightCache("k4v4", model=model).save(path)
    with pytest.raises(ValueError, match=r"sliding_window=16; this model has 8"):
        TightCache.load(path, model=tiny("gemma3", sliding_window=8))
