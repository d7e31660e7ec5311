import json

import pytest
import torch

from models import prompt, tiny
from tightkv import KVQuantConfig
from tightkv.cli import main
from tightkv.eval.doctor import Doctor, default_candidates
from tightkv.eval.quality import Schedule
from tightkv.eval.windows import Windows
from tiny_folder import write_tiny_folder

SMALL = {"page_size": 32, "exact_pages": 1, "sinks": 1}
PROBE = KVQuantConfig.preset("k2v2", **SMALL)
CANDIDATES = [KVQuantConfig.preset(n, **SMALL) for n in ("k2v2", "k3v3", "k4v4", "k8v8")]


def doctor(model, budget):
    windows = Windows(prompt(2, 200), ("a", "b"))
    return Doctor(model, windows, budget, Schedule(prefill=64, chunk=32, batch=2))


def test_takes_the_smallest_config_within_the_budget():
    model = tiny()
    loose, tight = (doctor(model, b).diagnose(PROBE, CANDIDATES) for b in (1.0, 3e-4))
    assert loose.chosen.name == "k2v2"
    assert tight.chosen.kl <= 3e-4
    assert tight.chosen.bytes_per_token > loose.chosen.bytes_per_token
    for other in tight.tried:
        if other.bytes_per_token < tight.chosen.bytes_per_token:
            assert other.kl > 3e-4
    assert [r.layer for r in tight.layers] == [0, 1, 2, 3]
    assert all(r.kl > 0 for r in tight.layers)


def test_blesses_nothing_that_breaks_the_model():
    found = doctor(tiny(), 1e-12).diagnose(PROBE, CANDIDATES)
    assert found.chosen is None and len(found.tried) == len(CANDIDATES)
    assert doctor(tiny(), 1e-4).check(CANDIDATES[0], PROBE).chosen is None


def test_one_bad_layer_is_named_and_protected():
    model = tiny()
    with torch.no_grad():  # layer 0 attends sharply, so its keys must be precise
        model.model.layers[0].self_attn.q_proj.weight.mul_(6)
    plain = doctor(model, 1.0).measure(CANDIDATES[0]).kl
    found = doctor(model, 0.5 * plain).diagnose(PROBE, [CANDIDATES[0], CANDIDATES[3]])
    worst = max(found.layers, key=lambda r: r.kl)
    assert worst.layer == 0 and any("as sensitive" in w for w in worst.warnings)
    assert found.chosen.cfg.protected_first == 1 and found.chosen.cfg.key_bits == 2
    assert found.chosen.bytes_per_token < found.tried[1].bytes_per_token


def test_large_key_biases_are_named():
    model = tiny("qwen2", hidden_size=256, initializer_range=0.05)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.bias.view(2, 2, 32)[:, :, 28:].fill_(30.0)
    reports = doctor(model, 1.0).layers(PROBE)
    assert [bool(r.warnings) for r in reports] == [False, False, True, False]
    assert "page mean" in reports[2].warnings[-1]
    assert reports[2].key_bias == 30.0 and reports[0].key_bias < 1


def test_only_full_attention_layers_are_probed():
    assert [r.layer for r in doctor(tiny("gemma3"), 1.0).layers(PROBE)] == [1, 3]


def test_bad_budget():
    with pytest.raises(ValueError, match="budget=0"):
        doctor(tiny(), 0)


def test_candidates_are_the_presets():
    assert {c.name for c in default_candidates()} >= {"k2v2", "k4v4", "k8v8"}


KEYS = {"budget", "chosen", "kv_quant", "tried", "layers"}
TRIED = {"name", "kl", "top1", "bytes_per_token", "within"}
LAYER = {"layer", "kl", "mean_share", "outlier_head", "key_bias", "warnings"}


def test_command_writes_a_config_every_command_reads(tmp_path, capsys):
    folder = write_tiny_folder(tmp_path / "model")
    text, out = tmp_path / "text.txt", tmp_path / "config.json"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    common = ["doctor", str(folder), "--text", str(text), "--window", "480", "--windows", "1"]
    assert main([*common, "--budget", "5", "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == KEYS and report["chosen"] == "k2v2"
    assert all(set(row) == TRIED for row in report["tried"])
    assert all(set(row) == LAYER for row in report["layers"]) and len(report["layers"]) == 2
    assert KVQuantConfig.parse(out) == KVQuantConfig.from_dict(report["kv_quant"])

    out.unlink()
    judged = ["--preset", "k2v2", "--budget", "1e-9", "--out", str(out)]
    assert main([*common, *judged]) == 1
    assert "none is recommended" in capsys.readouterr().out
    assert not out.exists()


def test_command_refuses_bad_input_early(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "missing")]) == 2
    folder = write_tiny_folder(tmp_path / "model")
    assert main(["doctor", str(folder), "--out", str(tmp_path / "no" / "c.json")]) == 2
    short = tmp_path / "short.txt"
    short.write_text("too short")
    assert main(["doctor", str(folder), "--text", str(short), "--window", "480"]) == 2
    errors = capsys.readouterr().err
    assert "fewer than a window of 480" in errors and "does not exist" in errors
