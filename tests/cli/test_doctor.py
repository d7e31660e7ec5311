import argparse
import json
import shlex
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig
from tightkv.fit.calibration import Costs
from tightkv.integrations.transformers import TightCache
from tightkv.tools.cli import main
from tightkv.tools.cli.doctor import flags
from tightkv.tools.cli.shared.config_flags import add_config_flags, config_from_args
from tightkv.tools.eval.layer_bits.diagnosis import layer_reports
from tightkv.tools.eval.layer_bits.doctor import Doctor, default_candidates
from tightkv.tools.eval.layer_bits.search import Option, as_config, fewest_bytes
from tightkv.tools.eval.tasks.quality import Schedule, measure_quality
from tightkv.tools.eval.windows import Windows
from tiny_folder import write_tiny_folder

SMALL = {"page_size": 32, "exact_pages": 1, "sinks": 1}
CANDIDATES = [KVQuantConfig.preset(n, **SMALL) for n in ("k2v2", "k3v3", "k4v4", "k8v8")]
SCHEDULE = Schedule(prefill=64, chunk=32, batch=2)
WINDOWS = Windows(prompt(2, 200), ("a", "b"))


def doctor(model, budget, **options):
    return Doctor(model, WINDOWS, budget, SCHEDULE, **options)


def sharp(layer=0):
    """A model whose layer attends sharply, so that its keys must be precise."""
    model = tiny()
    with torch.no_grad():
        model.model.layers[layer].self_attn.q_proj.weight.mul_(8)
    return model


def measured_kl(model, cfg):
    caches = {"it": lambda: TightCache(cfg, model=model)}
    return measure_quality(model, WINDOWS, caches, SCHEDULE)["it"].summary.kl


@pytest.mark.sampled
@pytest.mark.parametrize("budget", [3e-3, 1.0, 3e-4])
def test_keeps_the_budget_and_is_no_larger_than_a_preset_that_does(budget):
    model = tiny()
    found = doctor(model, budget).diagnose(CANDIDATES)
    chosen = found.chosen
    assert chosen.kl <= budget
    assert chosen.kl == pytest.approx(measured_kl(model, chosen.cfg), rel=1e-3)
    check = doctor(model, budget)
    for preset in CANDIDATES:
        plain = preset.replace(protect_keys=False)
        result = check.check(plain).tried[-1]
        assert not result.within or chosen.bytes_per_token <= result.bytes_per_token
    assert [r.layer for r in found.layers] == [0, 1, 2, 3]
    assert found.bytes_bf16 == 4 * 2 * 2 * 32 * 2


def test_tighter_budgets_take_more_bytes():
    sizes = [
        doctor(tiny(), b).diagnose(CANDIDATES).chosen.bytes_per_token for b in (1.0, 3e-3, 1e-4)
    ]
    assert sizes[0] < sizes[1] < sizes[2]


@pytest.mark.sampled
@pytest.mark.parametrize("layer", [0, 2])
def test_a_sensitive_layer_is_named_and_lifted(layer):
    model = sharp(layer)
    plain = measured_kl(model, CANDIDATES[0])
    found = doctor(model, plain / 4).diagnose(CANDIDATES)
    worst = max(found.layers, key=lambda r: r.key_kl[4])
    assert worst.layer == layer
    others = [r.key_kl[4] for r in found.layers if r.layer != layer]
    assert worst.key_kl[4] > 1.3 * max(others)  # feedback helps the sharp layer most
    bits = {n: (c.key_bits, c.value_bits) for n, c in own_configs(found.chosen.cfg, model).items()}
    assert bits[layer][0] == max(k for k, _ in bits.values()) > 2
    assert min(k for n, (k, _) in bits.items() if n != layer) < bits[layer][0]
    assert found.uniform.bytes_per_token > found.chosen.bytes_per_token
    assert found.uniform.kl <= found.budget


def own_configs(cfg, model):
    return {i: layer.cfg for i, layer in enumerate(TightCache(cfg, model=model).layers)}


@pytest.mark.sampled
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("side", ["key", "value"])
def test_estimates_agree_with_one_layer_measured_alone(side, bits):
    model = sharp()
    found = doctor(model, 1.0).check(KVQuantConfig.preset("k4v4", protect_keys=False, **SMALL))
    for report in found.layers[:2]:
        own = f"k{bits}v16" if side == "key" else f"k16v{bits}"
        alone = KVQuantConfig(
            key_bits=16,
            value_bits=16,
            layer_bits=f"{report.layer}={own}",
            protect_keys=False,
            **SMALL,
        )
        costs = report.key_kl if side == "key" else report.value_kl
        assert 1 / 3 < costs[bits] / measured_kl(model, alone) < 3


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2"])
def test_other_attention_is_estimated_too(family):
    model = tiny(family)
    cfg = KVQuantConfig.preset("k3v3", protect_keys=False, **SMALL)
    result = doctor(model, 1.0).check(cfg).tried[0]
    assert 1 / 4 < result.predicted_kl / result.kl < 4
    assert all(p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == "tightkv"


def test_blesses_nothing_that_breaks_the_model():
    found = doctor(tiny(), 1e-12).diagnose(CANDIDATES)
    assert found.chosen is None and found.uniform is None
    assert found.tried[-1].name == "k8v8"
    assert doctor(tiny(), 1e-4).check(CANDIDATES[0]).chosen is None


def test_measures_what_it_says():
    """Automatic protection would hide what bits do; a judged config is used as it is given."""
    found = doctor(sharp(), 3e-3).diagnose(CANDIDATES)
    assert all(not m.cfg.protect_keys for m in found.tried)
    given = KVQuantConfig.preset("k4v4", **SMALL)
    assert doctor(tiny(), 1.0).check(given).tried[0].cfg == given


class Bar:
    """Stops the work as Ctrl-C would, at the step it is told to."""

    def __init__(self, titles, stop_in):
        self.titles, self.stop_in = titles, stop_in

    def __call__(self, title, total):
        self.titles.append(title)
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def advance(self, steps):
        if self.stop_in == len(self.titles):
            raise KeyboardInterrupt


def test_an_interruption_keeps_what_was_found():
    for stop_in, tried in ((1, 0), (2, 0), (3, 1)):
        bar = Bar([], stop_in)
        found = doctor(tiny(), 3e-4, bars=bar).diagnose(CANDIDATES)
        assert found.interrupted and len(found.tried) == tried
        assert bool(found.layers) == (stop_in > 1)
    assert found.chosen is not None and found.chosen.kl <= 3e-4
    model = tiny()
    doctor(model, 3e-4, bars=Bar([], 1)).diagnose(CANDIDATES)
    assert model.config._attn_implementation == "tightkv"


def test_very_sensitive_layers_are_named():
    kls = {0: 1e-4, 1: 2e-4, 2: 3e-3, 3: 1e-4}
    costs = {n: Costs({4: kl}, {4: 0.0}) for n, kl in kls.items()}
    warnings = [report.warnings for report in layer_reports(costs)]
    assert warnings == [(), (), ("20 times as sensitive as the median layer",), ()]


def test_only_full_attention_layers_are_searched():
    found = doctor(tiny("gemma3"), 1e-4).diagnose(CANDIDATES)
    assert [r.layer for r in found.layers] == [1, 3]
    assert set(found.chosen.cfg.bits_of_layers()) <= {1, 3}


def test_bad_budget():
    with pytest.raises(ValueError, match="budget=0"):
        doctor(tiny(), 0)


def test_candidates_are_the_presets():
    assert {c.name for c in default_candidates()} >= {"k2v2", "k4v4", "k8v8"}


# --- the search ---
def random_layers(seed, count=4):
    rng = torch.Generator().manual_seed(seed)
    layers = {}
    for n in range(count):
        key, value = torch.rand(2, generator=rng).mul(8).exp().tolist()
        layers[n] = [
            Option((k, v), 10.0 * k + 10.0 * v, key / 4**k + value / 4**v)
            for k, v in product((2, 3, 4, 8), repeat=2)
        ]
    return layers


@pytest.mark.parametrize("seed", range(5))
def test_search_is_close_to_the_best_there_is(seed):
    layers = random_layers(seed, count=2)
    for target in (0.01, 1.0, 30.0):
        every = [
            sum(o.size for o in pair)
            for pair in product(*layers.values())
            if sum(o.kl for o in pair) <= target
        ]
        chosen = fewest_bytes(layers, target)
        if not every:
            assert chosen is None
            continue
        assert sum(o.kl for o in chosen.values()) <= target
        assert sum(o.size for o in chosen.values()) <= min(every) + 10


def test_search_beats_every_uniform_choice():
    layers = random_layers(7, count=12)
    for bits in product((2, 3, 4, 8), repeat=2):
        uniform = [next(o for o in options if o.bits == bits) for options in layers.values()]
        chosen = fewest_bytes(layers, sum(o.kl for o in uniform))
        assert sum(o.size for o in chosen.values()) <= sum(o.size for o in uniform)


def test_config_of_a_choice():
    bits = {1: (4, 4), 3: (8, 4), 5: (4, 4)}
    cfg = as_config(KVQuantConfig(), bits)
    assert (cfg.key_bits, cfg.value_bits, cfg.layer_bits) == (4, 4, "3=k8v4")
    assert not cfg.protect_keys


# --- the command ---
KEYS = {
    "schema",
    "tightkv",
    "budget",
    "interrupted",
    "chosen",
    "kv_quant",
    "bytes_per_token_bf16",
    "uniform",
    "tried",
    "layers",
}
TRIED = {"name", "layer_bits", "predicted_kl", "kl", "top1", "bytes_per_token", "within"}
LAYER = {"layer", "key_kl", "value_kl", "warnings"}


def test_command_writes_a_config_every_command_reads(tmp_path, capsys):
    folder = write_tiny_folder(tmp_path / "model")
    text, out = tmp_path / "text.txt", tmp_path / "config.json"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    common = ["doctor", str(folder), "--text", str(text), "--window", "480", "--windows", "1"]
    assert main([*common, "--budget", "5", "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert set(report) == KEYS and report["chosen"] == "k2v2"
    assert all(set(row) == TRIED for row in report["tried"])
    assert all(set(row) == LAYER for row in report["layers"]) and len(report["layers"]) == 2
    assert KVQuantConfig.parse(out) == KVQuantConfig.from_dict(report["kv_quant"])
    assert "layers: " in printed.err
    assert "measuring k2v2: " in printed.err

    out.unlink()
    judged = ["--preset", "k2v2", "--budget", "1e-9", "--out", str(out)]
    assert main([*common, *judged]) == 1
    assert "none is recommended" in capsys.readouterr().out
    assert not out.exists()


def test_printed_flags_are_the_config(tmp_path, capsys):
    folder = write_tiny_folder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    common = ["doctor", str(folder), "--text", str(text), "--window", "480", "--windows", "1"]
    assert main([*common, "--budget", "1e-4", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)
    assert main([*common, "--budget", "1e-4"]) == 0
    flags = capsys.readouterr().out.strip().splitlines()[-1].removeprefix("Flags: ").split()
    assert main([*common, "--budget", "1e-4", "--json", *flags]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["kv_quant"] == chosen["kv_quant"]
    kls = [m["kl"] for m in chosen["tried"] if m["name"] == chosen["chosen"]]
    assert judged["tried"][0]["kl"] in kls


def test_flags_of_every_kind_of_field():
    options = {"check_finite": True, "protect_keys": False, "calibration": "my file.safetensors"}
    options |= {"outlier_share": 0.5, "outlier_channels": (1, 2), "codebook": "gaussian"}
    cfg = KVQuantConfig.preset("k3v3", **options)
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    args = parser.parse_args(shlex.split(flags(SimpleNamespace(cfg=cfg))))
    assert config_from_args(args) == cfg


def test_command_refuses_bad_input_early(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "missing")]) == 2
    folder = write_tiny_folder(tmp_path / "model")
    assert main(["doctor", str(folder), "--out", str(tmp_path / "no" / "c.json")]) == 2
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert main(["doctor", str(folder), "--text", str(short), "--window", "480"]) == 2
    assert main(["doctor", str(folder), "--window", "5000"]) == 2
    errors = capsys.readouterr().err
    assert "--window is 5000; the model was made for" in errors
    assert "fewer than a window of 480" in errors and "does not exist" in errors
