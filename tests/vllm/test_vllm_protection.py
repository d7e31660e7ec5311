"""Where an engine's check of keys finds the weights, and which layer of the model a layer is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

from models import SHAPE
from tightkv import KVQuantConfig
from tightkv.fit import Checkpoint, Fit, Layers, fit_bits
from tightkv.integrations.vllm.layer_numbers import model_layers
from tightkv.integrations.vllm.options import checkpoint_folder
from tightkv.model_shape import LayerShape
from tiny_folder import plant_key_bias, write_model

K4V4 = KVQuantConfig.preset("k4v4")


def engine(model: str | Path, download_dir: Path | None = None, **load: Any) -> SimpleNamespace:
    """The parts of a VllmConfig that say what was loaded."""
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(model), revision=None),
        load_config=SimpleNamespace(
            **{"load_format": "auto", "download_dir": download_dir, **load}
        ),
    )


def check_keys(cfg: KVQuantConfig, where: Any, layers: Layers | None = None) -> Fit:
    return fit_bits(Checkpoint(checkpoint_folder(where), "it"), cfg, layers)


def hub_cache(folder: Path) -> Path:
    """A cache as huggingface_hub keeps it, with org/noisy in it; returns its snapshot."""
    place = folder / "models--org--noisy"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    snapshot = write_model(place / "snapshots" / ("0" * 40), hf.Qwen2Config(**SHAPE))
    plant_key_bias(snapshot, layer=3)
    return snapshot


def test_models_of_a_hub_are_found_in_its_cache(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    assert checkpoint_folder(engine("org/noisy", tmp_path)) == snapshot
    assert checkpoint_folder(engine(snapshot)) == snapshot
    for where in (engine("org/noisy", tmp_path), engine(snapshot)):
        checked = check_keys(K4V4, where)
        assert checked.checked and checked.cfg.layer_bits == "3=k8v4"
        assert check_keys(K4V4.replace(protect_keys=False), where).keys_line is None
    # All layers have 16 bits already: nothing is looked for.
    assert check_keys(K4V4.replace(key_bits=16), engine("org/missing", tmp_path)).keys_line is None


@pytest.mark.parametrize(
    ("model", "load", "reason"),
    [
        ("org/missing", {}, "'org/missing' is neither a folder nor in the hub's local cache"),
        ("s3://bucket/model", {}, "neither a folder nor in the hub's local cache"),
        ("model.gguf", {}, "is a file; folders with safetensors files are read"),
        ("empty", {}, "neither a folder with a config.json nor such a file"),
        ("org/missing", {"load_format": "dummy"}, "its weights are random (load_format dummy)"),
    ],
)
def test_what_is_not_there_is_not_checked(
    model: str, load: dict[str, str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").touch()
    Path("empty").mkdir()
    checked = check_keys(K4V4, engine(model, tmp_path / "cache", **load))
    assert checked.cfg == K4V4 and not checked.checked
    line = checked.keys_line
    assert line is not None and "not checked" in line and reason in line


def test_layers_have_the_numbers_of_the_model() -> None:
    stage = [f"language_model.model.layers.{i}.self_attn.attn" for i in (7, 8)]
    assert list(model_layers(stage).values()) == [7, 8]
    draft = ["draft_model.layers.8.self_attn.attn", "head.attn"]
    assert list(model_layers(stage + draft).values()) == [7, 8, -1, -1]


def test_stages_of_a_pipeline_give_a_layer_the_same_bits() -> None:
    cfg = K4V4.replace(layer_bits="2=k8v4")
    names = [f"model.layers.{i}.self_attn.attn" for i in range(4)]

    def bits(stage: list[str]) -> list[str]:
        numbers = model_layers(stage)
        return [cfg.for_layer(i, len(stage), numbers[n]).name for i, n in enumerate(stage)]

    assert bits(names[:1]) + bits(names[1:]) == bits(names) == ["k4v4", "k4v4", "k8v4", "k4v4"]


def test_blocks_of_one_size_leave_the_config_and_say_so(tmp_path: Path) -> None:
    shapes = {n: LayerShape("full", 2, 16, 16) for n in range(4)}
    equal = Layers(shapes, lambda cfg: None, lambda configs: len(set(configs.values())) == 1)
    kept = check_keys(K4V4, engine(hub_cache(tmp_path)), equal)
    assert kept.cfg == K4V4 and not kept.checked
    assert kept.keys_line is not None and "needs 8-bit keys in layer 3, but" in kept.keys_line
