"""tightkv serve assembles vLLM's command, and where an engine's options come from."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tightkv import KVQuantConfig
from tightkv.config import ENV_SETTINGS
from tightkv.integrations.vllm.options import engine_options, with_options
from tightkv.tools.cli import main
from tightkv.tools.cli.serve import command as serve
from tightkv.tools.cli.shared.server_file import model_of


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["serve", words[0], "--json", *words[1:]]) == 0
    told = json.loads(capsys.readouterr().out)
    command: list[str] = told["command"]
    assert command[:5] == [sys.executable, "-m", serve.SERVER, "--model", words[0]]
    option, value = command[-2:]
    assert option == "--additional-config"
    options = engine_options(json.loads(value), env={})
    assert options is not None and options.config.to_dict() == told["kv_quant"]
    return command[5:]


def ours(words: list[str]) -> Any:
    return json.loads(words[-1])["tightkv"]


def test_our_options_become_one_of_vllms_and_its_own_stay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = dry_run(
        capsys, "m", "--preset", "k3v3", "--port", "80", "--sinks", "8", "--enforce-eager"
    )
    assert words[:-2] == ["--port", "80", "--enforce-eager"]
    assert ours(words) == {"preset": "k3v3", "sinks": 8}


def test_the_object_is_that_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", "--json"]) == 0
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text().split("| key | type |")[1]
    named = re.findall(r"^\| `(\w+)` \|", page.split("## ")[0], re.MULTILINE)
    assert list(json.loads(capsys.readouterr().out)) == named


def test_what_follows_two_dashes_is_vllms(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 80")
    words = dry_run(capsys, "m", "--", "--config", str(file))
    assert words[:-2] == ["--config", str(file)]
    assert ours(words) == {"preset": "k4v4"}


def test_a_config_file_with_a_kv_quant_block(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "cache.json"
    file.write_text(json.dumps({"kv_quant": {"preset": "k2v2", "seed": 7}}))
    words = dry_run(capsys, "m", "--config", str(file), "--exact-rows", "3", "--sliding-windows")
    own = {"exact_rows": 3, "sliding_windows": True}
    assert ours(words) == {"preset": "k2v2", "seed": 7, **own}


SERVER_FILE = {
    "model": {"model_dir": "folder", "model_id": "name", "model_format": "huggingface"},
    "runtime": {
        "max_seq_len": 512,
        "max_batch_size": 16,
        "weight_dtype": "float32",
        "exact_rows": 4,
        "sliding_windows": 1024,
    },
    "kv_quant": {"preset": "k3v3"},
}
ITS_OPTIONS = ["--max-model-len", "512", "--max-num-seqs", "16", "--dtype", "float32"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The command from --model on."""
    assert main(["serve", *words]) == 0
    command: list[str] = json.loads(capsys.readouterr().out)["command"]
    return command[3:]


def test_a_servers_file_says_which_model_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    name = ["--served-model-name", "name"]
    for flags in (["--port", "80"], ["--", "--port", "80"]):
        words = told(capsys, "--json", "--config", json.dumps(SERVER_FILE), *flags)
        assert words[:-2] == ["--model", "folder", *ITS_OPTIONS, *name, "--port", "80"]
        assert ours(words) == {"preset": "k3v3", "exact_rows": 4, "sliding_windows": 1024}


def test_help_names_our_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--exact-rows" in capsys.readouterr().out
    assert main(["serve", "m", "--exact-rows", "x"]) == 2


def test_the_command_line_wins_over_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--exact-rows", "0", "--max-num-seqs", "2"]
    for words in (
        told(capsys, "mine", "--json", "--config", json.dumps(SERVER_FILE), *flags),
        told(capsys, "--json", "--config", json.dumps(SERVER_FILE), "mine", *flags),
    ):
        assert words[:-2] == ["--model", "mine", *ITS_OPTIONS, "--max-num-seqs", "2"]
        assert ours(words) == {"preset": "k3v3", "exact_rows": 0, "sliding_windows": 1024}


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ({"other": 1}, "unknown block 'other' (allowed: kv_quant, model, runtime)"),
        ({"preset": "k4v4"}, "'preset' is next to 'kv_quant'; move it into that block"),
        ({"runtime": {"page_size": 48}}, "page_size=48; supported: 32, 64, 128, 256"),
        (
            {"runtime": {"kv_dtype": "fp8"}},
            "kv_dtype='fp8' in the runtime block; it must be one of",
        ),
        ({"runtime": {"total_kv_pages": 0}}, "total_kv_pages=0 in the runtime block"),
        ({"runtime": {"max_batch": 4}}, "did you mean 'max_batch_size'?"),
        ({"runtime": {"max_batch_size": "4"}}, "max_batch_size='4' in the runtime block"),
        ({"runtime": {"exact_rows": -1}}, "exact_rows=-1 in the runtime block"),
        ({"runtime": {"sliding_windows": 0}}, "sliding_windows=0 in the runtime block"),
        ({"runtime": 4}, "runtime=4; it must be an object"),
        ({"model": 3}, "model=3; it must be a folder or hub id"),
        ({"model": {"model_id": "x"}}, "an object with a 'model_dir'"),
        ({"model": {"model_dir": "x", "tokenizer": "y"}}, "model block 'tokenizer'"),
        ({"model": {"model_dir": "x", "model_format": "gguf"}}, "model_format='gguf'"),
        ({}, "no model; give its folder or hub id"),
    ],
)
def test_blocks_that_nobody_reads_are_refused(
    blocks: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.dumps({"kv_quant": {"preset": "k3v3"}, **blocks})
    assert main(["serve", "--config", document, "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_commands_that_load_a_model_take_it_from_the_file() -> None:
    one, two = (json.dumps({"kv_quant": {}, "model": name}) for name in ("a", "b"))
    assert model_of(None, [one, one, "{}"]) == "a"
    assert model_of("c", [one]) == "c" and model_of(None, ["{}"]) is None
    with pytest.raises(ValueError, match="name 'a', 'b'; give the model on the command line"):
        model_of(None, [one, two])


@pytest.mark.parametrize("command", ["generate", "eval", "doctor"])
def test_they_do_not_load_the_bundled_one_instead(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    document = '{"kv_quant": {}, "model": "/does/not/exist"}'
    assert main([command, "--config", document, *prompt]) == 2
    assert "model folder '/does/not/exist' does not exist" in capsys.readouterr().err


OUR_ENTRY = {"tightkv": {"preset": "k4v4"}}


@pytest.fixture(scope="module")
def vllms_parser() -> Any:
    """What vLLM's own parser makes of the command's words."""
    vllm_args = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return vllm_args.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (["--additional-config", '{"a": 1}'], {"a": 1}),
        (['--additional-config={"a": 1}'], {"a": 1}),
        (["--additional_config", '{"a": 1}'], {"a": 1}),
        (['--additional_config={"a.b": 1}'], {"a.b": 1}),
        (["--addit", '{"a": 1}', "--max_num_seqs=3"], {"a": 1}),
        (["--additional-config", '{"a": 1}', "--additional-config", '{"b": 2}'], {"a": 1, "b": 2}),
        (["--additional-config.a", "1"], {"a": 1}),
        (["--additional_config.a_b.c=1k"], {"a_b": {"c": 1000}}),
        (["--additional_c.a+", "x", "--additional-config.a+=y,z"], {"a": ["x", "y", "z"]}),
        (
            ["--additional-config.a.b", "x", "--additional-config", '{"a": {"c": [1]}, "d": "1"}'],
            {"a": {"b": "x", "c": [1]}, "d": "1"},
        ),
        (["--", "--additional-config.a", "1"], {"a": 1}),
        (["--", "--config", "additional-config: {a: 1}"], {"a": 1}),
        (["--addi.b", "2", "--", "--config", "additional_config: {a: 1}"], {"a": 1, "b": 2}),
        (["--", "--config", "additional-config.a: 1"], {"a": 1}),
    ],
)  # fmt: skip
@pytest.mark.vllm
def test_additional_config_is_extended_however_vllm_reads_it(
    form: list[str],
    wanted: dict[str, Any],
    vllms_parser: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--config" in form:
        (tmp_path / "vllm.yaml").write_text(form[-1])
        form = [*form[:-1], str(tmp_path / "vllm.yaml")]
    read = vllms_parser.parse_args(told(capsys, "m", "--json", *form))
    assert read.additional_config == wanted | OUR_ENTRY
    assert read.model == "m"


def test_additional_config_is_one_option(capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(capsys, "m", "--additional_config", '{"a": 1}')
    assert json.loads(words[-1]) == {"a": 1} | OUR_ENTRY
    assert len(words) == 2


def test_our_options_may_have_underscores_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = dry_run(capsys, "m", "--exact_rows=3", "--no_protect_keys", "--max_model_len", "9")
    assert words[:-2] == ["--max-model-len", "9"]
    assert ours(words) == {"preset": "k4v4", "protect_keys": False, "exact_rows": 3}


def test_the_model_may_be_vllms_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: m")
    for words in (["--model", "m"], ["m", "--model=m"], ["--", "--config", str(file)]):
        assert told(capsys, "--json", *words)[:2] == ["--model", "m"]
    assert main(["serve", "m", "--model", "other", "--dry-run"]) == 2
    assert "--model other and the model 'm'; give one of them" in capsys.readouterr().err
    for odd in ("5", "[a]", "{a: 1}"):
        file.write_text(f"model: {odd}")
        assert main(["serve", "--dry-run", "--", "--config", str(file)]) == 2
        assert f"{file}; it must be a string" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["m", "m2"], ["m", "--sinks", "8", "m2"], ["--port=80", "m2"], ["--model=m", "m2"]]
)
def test_a_word_that_vllm_would_ignore_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--dry-run", *words]) == 2
    assert "'m2' is no option's value; vLLM would ignore it" in capsys.readouterr().err


def test_a_setting_that_two_files_differ_in_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "vllm.yaml"
    words = ["--json", "--config", json.dumps(SERVER_FILE), "--", "--config", str(file)]
    file.write_text("max_num_seqs: 16")
    assert told(capsys, *words)[-4:-2] == ["--config", str(file)]
    file.write_text("max_num_seqs: 8")
    assert main(["serve", *words]) == 2
    assert "--max-num-seqs is 16 in the file of tightkv serve and 8" in capsys.readouterr().err
    assert "--max-num-seqs=4" in told(capsys, *words, "--max_num_seqs=4")
    file.write_text("served-model-name: other")
    assert main(["serve", *words]) == 2
    assert "--served-model-name is name in the file" in capsys.readouterr().err


def test_dry_run_prints_a_line_for_the_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "my model", "--dry-run", "--preset", "k8v4"]) == 0
    line = capsys.readouterr().out
    assert "--model 'my model'" in line
    assert line.endswith("""--additional-config '{"tightkv": {"preset": "k8v4"}}'\n""")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--key-bits", "5"], "key_bits=5; supported"),
        (["--exact-rows", "-1"], "--exact-rows -1; it must be 0"),
        (["--additional-config", "{"], "is not valid JSON"),
        (["--additional-config", "[]"], "must be a JSON object"),
        (["--additional-config"], "--additional-config without a value"),
        (["--additional-config.a"], "--additional-config.a without a value"),
        (["--additional-config", '{"tightkv": {}}'], """{"tightkv": {}}: tightkv serve sets"""),
        (["--additional_config", '{"tightkv": 1}'], "give its fields as options"),
        (["--additional_config.tightkv.preset", "k8v8"], "tightkv.preset k8v8: tightkv serve sets"),
        (["--addit.tightkv.layers+=1"], '--addit.tightkv.layers+ 1: tightkv serve sets "tightkv"'),
        (["--additional-config.a=1", "--additional-config", '{"b.c": 1}'], "has the key 'b.c'"),
        (["--", "--config", "no.yaml"], "vLLM's --config no.yaml cannot be read"),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_vllm_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve", "m"]) == 2
    assert 'tightkv serve needs vLLM: pip install ".[vllm]"' in capsys.readouterr().err


def test_the_server_takes_the_place_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(serve, "find_spec", lambda name: True)
    monkeypatch.setattr(serve.os, "execv", lambda *command: started.append(command))
    main(["serve", "m", "--preset", "k4v2"])
    (path, command), expected = started[0], KVQuantConfig.preset("k4v2")
    assert path == sys.executable and command == serve.server_command("m", expected, [])


def test_more_bits_for_keys_are_told_before_the_engine_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = pytest.importorskip("transformers")
    from models import SHAPE
    from tiny_folder import plant_key_bias, write_model

    def told(*words: str) -> str:
        assert main(["serve", str(folder), *words, "--dry-run"]) == 0
        captured = capsys.readouterr()
        assert captured.out.count("\n") == 1 and "layer_bits" not in captured.out
        return captured.err

    folder = write_model(tmp_path / "qwen2", hf.Qwen2Config(**SHAPE))
    capsys.readouterr()
    assert told() == ""
    plant_key_bias(folder, layer=2)
    assert told().startswith("tightkv k4v4: 8-bit keys in layer 2: by its weights")
    assert told("--no-protect-keys") == told("--load_format", "dummy") == ""
    (folder / "model.safetensors").write_bytes(b"abc")
    assert "not checked whether keys of some layers need more bits" in told()


# --- options of an engine ------------------------------------------------------------------------
def test_no_option_means_no_compression() -> None:
    for additional in ({}, {"other": 1}, None, {"tightkv": None}, {"tightkv": False}):
        assert engine_options(additional, env=dict.fromkeys(ENV_SETTINGS, "x")) is None


@pytest.mark.parametrize("additional", [{}, {"tightkv": "k4v4"}])
def test_a_misspelt_variable_is_refused_with_and_without_a_request(additional: Any) -> None:
    with pytest.raises(ValueError, match="did you mean 'TIGHTKV_PRESET'"):
        engine_options(additional, env={"TIGHTKV_PRSET": "k4v4"})
    assert engine_options({"tightkv": False}, env={"TIGHTKV_PRSET": "k4v4"}) is None


@pytest.mark.parametrize("given", ["k3v2", {"preset": "k3v2"}, {"kv_quant": {"preset": "k3v2"}}])
def test_options_in_the_engines_config(given: Any) -> None:
    options = engine_options({"tightkv": given}, env={"TIGHTKV_PRESET": "k8v8"})
    assert options is not None and options.config == KVQuantConfig.preset("k3v2")
    assert options.exact_rows is None


def test_true_takes_the_defaults_and_rows_are_the_engines() -> None:
    options = engine_options({"tightkv": True}, env={})
    assert options is not None and options.config == KVQuantConfig()
    for given in ({"exact_rows": 0}, {"kv_quant": {}, "exact_rows": 0}):
        options = engine_options({"tightkv": given}, env={})
        assert options is not None and options.exact_rows == 0
    with pytest.raises(ValueError, match="unknown config field 'exact_rows'"):
        engine_options({"tightkv": {"kv_quant": {"exact_rows": 0}}}, env={})


def test_options_in_the_environment() -> None:
    options = engine_options({}, env={"TIGHTKV_PRESET": "k2v2", "TIGHTKV_SINKS": "2"})
    assert options is not None and options.config == KVQuantConfig.preset("k2v2", sinks=2)


def test_windows_are_an_option_of_the_engine() -> None:
    for given, wanted in (({}, False), ({"sliding_windows": True}, True)):
        options = engine_options({"tightkv": given}, env={})
        assert options is not None and options.windows is wanted
    for windows in ("true", 0, -1, 1.5, None):
        with pytest.raises(ValueError, match=r"sliding_windows=.*; it must be true"):
            engine_options({"tightkv": {"sliding_windows": windows}}, env={})
    options = engine_options({"tightkv": {"sliding_windows": 512}}, env={})
    assert options is not None
    assert engine_options(with_options({}, options)) == options


@pytest.mark.parametrize("rows", [-1, True, "4", 1.0])
def test_rows_must_be_a_count(rows: Any) -> None:
    with pytest.raises(ValueError, match="exact_rows="):
        engine_options({"tightkv": {"exact_rows": rows}}, env={})
