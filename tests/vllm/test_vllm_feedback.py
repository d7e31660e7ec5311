"""Which layers of an engine get error feedback, from which weights, and what is said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from models import SHAPE
from tightkv import KVQuantConfig
from tightkv.fit import Checkpoint, Fit, LayerFit, Layers, fit, query_metric
from tightkv.integrations.vllm.options import checkpoint_folder
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import KeyScale
from tightkv.model_shape import LayerShape
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tiny_folder import write_model

CPU = torch.device("cpu")
K4V4 = KVQuantConfig.preset("k4v4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of two KV heads."""
    return write_model(tmp_path_factory.mktemp("feedback"), hf.Qwen2Config(**SHAPE))


def engine(folder: Path | str, load_format: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def metrics(folder: Path) -> dict[int, Tensor]:
    return Checkpoint(folder, "it").metrics(range(4))[0]


def fitted(
    where: SimpleNamespace,
    cfg: KVQuantConfig = K4V4,
    heads: int = 2,
    numbers: Sequence[int] = range(4),
    place: tuple[int, int] = (0, 1),
) -> Fit:
    """What these layers of an engine are told; `place` is the rank, and how many there are."""
    shapes = {n: LayerShape("full", heads, 16, 16) for n in numbers}
    source = Checkpoint(checkpoint_folder(where), "it", *place)
    return fit(source, cfg, Layers(shapes, lambda cfg: None))


def factors(own: LayerFit, heads: int = 2) -> Tensor | None:
    codec = Codec(PageLayout(own.cfg, heads, 16))
    return None if own.metric is None else codec.feedback_factors(own.metric, CPU)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and keys of layers 1 and 2 with a few large channels."""

    def enlarge(model: Any) -> None:
        for layer in model.model.layers[1:3]:
            layer.self_attn.k_proj.weight.data.view(2, 16, -1)[1, [2, 10]] *= 40

    folder = tmp_path_factory.mktemp("uneven")
    return write_model(folder, hf.Qwen2Config(**SHAPE), enlarge)


def test_every_layer_has_its_own_metric(folder: Path) -> None:
    found = fitted(engine(folder))
    (line,) = found.notes
    assert line.startswith("tightkv k4v4: 4 of 4 layers code keys with error")
    assert "feedback=off" in line and "(" not in line
    for own, metric in zip(found.layers.values(), metrics(folder).values(), strict=True):
        assert own.metric is not None and torch.equal(own.metric.value, metric)


@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_channels_of_uneven_keys_are_scaled(preset: str, uneven: Path) -> None:
    cfg = KVQuantConfig.preset(preset)
    found = fitted(engine(uneven), cfg)
    assert found.notes[0] == f"tightkv {preset}: key channels of 2 layers are scaled"
    scales = [own.scale for own in found.layers.values()]
    assert [scale is None for scale in scales] == [True, False, False, True]
    assert (scales[1].value[0] == 1).all() and scales[1].value[1, 2] > scales[1].value[1, 3]
    if preset == "k4v4":
        wanted = QueryMetric(metrics(uneven)[1]).scaled(scales[1])
        assert torch.equal(found.layers[1].metric.value, wanted.value)
    part = fitted(engine(uneven), cfg, heads=1, numbers=(2, 3), place=(1, 2))
    assert torch.equal(part.layers[2].scale.value, scales[2].value[1:])


def test_layers_without_scales(uneven: Path, folder: Path) -> None:
    off, eight = K4V4.replace(feedback="off"), KVQuantConfig.preset("k8v4")
    for cfg, where, form in (
        (off, uneven, "auto"),
        (eight, uneven, "auto"),
        (K4V4, folder, "auto"),
        (K4V4, uneven, "dummy"),
        (K4V4, uneven / "gone", "auto"),
    ):
        found = fitted(engine(where, form), cfg)
        assert not any("scaled" in note for note in found.notes)
        assert all(own.scale is None for own in found.layers.values())


def test_off(folder: Path) -> None:
    found = fitted(engine(folder), K4V4.replace(feedback="off"))
    assert not found.notes and all(own.metric is None for own in found.layers.values())


@pytest.mark.parametrize("preset", ["k8v4", "k2v2"])
def test_bits_that_do_not_gain(preset: str, folder: Path) -> None:
    """Eight are exact enough, and two need a metric of real queries."""
    found = fitted(engine(folder), KVQuantConfig.preset(preset))
    assert not found.notes and all(own.metric is None for own in found.layers.values())


def test_layers_with_bits_of_their_own(folder: Path) -> None:
    cfg = K4V4.replace(layer_bits="1=k8v4,2=k3v3")
    found = fitted(engine(folder), cfg)
    assert "3 of 3 layers" in found.notes[0]
    made = [factors(own) for own in found.layers.values()]
    assert [x is None for x in made] == [False, True, False, False]
    metric = metrics(folder)[2]
    codec = Codec(PageLayout(cfg.for_layer(2, 4), 2, 16))
    assert torch.equal(made[2], codec.feedback_factors(QueryMetric(metric), CPU))
    assert made[2].dtype == torch.float32 and made[2].is_contiguous()


def test_a_rank_has_its_own_heads_and_a_stage_its_own_layers(folder: Path) -> None:
    whole = fitted(engine(folder))
    part = fitted(engine(folder), heads=1, numbers=(2, 3), place=(1, 2))
    for number, own in part.layers.items():
        of_all = factors(whole.layers[number])
        assert of_all is not None
        torch.testing.assert_close(factors(own, 1), of_all[1:])


def test_layers_without_a_number_and_other_heads_have_none(folder: Path) -> None:
    found = fitted(engine(folder), numbers=(0, 1, -3, -4))
    assert [own.metric is None for own in found.layers.values()] == [False, False, True, True]
    wide = fitted(engine(folder), heads=4)
    assert "0 of 4 layers" in wide.notes[0] and "heads are not those" in wide.notes[0]
    assert all(own.metric is None for own in wide.layers.values())


def test_without_weights_there_is_a_reason_and_no_feedback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(where: SimpleNamespace) -> str:
        found = fitted(where)
        (line,) = found.notes
        assert "0 of 4 layers" in line
        assert all(own.metric is None for own in found.layers.values())
        return line

    assert "load_format dummy" in reason(engine(folder, "dummy"))
    assert "neither a folder nor" in reason(engine("org/missing"))

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(query_metric, "covariance", out_of_memory)
    assert "(out of memory)" in reason(engine(folder))


def test_centers_are_scaled_with_their_keys_and_both_are_the_format() -> None:
    """(k - k0) / s, whichever of the two a kernel does first; stores of other scales are apart."""
    pytest.importorskip("vllm")
    from tightkv.integrations.vllm.prefix.cache_format import _meaning
    from tightkv.integrations.vllm.step.attention import TightAttention

    impl: Any = TightAttention.__new__(TightAttention)
    impl.layout, impl.device = PageLayout(K4V4, 2, 16, torch.bfloat16), CPU
    impl.softcap = impl.sink_logits = impl.centers = impl.key_scale = None
    formats = [_meaning(0, impl)]
    for exponent in (1, 2):
        impl.centers, scale = None, torch.ones(2, 16)
        scale[1, 3] = 2.0**exponent
        own = LayerFit(K4V4, scale=KeyScale(scale))
        impl.use_fit(own)
        formats.append(_meaning(0, impl))
        center = Centers(torch.full((2, 16), 3.0), torch.full((2, 16), 5.0))
        impl.use_fit(replace(own, centers=center))
        key, value = impl.centers
        assert torch.equal(key.float() * scale, torch.full((2, 16), 3.0)) and (value == 5).all()
        formats.append(_meaning(0, impl))
    assert len(set(formats)) == 5
    impl.step = SimpleNamespace(codec=Codec(impl.layout))
    own = LayerFit(K4V4, QueryMetric(torch.eye(16).expand(2, 16, 16)))
    impl.use_fit(own)
    assert torch.equal(impl.feedback, factors(own))
