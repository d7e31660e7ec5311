"""Calibrations: measured, written, read back, refused for other models, and used everywhere."""

import json
import random
import shutil
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.files.tensor_file import checksum, read_file
from tightkv.fit import Checkpoint, Layers, fit
from tightkv.fit.calibration import (
    Calibration,
    bundled_names,
    load_calibration,
    own_heads,
    save_calibration,
)
from tightkv.fit.calibration import file as file_module
from tightkv.fit.fingerprint import folder_fingerprint
from tightkv.integrations.transformers.fitting import CalibrationWarning, loaded_fingerprint
from tightkv.integrations.vllm.options import checkpoint_folder
from tightkv.math.feedback import QueryMetric
from tightkv.model_shape import LayerShape
from tightkv.pages.layout import page_layout
from tightkv.tools.cli import main
from tightkv.tools.eval.layer_bits import sensitivity
from tightkv.tools.eval.layer_bits.calibrate import GROWTH, PRESETS, Calibrator
from tightkv.tools.eval.layer_bits.search import Option, least_kl
from tightkv.tools.eval.layer_bits.sensitivity import moments, record
from tightkv.tools.eval.tasks.quality import Schedule, measure_quality
from tightkv.tools.eval.text import Text, language_reference
from tightkv.tools.eval.windows import Windows, cut_windows
from tightkv.tools.model_loading.load import load_model
from tiny_folder import write_tiny_folder

SCHEDULE = Schedule(prefill=200, chunk=64, batch=4)


def measured(model, seed=5, name="tiny"):
    windows = Windows(prompt(2, 400, seed=seed), ("a", "b"))
    return Calibrator(model, windows, prefill=200).run(name, [Text("a", "b")])


@pytest.fixture(scope="module")
def model():
    """Queries that lie mostly in a few directions, as those of real models do."""
    made = tiny()
    with torch.no_grad():
        for layer in made.model.layers:
            weight = layer.self_attn.q_proj.weight
            weight.mul_(torch.logspace(0.5, -1.0, 32).repeat(4)[:, None] * 3)
            layer.self_attn.v_proj.weight.mul_(0.3)
    return made


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("calibration") / "tiny.safetensors"
    save_calibration(measured(model), path)
    return path


def kl(model, **options):
    windows = Windows(prompt(4, 500, seed=77), ("a",) * 4)
    cfg = KVQuantConfig.from_dict(options)
    caches = {"it": lambda: TightCache(cfg, model=model)}
    return measure_quality(model, windows, caches, SCHEDULE)["it"].summary.kl


def used_bits(cache):
    return {i: (x.cfg.key_bits, x.cfg.value_bits) for i, x in enumerate(cache.layers)}


# --- what is measured ------------------------------------------------------------------------
@pytest.mark.parametrize(("preset", "same"), [("k4v4", "0=k4v4"), ("k3v3", "0=k3v3")])
def test_answers_are_nearer_at_no_more_bytes(model, file, preset, same):
    """On text that was not measured on: metrics alone, bits alone and both."""
    plain = kl(model, preset=preset, feedback="off")
    bits = load_calibration(str(file)).layer_bits[preset]
    assert kl(model, preset=preset, calibration=str(file), layer_bits=same) < 0.9 * plain
    only_bits = kl(model, preset=preset, layer_bits=bits, feedback="off")
    assert only_bits < 0.7 * plain
    assert kl(model, preset=preset, calibration=str(file)) < min(only_bits, 0.6 * plain)

    def size(cfg):
        layers = TightCache(cfg, model=model).layers
        return sum(page_layout(x.cfg, 2, 32).bytes_per_token for x in layers)

    assert size({"preset": preset, "calibration": str(file)}) <= size(preset)


def test_the_metric_knows_which_errors_of_keys_cost_most(model):
    """Errors along its directions, as `estimate` computes their KL through attention."""
    cfg, first = KVQuantConfig(exact_pages=1, sinks=0), 200
    layers, _ = record(model, prompt(1, 400), [1], first)
    layer = layers[1]
    metric = moments(layer, cfg, first).metric
    generator = torch.Generator().manual_seed(1)
    direction = torch.linalg.eigh(metric).eigenvectors[:, :, [0, -1]]  # what costs least and most
    costs = []
    for which in range(2):
        sign = torch.randn(1, 2, 384, 1, generator=generator)
        error = 1e-2 * sign * direction[:, None, :, which].float()
        by_key, _ = estimate_of(layer, cfg, first, error)
        costs.append(by_key)
    sizes = torch.linalg.eigvalsh(metric)
    assert costs[0] < 0.1 * costs[1] and (sizes[:, 0] < 0.1 * sizes[:, -1]).all()


def estimate_of(layer, cfg, first, error):
    """`estimate` with this error of the keys in place of that of their codes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sensitivity, "coded", lambda cfg, k, v, *known: (k + error, v))
        by_key, by_value = sensitivity.estimate(layer, [cfg], first)
    return by_key[cfg.key_bits], by_value[cfg.key_bits]


def test_keys_of_noisy_layers_keep_the_bits_that_protection_gives_them():
    model = tiny("qwen2")
    for side in ("q_proj", "k_proj"):
        getattr(model.model.layers[2].self_attn, side).bias.data.fill_(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measured(model)
        for preset in PRESETS:
            plain = KVQuantConfig.preset(preset)
            own = plain.replace(layer_bits=found.layer_bits[preset])
            bits = used_bits(TightCache(own, model=model))
            assert bits[2][0] == 8
            sizes = [
                sum(
                    page_layout(cfg.replace(key_bits=k, value_bits=v), 2, 16).bytes_per_token
                    for k, v in used_bits(TightCache(cfg, model=model)).values()
                )
                for cfg in (own, plain)
            ]
            growth = GROWTH if preset == "k2v2" else 0
            assert sizes[0] <= sizes[1] * (1 + growth)


def test_least_kl_of_a_size():
    options = [Option((2, 2), 2, 9.0), Option((3, 3), 3, 3.0), Option((4, 4), 4, 2.0)]
    worse = [Option(o.bits, o.size, 10 * o.kl) for o in options]
    chosen = least_kl({0: options, 1: worse}, 6)
    assert {n: o.bits for n, o in chosen.items()} == {0: (2, 2), 1: (4, 4)}
    assert sum(o.size for o in chosen.values()) <= 6
    assert least_kl({0: options, 1: worse}, 3.9) is None


# --- files -----------------------------------------------------------------------------------
def test_round_trip(model, tmp_path):
    found = measured(model)
    path = tmp_path / "a.safetensors"
    save_calibration(found, path)
    back = load_calibration(str(path))
    assert isinstance(back, Calibration)
    assert (back.fingerprint, back.layer_bits, back.measured) == (
        found.fingerprint,
        found.layer_bits,
        found.measured,
    )
    for n in found.metrics:
        whole, read = found.metrics[n].value, back.metrics[n].value
        size = whole.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        torch.testing.assert_close(read.double(), whole / size, atol=5e-3, rtol=5e-3)
        assert back.costs[n].key[3] == pytest.approx(found.costs[n].key[3], rel=1e-3)
        assert torch.equal(back.centers[n].key, found.centers[n].key)
        assert torch.equal(back.centers[n].value, found.centers[n].value)
    assert path.stat().st_size < 4 * 2 * 32 * 33 + 4000
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def rewritten(file, tmp_path, change_header=None, change_tensors=None, right=True):
    """The file with other contents, and a checksum that fits them unless `right` is False."""
    metadata, tensors = read_file(file)
    header = json.loads(metadata["tightkv_calibration"])
    if change_header:
        header = change_header(header) or header
    if change_tensors:
        change_tensors(tensors)
    text = json.dumps(header)
    digest = checksum(text, tensors) if right else metadata["checksum"]
    path = tmp_path / "changed.safetensors"
    path.write_bytes(save(tensors, {"tightkv_calibration": text, "checksum": digest}))
    return str(path)


def put(name, value):
    return lambda header: header.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("format_version", 3), "format version 3; this tightkv reads versions 1 and 2"),
        (put("format_version", "1"), "format_version"),
        (put("fingerprint", 5), "fingerprint=5; allowed: a string"),
        (put("layer_bits", {"k3v3": "0=k5v4"}), "layer 0"),
        (put("layer_bits", {"k3v3": "77=k4v4"}), "names layer 77, of which it has no metric"),
        (put("layer_bits", {"k9v9": ""}), "unknown preset in layer_bits 'k9v9'"),
        (put("layer_bits", []), "allowed: an object"),
        (put("costs", {}), "costs"),
        (put("costs", {str(n): {"key": [1], "value": [1] * 4} for n in range(4)}), "4 numbers"),
        (put("costs", {str(n): {"key": [-1.0] * 4, "value": [1] * 4} for n in range(4)}), "number"),
        (put("texts", [["a"]]), "allowed"),
        (put("tokens", 0), "tokens=0"),
        (put("model", "x" * 100_000), "at most"),
        (lambda header: header.update(more=1), "allowed: exactly"),
        (lambda header: header.pop("texts") and None, "allowed: exactly"),
        (lambda header: [1], "allowed: an object"),
    ],
)
def test_hostile_headers_are_refused(file, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_calibration(rewritten(file, tmp_path, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update({"root.0": t["root.0"].float()}), "float32"),
        (lambda t: t.update({"root.0": t["root.0"][:, :-1].contiguous()}), "numbers per head"),
        (lambda t: t.update({"root.0": t["root.0"][0]}), "allowed: float16, KV heads"),
        (lambda t: t.update({"root.0": torch.full_like(t["root.0"], torch.nan)}), "NaN or Inf"),
        (lambda t: t.update({"root.99999": t["root.0"].clone()}), "root.99999"),
        (lambda t: t.update({"root.01": t["root.0"].clone()}), "root.01"),
        (lambda t: t.update({"pages": t["root.0"].clone()}), "'pages'"),
        (lambda t: t.clear(), "it has no metrics"),
        (lambda t: t.update({"centers.0": t["centers.0"].float()}), "allowed: bfloat16"),
        (lambda t: t.update({"centers.0": t["centers.0"][:, :1].contiguous()}), "centers.0"),
        (lambda t: t.update({"centers.0": torch.full_like(t["centers.0"], torch.inf)}), "Inf"),
        (lambda t: t.update({"centers.9": t["centers.0"].clone()}), "centers.9"),
    ],
)
def test_hostile_tensors_are_refused(file, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_calibration(rewritten(file, tmp_path, None, change))


def test_damage_is_found(file, tmp_path):
    changed = rewritten(file, tmp_path, put("model", "other"), right=False)
    with pytest.raises(ValueError, match="damaged: its checksum does not match"):
        load_calibration(changed)
    data, path = file.read_bytes(), tmp_path / "cut.safetensors"
    draw = random.Random(0)
    for _ in range(200):
        at = draw.randrange(len(data))
        cut = data[:at] if draw.random() < 0.3 else data[:at] + b"\x00\xff"[at % 2 :][:1]
        cut = cut if len(cut) <= at else cut + data[at + 1 :]
        if cut == data:
            continue
        path.write_bytes(cut)
        with pytest.raises(ValueError):
            load_calibration(str(path))


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(save({"a": torch.zeros(3)}))
    with pytest.raises(ValueError, match="is no calibration"):
        load_calibration(str(path))
    with pytest.raises(FileNotFoundError, match="tightkv calibrate MODEL -o"):
        load_calibration(str(tmp_path / "none.safetensors"))
    with pytest.raises(ValueError, match="unknown calibration 'nothing'"):
        load_calibration("nothing")


def test_any_numbers_give_a_usable_metric(model, file, tmp_path):
    """Factors that no measurement would give: the cache works, for their product is a metric."""
    extreme = rewritten(
        file, tmp_path, None, lambda t: t.update({"root.0": torch.full_like(t["root.0"], 65504.0)})
    )
    cache = TightCache({"preset": "k3v3", "calibration": extreme}, model=model)
    with torch.no_grad():
        assert model(prompt(1, 300), past_key_values=cache).logits.isfinite().all()


# --- for which model -------------------------------------------------------------------------
def test_another_model_is_refused(file):
    other = tiny(num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"measured on tiny; .* is another model.*calibrate"):
        TightCache({"preset": "k3v3", "calibration": str(file)}, model=other)
    changed = tiny()
    changed.model.layers[1].input_layernorm.weight.data[3] += 0.5
    with pytest.raises(ValueError, match="is another model, or has other weights"):
        TightCache({"preset": "k3v3", "calibration": str(file)}, model=changed)


def test_shapes_are_compared_too(file, tmp_path, model):
    wrong = rewritten(
        file,
        tmp_path,
        None,
        lambda t: t.update(
            {
                "root.0": t["root.0"][:1].contiguous(),
                "centers.0": t["centers.0"][:, :1].contiguous(),
            }
        ),
    )
    with pytest.raises(ValueError, match="layer 0 has 1 KV heads of 32 channels"):
        TightCache({"preset": "k3v3", "calibration": wrong}, model=model)


def test_a_calibration_needs_the_model(file, model):
    for given in (None, model.config):
        with pytest.raises(ValueError, match="needs the model"):
            TightCache({"preset": "k3v3", "calibration": str(file)}, model=given)


def test_a_folder_and_its_loaded_model_are_the_same(tmp_path):
    folder = write_tiny_folder(tmp_path / "m")
    loaded = {
        loaded_fingerprint(load_model(str(folder), dtype=dtype, device="cpu")[0])
        for dtype in ("float32", "bfloat16")
    }
    assert loaded == {folder_fingerprint(folder)}
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.post_attention_layernorm.weight"][5] += 1
    (folder / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    assert folder_fingerprint(folder) not in loaded


# --- what a config makes of it ---------------------------------------------------------------
def test_bits_of_the_file_are_used_unless_the_user_names_layers(model, file):
    found = load_calibration(str(file))
    options = {"preset": "k3v3", "calibration": str(file)}
    cache = TightCache(options, model=model)
    assert cache.quant.layer_bits == found.layer_bits["k3v3"] != ""
    named = TightCache({**options, "layer_bits": "1=k8v8"}, model=model)
    assert named.quant.layer_bits == "1=k8v8"
    protected = TightCache({**options, "protected_first": 1}, model=model)
    assert used_bits(protected) == {0: (8, 8), 1: (3, 3), 2: (3, 3), 3: (3, 3)}
    for each in (cache, named, protected):
        assert all(x.metric is found.metrics[i] for i, x in enumerate(each.layers))


def test_bits_that_were_not_measured_are_said_once(model, file):
    options = {"preset": "k4v2", "calibration": str(file)}
    with pytest.warns(CalibrationWarning, match="no bits of layers for k4v2"):
        cache = TightCache(options, model=model)
    assert used_bits(cache) == dict.fromkeys(range(4), (4, 2))
    assert cache.layers[0].metric is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TightCache(options, model=model)


def test_pages_do_not_know_of_it(model, file, tmp_path):
    cfg = KVQuantConfig.preset("k3v3")
    with_it = cfg.replace(calibration=str(file))
    assert with_it.fingerprint() == cfg.fingerprint()
    assert with_it.for_layer(0, 1) == cfg.for_layer(0, 1)
    cache = TightCache(with_it, model=model)
    ids = prompt(1, 330)
    with torch.no_grad():
        model(ids[:, :300], past_key_values=cache)
    cache.save(tmp_path / "cache")
    back = TightCache.load(tmp_path / "cache", model=model)
    assert back.quant == cache.quant.replace(calibration="")
    assert back.calibration is None
    again = TightCache.load(tmp_path / "cache", model=model, calibration=str(file))
    with torch.no_grad():
        for each in (cache, again):
            model(ids[:, 300:], past_key_values=each)
    for one, other, plain in zip(cache.layers, again.layers, back.layers, strict=True):
        assert torch.equal(one.kv.feedback, other.kv.feedback)
        assert not torch.equal(one.kv.feedback, plain.kv.feedback)


def test_auto_finds_ready_files(model, file, tmp_path, monkeypatch):
    ready = tmp_path / "ready"
    ready.mkdir()
    (ready / "Tiny.safetensors").write_bytes(file.read_bytes())
    monkeypatch.setattr(file_module, "BUNDLED_FOLDER", ready)
    for name in ("auto", "Tiny"):
        cache = TightCache({"preset": "k3v3", "calibration": name}, model=model)
        assert cache.calibration is not None and cache.quant.layer_bits
    with pytest.warns(CalibrationWarning, match="is none of Tiny; nothing is changed"):
        cache = TightCache(
            {"preset": "k3v3", "calibration": "auto"}, model=tiny(num_hidden_layers=3)
        )
    assert cache.calibration is None and not cache.quant.layer_bits


@pytest.mark.parametrize("name", bundled_names())
def test_ready_files_can_be_read(name):
    found = load_calibration(name)
    assert found.measured.model.rpartition("/")[2] == name
    assert set(found.layer_bits) == set(PRESETS)
    assert (file_module.BUNDLED_FOLDER / f"{name}.safetensors").stat().st_size < 2_000_000


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "Qwen2.5-Coder-1.5B-Instruct"])
def test_two_bits_get_a_little_more_where_it_pays(name):
    """No layer has fewer than two bits to give, so the preset takes up to 5% more bytes."""
    found = load_calibration(name)
    preset = KVQuantConfig.preset("k2v2")
    cfg = found.applied(preset)
    size = {
        c: sum(
            page_layout(c.for_layer(n, len(found.metrics)), *m.value.shape[:2]).bytes_per_token
            for n, m in found.metrics.items()
        )
        for c in (preset, cfg)
    }
    assert 1.02 < size[cfg] / size[preset] <= 1 + GROWTH


@pytest.mark.thorough
@pytest.mark.slow
def test_the_bundled_model_is_nearer_on_other_text(preset="k3v3"):
    """Its ready file was measured on other text than this."""
    bundled, tokenizer = load_model(None, dtype="float32", device="cpu")
    windows = cut_windows(tokenizer, [language_reference()], 448, 1)
    configs = {
        "probed": KVQuantConfig.preset(preset),
        "calibrated": KVQuantConfig.preset(preset, calibration="auto"),
    }
    caches = {name: partial(TightCache, cfg, model=bundled) for name, cfg in configs.items()}
    found = measure_quality(bundled, windows, caches, Schedule(prefill=256, chunk=64))
    kls = {name: quality.summary.kl for name, quality in found.items()}
    assert kls["calibrated"] < 0.7 * kls["probed"]
    assert found["calibrated"].bytes_held <= found["probed"].bytes_held


def test_the_default_device_does_not_matter(file, tmp_path):
    wanted = load_calibration(str(file))
    copied = shutil.copy(file, tmp_path / "copied.safetensors")  # a file that is known is not read
    with torch.device("meta"):
        found = load_calibration(str(copied))
    assert all(torch.equal(found.metrics[n].value, m.value) for n, m in wanted.metrics.items())


def test_the_default_dtype_does_not_matter(file, tmp_path):
    """Metrics that were made in bfloat16 would change codes without a word."""
    wanted = load_calibration(str(file))
    copied = shutil.copy(file, tmp_path / "copied.safetensors")  # a file that is known is not read
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = load_calibration(str(copied))
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(found.metrics[n].value, m.value) for n, m in wanted.metrics.items())


# --- engines ---------------------------------------------------------------------------------
def test_ranks_take_their_own_heads():
    metric = torch.arange(8.0)[:, None, None].expand(8, 4, 4)
    taken = [own_heads(metric, rank, 4)[:, 0, 0].tolist() for rank in range(4)]
    assert taken == [[0, 1], [2, 3], [4, 5], [6, 7]]
    taken = [own_heads(metric[:2], rank, 4)[:, 0, 0].tolist() for rank in range(4)]
    assert taken == [[0], [0], [1], [1]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder, and a calibration of it."""
    where = tmp_path_factory.mktemp("checkpoint")
    folder = write_tiny_folder(where / "m")
    own = load_model(str(folder), dtype="float32", device="cpu")[0]
    save_calibration(measured(own, name="own"), where / "own.safetensors")
    return folder, where / "own.safetensors"


def test_layers_of_an_engine_get_the_metrics_and_centers_of_their_heads(checkpoint):
    folder, path = checkpoint
    whole, cfg = load_calibration(str(path)), KVQuantConfig.preset("k3v3", calibration=str(path))
    shapes = {n: LayerShape("full", 1, 32, 32) for n in (0, 1, -3)}
    for rank in range(2):
        source = Checkpoint(folder, "m", rank, 2)
        found = fit(source, cfg, Layers(shapes, lambda cfg: None))
        first, last, unknown = found.layers.values()
        assert unknown.metric is None and unknown.centers is None
        for n, own in ((0, first), (1, last)):
            metric = QueryMetric(whole.metrics[n].value[rank : rank + 1]).scaled(own.scale)
            assert torch.equal(own.metric.value, metric.value)
            assert torch.equal(own.centers.key, whole.centers[n].key[rank : rank + 1])


def test_an_engine_compares_the_checkpoint(checkpoint, tmp_path):
    folder, path = checkpoint
    other = write_tiny_folder(tmp_path / "other", num_hidden_layers=3)
    cfg = KVQuantConfig.preset("k3v3", calibration=str(path))

    def find(cfg, model, load_format="auto"):
        config = SimpleNamespace(
            model_config=SimpleNamespace(model=str(model), revision=None),
            load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        )
        return Checkpoint(checkpoint_folder(config), str(model)).find_calibration(cfg)

    assert find(cfg, folder).measured.model == "own"
    assert find(cfg.replace(calibration=""), folder) is None
    with pytest.raises(ValueError, match="measured on own"):
        find(cfg, other)
    with pytest.raises(ValueError, match="cannot be compared with the model"):
        find(cfg, folder, "dummy")
    (other / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"cannot be compared with .*Leave calibration out"):
        find(cfg, other)


# --- the command line ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder_and_file(tmp_path_factory):
    """A folder, and what the command measures of it."""
    where = tmp_path_factory.mktemp("cli")
    folder, text = write_tiny_folder(where / "m", max_position_embeddings=1024), where / "a.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 60)
    out = where / "m.safetensors"
    words = ["calibrate", str(folder), "--text", str(text), "--tokens", "1024", "-o", str(out)]
    assert main([*words, "--name", "owner/m", "--json"]) == 0
    return folder, out, text


def test_the_command_writes_a_file_that_says_where_it_is_from(folder_and_file, capsys):
    folder, out, text = folder_and_file
    found = load_calibration(str(out))
    assert found.measured.model == "owner/m" and found.measured.tokens == 1024
    ((name, digest),) = found.measured.texts
    assert name == "a.txt" and len(digest) == 64
    assert main(["generate", str(folder), "--prompt", "abc", "--calibration", str(out)]) == 0
    words = ["eval", str(folder), "--tasks", "quality", "--text", str(text), "--calibration"]
    sizes = ["--window", "500", "--windows", "2", "--presets", "k3v3", "--fresh", "--json"]
    capsys.readouterr()
    assert main([*words, str(out), *sizes]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["config"]["calibration"] for row in rows] == ["", str(out)]
    assert rows[1]["config"]["layer_bits"] == found.layer_bits["k3v3"]
    assert rows[1]["quality"]["kl"] != rows[0]["quality"]["kl"]


def test_doctor_reads_it_instead_of_measuring_layers(folder_and_file, capsys, monkeypatch):
    folder, out, text = folder_and_file

    def refuse(*args, **options):
        raise AssertionError("the doctor measured layers")

    monkeypatch.setattr("tightkv.tools.eval.layer_bits.sensitivity.record", refuse)
    words = ["doctor", str(folder), "--text", str(text), "--window", "500", "--windows", "1"]
    assert main([*words, "--calibration", str(out), "--budget", "1.0", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kv_quant"]["calibration"] == str(out)
    found = load_calibration(str(out))
    layer = told["layers"][0]
    assert layer["key_kl"]["3"] == found.costs[0].key[3]
    measured_bits = {m["layer_bits"] for m in told["tried"]}
    assert "" not in measured_bits  # else the file's bits would be taken for the doctor's


def test_serve_refuses_another_models(folder_and_file, tmp_path, capsys):
    folder, out, _ = folder_and_file
    assert main(["serve", str(folder), "--calibration", str(out), "--dry-run"]) == 0
    assert str(out) in capsys.readouterr().out
    other = write_tiny_folder(tmp_path / "other", num_hidden_layers=3)
    assert main(["serve", str(other), "--calibration", str(out), "--dry-run"]) == 2
    assert "measured on owner/m" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "100"], "--tokens 100; at least 512"),
        (["-o", "a.json"], "a calibration is a .safetensors file"),
        (["-o", "missing/a.safetensors"], "the folder of"),
    ],
)
def test_wrong_arguments(folder_and_file, capsys, words, message):
    assert main(["calibrate", str(folder_and_file[0]), *words]) == 2
    assert message in capsys.readouterr().err
