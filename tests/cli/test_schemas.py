"""JSON Schemas of --json: every command has one, and they refuse what is not said there.

What commands print in any test is checked against them (conftest.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

import tightkv
from json_schemas import check, validator
from tightkv.config import KVQuantConfig
from tightkv.tools.cli import COMMANDS, main
from tightkv.tools.cli.schemas import schema_of, to_schema
from tiny_folder import write_tiny_folder

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
LLAMA = {
    "model_type": "llama",
    **{"vocab_size": 1000, "hidden_size": 128, "num_hidden_layers": 2, "head_dim": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256},
}


def printed(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def as_json(config: KVQuantConfig) -> Any:
    return json.loads(json.dumps(config.to_dict()))


# --- the schemas ---------------------------------------------------------------------------------
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_schema(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, "decode"] if command == "bench" else [command]
    assert main([*words, "--json-schema"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == schema_of(command) and told.err == ""
    assert schema_of(command)["title"] == f"tightkv {command} --json"
    assert not list(_open_objects(schema_of(command)))


def _open_objects(schema: Any, where: str = "") -> Any:
    """Objects that say nothing of keys; vLLM's arguments and a model's shape are not ours."""
    if isinstance(schema, list):
        for part in schema:
            yield from _open_objects(part, where)
    if not isinstance(schema, dict):
        return
    open_object = schema.get("type") == "object" and "additionalProperties" not in schema
    if open_object and where not in ("arguments", "model"):
        yield where
    for key, part in schema.items():
        yield from _open_objects(part, where if key in ("anyOf", "properties", "items") else key)


def test_a_config_is_every_field() -> None:
    validate = fastjsonschema.compile(to_schema("$config"))
    for preset in tightkv.config.PRESETS:
        validate(as_json(KVQuantConfig.preset(preset)))
    fields = as_json(
        KVQuantConfig(key_bits=3, value_bits=3, outlier_channels=(1, 2), outlier_share=0.25)
    )
    validate(fields)
    for broken in ({**fields, "more": 1}, {**fields, "key_bits": "4"}, {"key_bits": 4}):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            validate(broken)


# --- what commands print -------------------------------------------------------------------------
def test_commands_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    printed(capsys, "info")
    printed(capsys, "completion", "bash")
    printed(capsys, "plan", tmp_path)
    printed(capsys, "plan", tmp_path, "--gpu", "H100", "--config", '{"key_bits": 3}')
    printed(capsys, "plan", "--html", tmp_path / "plan.html")
    for more in ((), ("--config", '{"enabled": false}')):
        printed(capsys, "serve", tmp_path, *more)
    data = printed(capsys, "bench", "decode", "--device", "cpu", "--tokens", "80", "--repeats", "1")
    assert [row["bench"] for row in data["rows"]] == ["decode"]


def test_a_change_of_the_output_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tightkv.tools.cli import info

    collect = info.collect
    monkeypatch.setattr(info, "collect", lambda: {**collect(), "more": 1})
    with pytest.raises(AssertionError, match=r"tightkv info --json: .*more"):
        main(["info", "--json"])


def test_measured_rows_of_gpus_and_engines() -> None:
    """The last of each file: those that current code wrote."""
    kinds = set()
    paths = {*RESULTS.glob("gpu_*.jsonl"), *RESULTS.glob("vllm_engine*.jsonl")}
    # comparisons of kernels, not of bench; what scripts measure; a command that has gone
    comparisons = ("gpu_decode_tiles", "gpu_decode_wide", "gpu_decode_window")
    scripts = ("gpu_extend", "gpu_store")
    others = {RESULTS / f"{name}.jsonl" for name in (*comparisons, *scripts, "gpu_model")}
    for path in paths - others:
        last = json.loads(path.read_text().splitlines()[-1])
        check("bench", json.dumps({"schema": 1, "rows": [last]}))
        kinds.add(last["bench"])
    assert kinds == {"decode", "engine"}


def test_rows_of_failed_engines() -> None:
    validate = validator("bench")
    failed = {"bench": "engine", "kv": "auto", "model": "m", "error": "out of memory"}
    validate({"schema": 1, "rows": [failed]})
    for broken in ({**failed, "kv": None}, {"bench": "other"}, {"bench": "engine", "kv": "auto"}):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            validate({"schema": 1, "rows": [broken]})


def test_documentation_names_the_option() -> None:
    page = (Path(__file__).parents[2] / "docs" / "index.md").read_text()
    assert re.search(r"--json-schema", page)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def test_generate(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ("--device", "cpu", "--max-new-tokens", "3")
    printed(capsys, "generate", tiny, "--prompt", "one", "--prompt", "two", *few)
    printed(capsys, "generate", tiny, "--compare", "--needle", "--long-prompt", "300", *few)
