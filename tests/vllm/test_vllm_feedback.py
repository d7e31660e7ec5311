"""Which layers of an engine get error feedback, from which weights, and what is said about it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

from models import SHAPE
from tightkv import KVQuantConfig
from tightkv.fit.checkpoint_metric import query_metrics
from tightkv.integrations.vllm.start import feedback as module
from tightkv.integrations.vllm.start.feedback import set_feedback, set_key_scales
from tightkv.math.centers import Centers
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import KeyScale
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tiny_folder import write_model

CPU = torch.device("cpu")
K4V4 = KVQuantConfig.preset("k4v4")
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of two KV heads."""
    return write_model(tmp_path_factory.mktemp("feedback"), hf.Qwen2Config(**SHAPE))


def engine(folder: Path | str, load_format: str = "auto") -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def layers(cfg: KVQuantConfig = K4V4, heads: int = 2, names: list[str] = NAMES) -> dict[str, Any]:
    """What `set_feedback` reads of each layer's attention."""
    found = {}
    for index, name in enumerate(names):
        layout = PageLayout(cfg.for_layer(index, len(names)), heads, 16)
        found[name] = SimpleNamespace(
            layout=layout,
            num_kv_heads=heads,
            head_size=16,
            device=CPU,
            is_draft=False,
            window=None,
            step=SimpleNamespace(codec=Codec(layout)),
            feedback=None,
            key_scale=None,
        )
        found[name].use_scale = partial(setattr, found[name], "key_scale")
    return found


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, and keys of layers 1 and 2 with a few large channels."""

    def enlarge(model: Any) -> None:
        for layer in model.model.layers[1:3]:
            layer.self_attn.k_proj.weight.data.view(2, 16, -1)[1, [2, 10]] *= 40

    folder = tmp_path_factory.mktemp("uneven")
    return write_model(folder, hf.Qwen2Config(**SHAPE), enlarge)


def test_every_layer_has_the_factors_of_its_own_metric(folder: Path) -> None:
    impls = layers()
    line = set_feedback(K4V4, impls, engine(folder), 0, 1)
    assert line is not None and line.startswith("tightkv k4v4: 4 of 4 layers code keys with error")
    assert "feedback=off" in line and "(" not in line
    for name, metric in zip(NAMES, query_metrics(folder).by_layer.values(), strict=True):
        impl = impls[name]
        wanted = impl.step.codec.feedback_factors(QueryMetric(metric), CPU)
        assert torch.equal(impl.feedback, wanted)
        assert impl.feedback.dtype == torch.float32 and impl.feedback.is_contiguous()


@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_channels_of_uneven_keys_are_scaled(preset: str, uneven: Path) -> None:
    cfg = KVQuantConfig.preset(preset)
    impls = layers(cfg)
    line = set_key_scales(cfg, impls, engine(uneven), 0, 1)
    assert line == f"tightkv {preset}: key channels of 2 layers are scaled"
    scales = [impl.key_scale for impl in impls.values()]
    assert [scale is None for scale in scales] == [True, False, False, True]
    assert (scales[1].value[0] == 1).all() and scales[1].value[1, 2] > scales[1].value[1, 3]
    if preset == "k4v4":
        set_feedback(cfg, impls, engine(uneven), 0, 1)
        metric = QueryMetric(query_metrics(uneven).by_layer[1]).scaled(scales[1])
        wanted = impls[NAMES[1]].step.codec.feedback_factors(metric, CPU)
        assert torch.equal(impls[NAMES[1]].feedback, wanted)
    part = layers(cfg, heads=1, names=NAMES[2:])
    set_key_scales(cfg, part, engine(uneven), 1, 2)
    assert torch.equal(part[NAMES[2]].key_scale.value, scales[2].value[1:])


def test_layers_without_scales(uneven: Path, folder: Path) -> None:
    off, eight = K4V4.replace(feedback="off"), KVQuantConfig.preset("k8v4")
    for cfg, where, form in (
        (off, uneven, "auto"),
        (eight, uneven, "auto"),
        (K4V4, folder, "auto"),
        (K4V4, uneven, "dummy"),
        (K4V4, uneven / "gone", "auto"),
    ):
        impls = layers(cfg)
        assert set_key_scales(cfg, impls, engine(where, form), 0, 1) is None
        assert all(impl.key_scale is None for impl in impls.values())


def test_off(folder: Path) -> None:
    impls = layers()
    assert set_feedback(K4V4.replace(feedback="off"), impls, engine(folder), 0, 1) is None
    assert all(impl.feedback is None for impl in impls.values())


@pytest.mark.parametrize("preset", ["k8v4", "k2v2"])
def test_bits_that_do_not_gain(preset: str, folder: Path) -> None:
    """Eight are exact enough, and two need a metric of real queries."""
    cfg = KVQuantConfig.preset(preset)
    impls = layers(cfg)
    assert set_feedback(cfg, impls, engine(folder), 0, 1) is None
    assert all(impl.feedback is None for impl in impls.values())


def test_layers_with_bits_of_their_own(folder: Path) -> None:
    cfg = K4V4.replace(layer_bits="1=k8v4,2=k3v3")
    impls = layers(cfg)
    line = set_feedback(cfg, impls, engine(folder), 0, 1)
    assert line is not None and "3 of 3 layers" in line
    assert [impl.feedback is None for impl in impls.values()] == [False, True, False, False]
    metric = query_metrics(folder).by_layer[2]
    codec = Codec(PageLayout(cfg.for_layer(2, 4), 2, 16))
    assert torch.equal(impls[NAMES[2]].feedback, codec.feedback_factors(QueryMetric(metric), CPU))


def test_a_rank_has_its_own_heads_and_a_stage_its_own_layers(folder: Path) -> None:
    whole, part = layers(), layers(heads=1, names=NAMES[2:])
    set_feedback(K4V4, whole, engine(folder), 0, 1)
    set_feedback(K4V4, part, engine(folder), 1, 2)
    for name, impl in part.items():
        torch.testing.assert_close(impl.feedback, whole[name].feedback[1:])


def test_a_draft_and_other_heads_have_none(folder: Path) -> None:
    names = [*NAMES[:2], "draft_model.layers.1.self_attn.attn", "head.attn"]
    impls = layers(names=names)
    set_feedback(K4V4, impls, engine(folder), 0, 1)
    assert [impl.feedback is None for impl in impls.values()] == [False, False, True, True]
    wide = layers(heads=4)
    line = set_feedback(K4V4, wide, engine(folder), 0, 1)
    assert line is not None and "0 of 4 layers" in line and "heads are not those" in line
    assert all(impl.feedback is None for impl in wide.values())


def test_without_weights_there_is_a_reason_and_no_feedback(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reason(where: SimpleNamespace) -> str:
        impls = layers()
        line = set_feedback(K4V4, impls, where, 0, 1)
        assert line is not None and "0 of 4 layers" in line
        assert all(impl.feedback is None for impl in impls.values())
        return line

    assert "load_format dummy" in reason(engine(folder, "dummy"))
    assert "neither a folder nor" in reason(engine("org/missing"))

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(module, "query_metrics", out_of_memory)
    assert "(out of memory)" in reason(engine(folder))


def test_centers_are_scaled_with_their_keys_and_both_are_the_format() -> None:
    """(k - k0) / s, whichever of the two a kernel does first; stores of other scales are apart."""
    pytest.importorskip("vllm")
    from tightkv.integrations.vllm.prefix.cache_format import _meaning
    from tightkv.integrations.vllm.step.attention import TightAttention

    impl = TightAttention.__new__(TightAttention)
    impl.layout, impl.device = PageLayout(K4V4, 2, 16, torch.bfloat16), CPU
    impl.softcap = impl.sink_logits = impl.centers = impl.key_scale = None
    formats = [_meaning(impl)]
    for exponent in (1, 2):
        impl.centers, scale = None, torch.ones(2, 16)
        scale[1, 3] = 2.0**exponent
        impl.use_scale(KeyScale(scale))
        formats.append(_meaning(impl))
        impl.use_centers(Centers(torch.full((2, 16), 3.0), torch.full((2, 16), 5.0)))
        key, value = impl.centers
        assert torch.equal(key.float() * scale, torch.full((2, 16), 3.0)) and (value == 5).all()
        formats.append(_meaning(impl))
    assert len(set(formats)) == 5
