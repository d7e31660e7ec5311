"""Configs of pypto-serving work as their users wrote them; {"enabled": false} is off everywhere."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tightkv import KVQuantConfig
from tightkv.integrations.vllm.options import engine_options
from tightkv.pages.layout import PageLayout
from tightkv.tools.cli import main
from tightkv.tools.cli.shared.config_flags import OFF_LINE, add_config_flags, config_from_args

WRITTEN = {
    "model": {"model_id": "qwen", "model_dir": "folder", "model_format": "huggingface"},
    "runtime": {
        "backend": "npu",
        "page_size": 128,
        "max_seq_len": 512,
        "max_batch_size": 16,
        "kv_dtype": "bfloat16",
        "weight_dtype": "float32",
        "total_kv_pages": None,
    },
    "kv_quant": {
        "enabled": True,
        "key_bits": 4,
        "value_bits": 2,
        "residual_window": 128,
        "protected_layers": 4,
        "protected_bits": 8,
    },
}
OFF = {"kv_quant": {"enabled": False, "key_bits": 4, "residual_window": 128}}


def test_a_whole_file() -> None:
    assert KVQuantConfig.parse(WRITTEN) == KVQuantConfig(
        key_bits=4,
        value_bits=2,
        page_size=128,
        exact_pages=2,
        protected_first=4,
        protected_last=4,
        protected_bits=8,
    )


def test_it_serves(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", json.dumps(WRITTEN), "--json"]) == 0
    told = capsys.readouterr()
    words = json.loads(told.out)["command"][3:]
    assert words[:-2] == [
        *("--model", "folder", "--max-model-len", "512", "--max-num-seqs", "16"),
        *("--dtype", "float32", "--served-model-name", "qwen"),
    ]
    options = engine_options(json.loads(words[-1]), env={})
    assert options is not None and options.config == KVQuantConfig.parse(WRITTEN)
    assert "backend='npu' is not used: vLLM runs on the device" in told.err
    assert "kv_dtype='bfloat16' is not used: exact tokens are kept" in told.err


def test_a_count_of_pages_is_one_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    document = {"model": "m", "kv_quant": {}, "runtime": {"total_kv_pages": 900}}
    assert main(["serve", "--config", json.dumps(document), "--dry-run"]) == 0
    assert "--num-gpu-blocks-override 900" in capsys.readouterr().out


@pytest.mark.parametrize("window", [0, 1, 31, 64, 65, 128, 300])
@pytest.mark.parametrize("options", [{}, {"page_size": 32}, {"preset": "k2v2"}])
def test_the_window_is_kept_however_full_the_open_page_is(
    window: int, options: dict[str, Any]
) -> None:
    cfg = KVQuantConfig.from_dict({**options, "residual_window": window})
    least = (cfg.exact_pages - 1) * cfg.page_size  # the open page is empty
    assert window <= least < window + cfg.page_size
    assert PageLayout(cfg, 1, 64, torch.float32).ring_tokens >= window


def test_the_default_is_a_window_of_128() -> None:
    assert KVQuantConfig.from_dict({"residual_window": 128}) == KVQuantConfig()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"enabled": 1}, "enabled=1; it must be true or false"),
        ({"residual_window": -1}, "residual_window=-1; it must be a count of newest tokens"),
        ({"residual_window": True}, "residual_window=True"),
        ({"residual_window": 64, "exact_pages": 2}, "'exact_pages' set the same option"),
        ({"protected_layers": [0, 3]}, "name single layers with layer_bits"),
        ({"protected_layers": 2, "protected_last": 1}, "'protected_last' set the same option"),
        ({"enabled": False, "key_bits": 5}, "key_bits=5"),
        ({"residual_windw": 64}, "did you mean 'residual_window'"),
        ({"kv_quant": {}, "enabled": False}, "'enabled' is next to 'kv_quant'"),
        (
            {"kv_quant": {"page_size": 64}, "runtime": {"page_size": 128}},
            "page_size=64 in 'kv_quant' and 128 in 'runtime'; keep one",
        ),
    ],
)
def test_what_cannot_be_mapped_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        KVQuantConfig.from_dict(options)
    assert words in str(error.value)


# --- which source wins ---------------------------------------------------------------------------
def from_flags(*words: str) -> KVQuantConfig:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return config_from_args(parser.parse_args(words))


def test_aliases_and_fields_of_several_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    document = '{"residual_window": 200, "protected_layers": 2}'
    assert from_flags("--config", document).exact_pages == 5
    assert from_flags("--config", document, "--page-size", "128").exact_pages == 3
    assert from_flags("--config", document, "--exact-pages", "2").exact_pages == 2
    assert from_flags("--config", document, "--protected-last", "0").protected_first == 2
    monkeypatch.setenv("TIGHTKV_EXACT_PAGES", "9")
    assert from_flags("--config", document).exact_pages == 5
    monkeypatch.setenv("TIGHTKV_CONFIG", document)
    assert from_flags().exact_pages == 9


def test_a_source_that_wins_switches_it_on_again(monkeypatch: pytest.MonkeyPatch) -> None:
    off = json.dumps(OFF)
    assert not from_flags("--config", off, "--preset", "k3v3").compresses
    assert from_flags("--config", off, "--sinks", "2") == KVQuantConfig(sinks=2)
    monkeypatch.setenv("TIGHTKV_CONFIG", off)
    assert not from_flags().compresses and not KVQuantConfig.from_env().compresses
    assert from_flags("--preset", "k3v3") == KVQuantConfig.preset("k3v3")
    monkeypatch.setenv("TIGHTKV_SINKS", "2")
    assert KVQuantConfig.from_env() == KVQuantConfig(sinks=2)


# --- off -----------------------------------------------------------------------------------------
def test_an_engine_keeps_its_own_cache(tmp_path: Path) -> None:
    file = tmp_path / "off.json"
    file.write_text(json.dumps(OFF))
    for given in (OFF, OFF["kv_quant"], json.dumps(OFF), str(file)):
        assert engine_options({"tightkv": given}, env={}) is None
        assert engine_options({"tightkv": given}, env={"TIGHTKV_PRESET": "k4v4"}) is None
    assert engine_options({}, env={"TIGHTKV_CONFIG": str(file)}) is None
    assert engine_options({"tightkv": {"key_bits": 16, "value_bits": 16}}, env={}) is not None


def test_serve_passes_it_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", "m", "--config", json.dumps(OFF), "--json"]) == 0
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert told["kv_quant"] is None and json.loads(told["command"][-1]) == {"tightkv": False}
    assert OFF_LINE in captured.err
    # The engine reads the variable itself, and must not take it for a request.
    monkeypatch.setenv("TIGHTKV_CONFIG", json.dumps(OFF))
    assert main(["serve", "m", "--dry-run"]) == 0
    assert '{"tightkv": false}' in capsys.readouterr().out


def test_generate_says_so_and_has_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", "/does/not/exist", "--prompt", "x", "--config", json.dumps(OFF)]
    assert main(words) == 2
    assert OFF_LINE in capsys.readouterr().err
    assert main([*words, "--compare"]) == 2
    assert "--compare has nothing to compare" in capsys.readouterr().err


def test_tight_cache_leaves_every_layer_alone() -> None:
    pytest.importorskip("transformers")
    from models import prompt, tiny
    from tightkv import TightCache

    model, words = tiny(), prompt(count=8)
    cache = TightCache(OFF, model=model)
    options = {"max_new_tokens": 4, "do_sample": False}
    got = model.generate(words, past_key_values=cache, **options)
    assert cache.tight_layers == [] and torch.equal(got, model.generate(words, **options))
