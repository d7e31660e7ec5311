"""The planner page in Chromium: its figures are those of `tightkv plan`, byte for byte."""

from __future__ import annotations

import collections
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser
from tightkv.model_shape import LayerShape, estimate_parameters, read_model_shape, skip_reason
from tightkv.model_shape import shape as shapes
from tightkv.model_shape.compressible import KIND_REASONS, SUPPORTED_EXTRAS
from tightkv.model_shape.planner import GPUS, WEIGHT_BITS
from tightkv.tools.cli import main
from tightkv.tools.cli.plan import hub
from tightkv.tools.cli.plan import page as plan_page

NAMES = "ALIBI IMAGES SHARED SINKS WINDOW INDEXED BESIDE_OTHERS LATENT_WINDOW"
EXTRAS = [getattr(shapes, name) for name in NAMES.split()]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "planner.html"
MODELS = json.loads((Path(plan_page.__file__).parent / "models.json").read_text(encoding="utf-8"))
OPTIONS: dict[str, list[Any]] = {
    "context": [None, 1, 63, 300, 1000, 8192, 131072, 1_000_003],
    "batch": [1, 1, 3, 64],
    "tp": [1, 1, 1, 2, 8],
    "gpu": [*GPUS, None, None],
    "budgetBytes": [0, 10**9, 24 * 10**9, 640 * 2**30],
    "utilization": [None, 0.5, 0.85, 0.9, 1],
    "weightsDtype": [None, None, *WEIGHT_BITS],
    "weightsBytes": [None, None, 7 * 10**9 + 1],
}
# Changes of a config: other ways to say things, odd sizes, and mistakes.
CHANGES: list[dict[str, Any]] = [
    {"head_dim": 72},
    {"head_dim": 80},
    {"head_dim": 16, "v_head_dim": 32},
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 3},
    {"num_key_value_heads": None},
    {"num_hidden_layers": 7},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": "4"},
    {"torch_dtype": "float32"},
    {"torch_dtype": None},
    {"dtype": "torch.float16"},
    {"torch_dtype": "int3"},
    {"sliding_window": 96, "use_sliding_window": True},
    {"sliding_window": 96, "sliding_window_pattern": "LLG"},
    {"sliding_window": 96, "sliding_window_pattern": "LX"},
    {"sliding_window": 96, "sliding_window_pattern": 3},
    {"sliding_window": 10**6},
    {"sliding_window": 0},
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "hybrid"], "mamba_d_state": 16},
    {"num_hidden_layers": 2, "layer_types": ["moe", "chunked_attention"]},
    {"num_hidden_layers": 2, "layer_types": ["full_attention", "window_attention"]},
    {"num_hidden_layers": 3, "layer_types": ["full_attention"]},
    {"num_hidden_layers": 2, "layer_types": ["indexed_attention"] * 2},
    {"num_hidden_layers": 2, "kinds": ["a", "b"]},
    {"hybrid_override_pattern": "M-*EM*", "n_groups": 2, "mamba_num_heads": 8}
    | {"mamba_head_dim": 16, "ssm_state_size": 8, "conv_kernel": 4},
    {"hybrid_override_pattern": "M?"},
    {"hybrid_override_pattern": ""},
    {"attention_chunk_size": 1024, "no_rope_layers": None},
    {"attention_chunk_size": 1024, "num_hidden_layers": 3, "no_rope_layers": [1, 1, 0]},
    {"kv_lora_rank": 128, "qk_rope_head_dim": 16},
    {"kv_lora_rank": 128, "qk_rope_head_dim": 16, "index_head_dim": 24},
    {"kv_lora_rank": 256, "qk_rope_head_dim": 32},
    {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128},
    {"kv_lora_rank": 512, "qk_rope_head_dim": 24},
    {"kv_lora_rank": 100, "qk_rope_head_dim": 64},
    {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2}
    | {"layer_types": ["full_attention", "linear_attention"]},
    {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 2, "sliding_window": 96}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    {"kv_lora_rank": 128, "qk_rope_head_dim": None},
    {"num_kv_shared_layers": 2},
    {"num_kv_shared_layers": 10**3},
    {"num_kv_shared_layers": 3, "sliding_window": 96, "sliding_window_pattern": "LLG"},
    {"alibi": True},
    {"model_type": "bloom"},
    {"model_type": "gpt_oss", "sliding_window_pattern": 2},
    {"cross_attention_layers": [1, 3]},
    {"per_layer_config": {"0": {"head_dim": 32}, "1": {"num_key_value_heads": 2}}},
    {"global_head_dim": 512, "attention_k_eq_v": True, "num_global_key_value_heads": 2},
    {"full_attention_interval": 3},
    {"model_type": "falcon_h1", "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_d_state": 16}
    | {"mamba_d_conv": 4, "mamba_expand": 2},
    {"model_type": "bamba", "attn_layer_indices": [1, 2]},
    {"model_type": "minimax", "layer_types": None},
    {"model_type": "gpt2", "n_head": 4, "intermediate_size": None},
    {"model_type": "bert"},
    {"model_type": "bert", "is_decoder": True},
    {"model_type": "mistral"},
    {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 32},
    {"is_encoder_decoder": True},
    {"architectures": ["SomethingForMaskedLM"]},
    {"vocab_size": None},
    {"hidden_size": 1000, "head_dim": None, "num_attention_heads": 7},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
    {"quantization_config": {"quant_method": "unheard-of"}},
    {"num_experts": 4, "moe_intermediate_size": 64, "mlp_only_layers": [0]},
    {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1},
    {"intermediate_size": None},
    {"tie_word_embeddings": None},
    {"max_position_embeddings": None},
    {"block_configs": [{"attention": {"n_heads_in_group": 8}}] * 30},
    {"linear_attn_config": {"a": True, "b": None, "c": "d"}},
    {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"], "layer_types": None},
    {"num_hidden_layers": 10**6, "layer_types": None},
    {"layer_types": -1},
    {"architectures": [1]},
    {"per_layer_config": [{}]},
    {"per_layer_config": {"0": 1}},
    {"per_layer_config": {"0": {"head_dim": "x"}}},
    {"layer_types": None, "attn_layer_indices": {"0": 1}},
    {"attention_chunk_size": 8, "no_rope_layers": [1] * 50, "layer_types": None},
    {"num_kv_shared_layers": 1.5},
    {"cross_attention_layers": "8"},
    {"multi_query": []},
    {"text_config": 5},
    {"model_type": 7},
    {"dtype": ["float32"]},
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    session = Browser(tmp_path_factory.mktemp("browser"))
    session.open(PAGE.as_uri())
    yield session
    session.close()


def arguments(options: dict[str, Any]) -> list[str]:
    """Options of the page as those of the command."""
    named = {
        "--context": options["context"],
        "--batch": options["batch"],
        "--tp": options["tp"],
        "--gpu": options["gpu"],
        "--budget": None if options["gpu"] else options["budgetBytes"],
        "--utilization": options["utilization"],
        "--weights-dtype": options["weightsDtype"],
        "--weights-bytes": options["weightsBytes"],
    }
    given = [(name, str(value)) for name, value in named.items() if value is not None]
    return [part for pair in given for part in pair]


def cases() -> list[dict[str, Any]]:
    """Every model of the page as it is, and 200 changed ones: each change alone, then mixtures."""
    draw = random.Random(0)
    changed = [{**draw.choice(MODELS), "parameters": None} for _ in range(200)]
    mixed = [draw.sample(CHANGES, draw.choice([0, 1, 1, 2])) for _ in range(200 - len(CHANGES))]
    unchanged: list[list[dict[str, Any]]] = [[]] * 2 * len(MODELS)
    changes = unchanged + [[change] for change in CHANGES] + mixed
    out = []
    for model, change in zip([*MODELS, *MODELS, *changed], changes, strict=True):
        config = dict(collections.ChainMap(*change, model["config"]))
        if change and draw.random() < 0.2:
            config = {"model_type": "composite", "text_config": config, "torch_dtype": "half"}
        options = {name: draw.choice(values) for name, values in OPTIONS.items()}
        options |= {"name": "model", "parameters": model.get("parameters")}
        out.append({"config": config, "options": options})
    return out


def asked(case: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command says: its report, or its error."""
    (folder / "config.json").write_text(json.dumps(case["config"]))
    done = main(["plan", str(folder), *arguments(case["options"]), "--json"])
    said = capsys.readouterr()
    if done == 0:
        return json.loads(said.out)
    return said.err.removeprefix("tightkv: error: ").strip()


def test_every_figure_is_that_of_the_command(
    browser: Browser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "model").mkdir()
    script = """
        return JSON.stringify(arguments[0].map(({config, options}) => {
          try {
            const {plans, ...report} = plan(config, options);
            return report;
          } catch (error) {
            return error.message;
          }
        }));
    """
    told = json.loads(browser.run(script, cases()))
    reports, errors = 0, set()
    for case, page in zip(cases(), told, strict=True):
        counted = case["options"]["parameters"]
        monkeypatch.setattr(hub, "count_parameters", lambda source, n=counted: n)
        command = asked(case, tmp_path / "model", capsys)
        if isinstance(command, str) and "unknown size" in command:  # the way out is another
            command, page = (text.split(": no ")[0] for text in (command, page))
        assert page == command, case
        reports += isinstance(command, dict)
        errors |= {re.sub(r"\d+|'.*?'", "", command)} if isinstance(command, str) else set()
    assert reports > 150
    assert len(errors) >= 18


def test_layers_are_compressed_where_the_package_says_so(browser: Browser) -> None:
    """Also layers that no config of today makes."""
    layers = [
        LayerShape(kind, 2, dim, value_dim, extras=extras)
        for kind in ("full", *KIND_REASONS)
        for dim, value_dim in ((0, 0), (8, 8), (72, 72), (96, 96), (96, 64))
        for count in range(3)
        for extras in itertools.permutations(EXTRAS, count)
    ]
    layers += [
        LayerShape("mla", latent_dim=rank + rope, rope_dim=rope, extras=extras)
        for rank in (32, 64, 100, 448, 512, 576)
        for rope in (16, 24, 64, 128)
        for extras in ((), (EXTRAS[0],), (EXTRAS[-1],))
    ]
    wanted = [[skip_reason(layer, name) for name in SUPPORTED_EXTRAS] for layer in layers]
    script = """
        return arguments[0].map(([kind, headDim, valueHeadDim, latentDim, ropeDim, extras]) => {
          const layer = {kind, headDim, valueHeadDim, latentDim, ropeDim, extras};
          return arguments[1].map((name) => skipReason(layer, name));
        });
    """
    given = [
        [each.kind, each.head_dim, each.value_head_dim, each.latent_dim, each.rope_dim, each.extras]
        for each in layers
    ]
    assert browser.run(script, given, list(SUPPORTED_EXTRAS)) == wanted


def test_the_page_is_up_to_date(tmp_path: Path) -> None:
    assert main(["plan", "--html", str(tmp_path / "page.html")]) == 0
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert written == PAGE.read_text(encoding="utf-8"), "run: tightkv plan --html docs/planner.html"


def test_the_page_asks_nobody(browser: Browser) -> None:
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    links = set(re.findall(r"https?://[^\"' )]+", PAGE.read_text(encoding="utf-8")))
    assert links == {"http://www.w3.org/2000/svg"}


def table_of(browser: Browser) -> list[list[str]]:
    rows = browser.run(
        "return [...document.querySelectorAll('#table tr')].slice(1)"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return [[cell.replace(",", "") for cell in row] for row in rows]


def printed_table(said: str) -> list[list[str]]:
    """Cells of the table that the command prints, without bytes per token and layer."""
    lines = said.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("bf16"))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start:] if line[:4] != "note"]
    return [row[:1] + row[2:] for row in rows]


def shown_lines(browser: Browser, selector: str) -> list[str]:
    script = f"return [...document.querySelectorAll('{selector} li')].map((e) => e.textContent)"
    return [re.sub(r"(\d),(\d)", r"\1\2", line) for line in browser.run(script)]


def test_a_chosen_model_shows_what_the_command_prints(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(PAGE.as_uri())
    browser.choose("#gpu", "B200 (179 GiB)")
    browser.type("#context", "12345")
    browser.type("#batch", "7")
    for model in MODELS:
        browser.choose("#model", model["name"])
        (tmp_path / "config.json").write_text(json.dumps(model["config"]))
        command = ["plan", str(tmp_path), "--gpu", "B200", "--context", "12345", "--batch", "7"]
        if "parameters" in model:
            command += ["--weights-bytes", str(2 * model["parameters"])]
        assert main(command) == 0
        said = capsys.readouterr().out
        assert table_of(browser) == printed_table(said), model["name"]
        layers = [line.strip() for line in said.splitlines() if line.startswith("  ")]
        assert shown_lines(browser, "#layers") == layers
        notes = [line for line in said.splitlines() if line.startswith("note")]
        assert [f"n{line[1:]}" for line in shown_lines(browser, "#notes")] == notes
        none = "No layer of this model can be compressed" in browser.text("#headline")
        assert none == ("no layer of this model can be compressed" in said)


def test_a_pasted_config_and_own_memory(
    browser: Browser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**MODELS[0]["config"], "head_dim": 96, "num_hidden_layers": 5}
    browser.open(PAGE.as_uri())
    browser.choose("#model", "another: paste its config.json")
    assert "Paste the config.json" in browser.text("#error")
    browser.type("#config", '{"model_type": "llama"}')
    assert "has no vocab_size" in browser.text("#error")
    browser.type("#config", "{")
    assert "not valid JSON" in browser.text("#error")
    browser.type("#config", json.dumps(config))
    browser.choose("#gpu", "another: give its memory")
    browser.type("#budget", "3.7")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--budget", "3.7GiB"]) == 0
    assert table_of(browser) == printed_table(capsys.readouterr().out)
    browser.type("#context", "0")
    assert "tokens per request 0; it must be an integer, at least 1" in browser.text("#error")


def test_desktop_and_phone(browser: Browser, tmp_path: Path) -> None:
    """Nothing is cut off or hangs over, and a plan's address shows it again."""
    for pixels, mobile in ((1280, False), (390, True), (320, True)):
        browser.open("about:blank")
        browser.width(pixels, mobile)
        browser.open(PAGE.as_uri() + "#model=Gemma+3+27B&gpu=RTX4090&dtype=int4&context=65536")
        assert browser.run("return document.scrollingElement.scrollWidth") <= pixels
        assert "Gemma 3 27B" in browser.text("#headline")
        assert "52 x sliding" in browser.text("#layers")
        over = browser.run(
            "return [...document.querySelectorAll('.bar, #lines svg, form *')].filter("
            "(e) => e.getBoundingClientRect().right > innerWidth).map((e) => e.outerHTML)"
        )
        assert over == []
        browser.screenshot(tmp_path / f"{pixels}.png")
        assert (tmp_path / f"{pixels}.png").stat().st_size > 20_000
    assert browser.errors() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [model["name"] for model in MODELS if "parameters" in model])
def test_counted_parameters_are_those_of_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = next(model for model in MODELS if model["name"] == name)
    assert estimate_parameters(read_model_shape(model["config"])) is None
    config = transformers.AutoConfig.for_model(**model["config"])
    assert hub.count_parameters(config) == model["parameters"]


def test_a_model_and_a_page_are_not_asked_for_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "some/model", "--html", "page.html"]) == 2
    assert "leave out 'some/model'" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "which model?" in capsys.readouterr().err
