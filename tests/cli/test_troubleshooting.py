"""docs/troubleshooting.md: every error and warning that it explains is one that the code gives."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tightkv import KVQuantConfig, TightCache
from tightkv.kernels import registry
from tightkv.model_shape import read_model_shape
from tightkv.model_shape.planner import GPUS
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout
from tightkv.tools.cli import main
from tightkv.tools.cli.plan import hub

hf = pytest.importorskip("transformers")

from models import prompt, tiny  # noqa: E402
from tightkv.integrations.transformers import states  # noqa: E402
from tightkv.integrations.transformers.attention import warn_of_noise  # noqa: E402
from tightkv.integrations.vllm.options import engine_options  # noqa: E402
from tightkv.tools.model_loading import source as model_source  # noqa: E402
from tightkv.tools.model_loading.load import load_model  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
HEADINGS = re.findall(r"^### `(.+)`$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
Provoke = Callable[[Path, pytest.MonkeyPatch], object]


def without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tightkv.integrations.tr")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    import tightkv.integrations.transformers  # noqa: F401


def without_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_BUNDLED_MODULE", "tightkv_absent_package")
    load_model(None)


def odd_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"num_attention_heads": 2, "hidden_size": 32, "vocab_size": 9}
    read_model_shape({**names, "num_hidden_layers": 1, "layer_types": ["odd"]})


def slow_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_warned", set())  # each reason is told once
    cfg = KVQuantConfig(value_bits=16)
    PagedKV(PageLayout(cfg, 1, 64, torch.float32), SequenceTable(cfg))


def other_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states._warn_slow.cache_clear()  # told once
    model = tiny()
    model.set_attn_implementation("sdpa")
    cache = TightCache("k4v4", model=model)
    for _ in range(2):
        model(prompt(1, 80), past_key_values=cache)


def other_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    cache = TightCache("k4v4", model=model)
    for rows in (1, 2):
        model(prompt(rows), past_key_values=cache)


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    cache = TightCache("k4v4", model=model)
    model(prompt(), past_key_values=cache)
    cache.update(*torch.zeros(2, 1, 2, 1, 32), layer_idx=0)
    model(prompt(1, 1), past_key_values=cache)


def crop_of_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gemma3")
    cache = TightCache("k4v4", model=model)
    model(prompt(1, 60), past_key_values=cache)
    cache.activate_past_recording()
    model(prompt(1, 4), past_key_values=cache)
    cache.crop(-9)


def damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    cache = TightCache("k4v4", model=model)
    model(prompt(), past_key_values=cache)
    cache.save(tmp_path / "cache")
    data = bytearray((tmp_path / "cache").read_bytes())
    data[-1] ^= 1
    (tmp_path / "cache").write_bytes(data)
    TightCache.load(tmp_path / "cache", model=model)


def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    names = {"num_attention_heads": 2, "hidden_size": 32, "vocab_size": 9, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(names))
    monkeypatch.setattr(hub, "count_parameters", lambda source: None)
    assert main(["plan", str(tmp_path), "--gpu", gpu]) == 2


def engine(**cache: object) -> None:
    pytest.importorskip("vllm")
    from tightkv.integrations.vllm.start.engine_checks import check_engine_options

    asked = engine_options({"tightkv": {"preset": "k4v4"}}, env={})
    config = {"cache_dtype": "auto", "block_size": 64, "user_specified_block_size": True, **cache}
    check_engine_options(
        asked, SimpleNamespace(cache_config=SimpleNamespace(**config), parallel_config=None)
    )


PROVOKE: dict[str, Provoke] = {
    "TightCache needs transformers": without_transformers,
    "no model was given": without_the_bundled_model,
    "model folder": lambda path, _: load_model(str(path)),
    "... is an encoder": lambda *_: TightCache("k4v4", model=hf.T5Config()),
    "no layer of ... can be compressed (latent": lambda *_: TightCache(
        "k4v4", model=hf.DeepseekV3Config()
    ),
    "no layer of ... can be compressed (sliding": lambda *_: TightCache(
        "k4v4", model=hf.MistralConfig(sliding_window=64)
    ),
    "head_dim=": lambda *_: PageLayout(KVQuantConfig(), 1, 72),
    "layer_types of": odd_layer,
    "the compressed cache runs": slow_kernels,
    "this model's attention": other_attention,
    "keys of layer": lambda *_: warn_of_noise(KVQuantConfig(), 3, 1e6),
    "protected layers need": lambda *_: TightCache(KVQuantConfig(protected_last=1)),
    "keys have shape": other_batch,
    "the layers of this": interrupted,
    "layer ... has not": crop_of_a_window,
    "... is damaged": damaged_file,
    "unknown config field": lambda *_: KVQuantConfig.parse({"key_bitz": 4}),
    "unknown GPU": lambda path, patch: plan(path, patch, "H1000"),
    "the weights of": lambda path, patch: plan(path, patch, next(iter(GPUS))),
    "tightkv with --kv-cache": lambda *_: engine(cache_dtype="fp8"),
    "tightkv with --block": lambda *_: engine(block_size=16),
}


@pytest.mark.parametrize("heading", HEADINGS)
def test_it_happens(
    heading: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (provoke,) = [call for start, call in PROVOKE.items() if heading.startswith(start)]
    wanted = ".*".join(re.escape(part.strip(" ")) for part in heading.split("..."))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            provoke(tmp_path, monkeypatch)
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            said = [str(error)]
        else:
            said = [capsys.readouterr().err, *(str(warning.message) for warning in told)]
    assert any(re.search(wanted, text) for text in said), said


def test_every_case_is_on_the_page() -> None:
    unused = [start for start in PROVOKE if not any(h.startswith(start) for h in HEADINGS)]
    assert unused == []
