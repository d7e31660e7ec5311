"""tightkv export and tightkv run."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from elsewhere import run_elsewhere
from models import FAMILIES
from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.export import OperatorError, operator_library
from tightkv.integrations import executorch
from tightkv.integrations.transformers import TightCache, package
from tightkv.tools.cli import export as cli_export
from tightkv.tools.cli import main
from tightkv.tools.model_loading.load import load_model
from tiny_folder import TEMPLATE, byte_tokenizer, write_model, write_tiny_folder

try:
    operator_library()
except OperatorError as error:
    pytest.skip(str(error), allow_module_level=True)

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4


def error_of(capsys, *argv):
    assert main([*map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("tightkv: error: ")]
    return line


def expected_answer(folder, preset, text, count):
    model, tokenizer = load_model(str(folder), dtype="float32", device="cpu")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    cache = TightCache(preset, model)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=count, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.slow
def test_an_exported_folder_answers_as_the_model_does(tmp_path, capsys):
    model = write_tiny_folder(tmp_path / "model", template=TEMPLATE, num_hidden_layers=1)
    out = tmp_path / "out"
    argv = ["--preset", "k3v2", "--max-tokens", 400, "--dtype", "float32"]
    assert main(["export", str(model), "--output", str(out), *map(str, argv), "--json"]) == 0
    captured = capsys.readouterr()
    about = json.loads(captured.out)
    assert about["max_tokens"] == 400 and about["config"]["key_bits"] == 3
    assert about["file_bytes"] == (out / "model.pt2").stat().st_size
    assert "tightkv: compiling" in captured.err
    assert json.loads((out / "tightkv.json").read_text())["format"] == FORMAT_VERSION

    run = ["run", str(out), "--prompt", PROMPT, "--raw", "--max-new-tokens", "150"]
    assert main([*run, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == expected_answer(model, "k3v2", PROMPT, 150)
    run[1] = str(out / "model.pt2")
    assert main(run) == 0
    text = capsys.readouterr().out
    assert answer["text"].strip()[:20] in text and "tokens/s" in text
    # and so it does without tightkv
    _, tokenizer = load_model(str(model), dtype="float32", device="cpu")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    tokens, refusal = run_elsewhere(tmp_path, out / "model.pt2", ids, "aoti")
    assert tokens[0, :150].tolist() == answer["tokens"] and "the cache has room for" in refusal
    # the answer ends where the cache does
    assert main([*run[:-1], "1000", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["prompt_tokens"] + answer["new_tokens"] <= 400


def test_export_refuses_what_it_cannot_do(tmp_path, capsys):
    model, out = write_tiny_folder(tmp_path / "model"), tmp_path / "out"
    for tokens in (0, 1):
        line = error_of(capsys, "export", model, "--output", out, "--max-tokens", tokens)
        assert f"--max-tokens {tokens}; it must be at least 2" in line
    line = error_of(capsys, "export", model, "--output", out, "--max-tokens", 513)
    assert "--max-tokens 513; the model takes 512" in line
    line = error_of(capsys, "export", model, "--output", model / "config.json")
    assert "is a file; give a folder" in line
    line = error_of(capsys, "export", tmp_path / "nothing", "--output", out)
    assert "does not exist" in line
    line = error_of(capsys, "export", model, "--output", out, "--backend", "portable")
    assert "--backend portable with --format pt2; supported: cpu, cuda" in line
    line = error_of(
        capsys, "export", model, "--output", out, "--backend", "cuda", "--format", "pte"
    )
    assert "--backend cuda with --format pte; supported: xnnpack, portable" in line
    if not torch.cuda.is_available():
        line = error_of(capsys, "export", model, "--output", out, "--backend", "cuda")
        assert "--backend cuda compiles kernels for the GPU at hand: no CUDA device" in line
    assert not out.exists()


def test_packages_for_gpus_ask_no_compiler_about_vectors(tmp_path, monkeypatch):
    """Torch would start a process for every set of instructions."""
    asked = []
    monkeypatch.setattr(package.cpu_vec_isa, "valid_vec_isa_list", lambda: asked.append(1) or [])

    def compile(program, package_path, inductor_configs):
        package.cpu_vec_isa.pick_vec_isa()
        Path(package_path).write_bytes(b"PK")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)
    package.compile_pt2(None, tmp_path / "model.pt2", "cuda")
    assert not asked and (tmp_path / "model.pt2").read_bytes() == b"PK"
    package.compile_pt2(None, tmp_path / "model.pt2", "cpu")
    assert len(asked) == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_whose_libraries_torch_can_load(tmp_path):
    """Others make packages that crash when they are loaded."""
    compilers = {"static": "-static-libstdc++", "broken": "--no-such-option", "good": "-DNDEBUG"}
    for name, option in compilers.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "g++").write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {option}\n')
        (folder / "g++").chmod(0o755)
    paths = [str(tmp_path / name) for name in compilers]
    with pytest.warns(UserWarning, match="static/g.. cannot be used here; .*good/g.. is"):
        assert package._first_that_shares(f"{paths[0]}/g++", ":".join(paths)) == f"{paths[2]}/g++"
    with pytest.raises(package.NoCompilerError, match=r"fail: .*static/g\+\+, .*broken/g\+\+; set"):
        package._first_that_shares(None, ":".join(paths[:2]))
    with pytest.raises(package.NoCompilerError, match="install a compiler"):
        package._first_that_shares("clang++", str(tmp_path))


@pytest.mark.gpu
def test_a_folder_for_a_gpu(tmp_path, capsys):
    model = write_tiny_folder(tmp_path / "model", head_dim=64)
    out = tmp_path / "out"
    argv = ["--preset", "k4v4", "--max-tokens", "400", "--backend", "cuda"]
    assert main(["export", str(model), "--output", str(out), *argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "cuda"
    argv = ["run", str(out), "--prompt", PROMPT, "--raw", "--max-new-tokens", "150", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] > 0


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ((), None),
        (("--format", "pte"), "float32"),
        (("--format", "pte", "--dtype", "bfloat16"), "bfloat16"),
    ],
)
def test_a_pte_is_in_float32_whatever_is_fast_here(tmp_path, capsys, monkeypatch, words, dtype):
    asked = []

    def load(command, source, **options):
        asked.append(options["dtype"])
        raise OSError("enough")

    monkeypatch.setattr(cli_export, "load_for", load)
    model = write_tiny_folder(tmp_path / "model")
    assert "enough" in error_of(capsys, "export", model, "--output", tmp_path / "out", *words)
    assert asked == [dtype]


def test_pte_needs_executorch(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(executorch.importlib.util, "find_spec", lambda name: None)
    argv = (write_tiny_folder(tmp_path / "model"), "--output", tmp_path / "out", "--max-tokens", 64)
    line = error_of(capsys, "export", *argv, "--format", "pte")
    assert 'ExecuTorch is not installed: pip install ".[executorch]"' in line


def test_export_says_why_a_model_has_no_export(tmp_path, capsys):
    model = write_model(tmp_path / "model", FAMILIES["lfm2"]())
    byte_tokenizer().save_pretrained(model)
    line = error_of(capsys, "export", model, "--output", tmp_path / "out", "--max-tokens", 64)
    assert "layer 0 of Lfm2ForCausalLM has no attention over keys and values" in line
    assert not (tmp_path / "out" / "tightkv.json").exists()


ABOUT = {
    "kind": "pt2", "max_tokens": 20, "dtype": "float32", "stop_tokens": [1], "cache_bytes": 1,
    "config": KVQuantConfig().to_dict(), "torch": torch.__version__, "tightkv": "0",
    "format": FORMAT_VERSION, "schema": 1,
}  # fmt: skip


def folder_of(folder: Path, about):
    byte_tokenizer().save_pretrained(folder)
    (folder / "model.pt2").write_bytes(b"PK")
    text = about if isinstance(about, str) else json.dumps(about)
    (folder / "tightkv.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({**ABOUT, "format": FORMAT_VERSION + 1}, "export the model again"),
        ({**ABOUT, "schema": 9}, "export the model again"),
        ({**ABOUT, "kind": "gguf"}, "kind='gguf'; supported: pt2, pte"),
        ({**ABOUT, "kind": "pte"}, "has no model.pte"),
        ({**ABOUT, "device": "tpu"}, "device='tpu'; supported: cpu, cuda"),
        ({**ABOUT, "device": "cuda"}, "has no model.kernels"),
        ({**ABOUT, "max_tokens": -1}, "max_tokens=-1"),
        ({**ABOUT, "max_tokens": "many"}, "max_tokens='many'"),
        ({**ABOUT, "stop_tokens": ["x"]}, "stop_tokens=['x']"),
        ({**ABOUT, "more": 1}, "is not what tightkv export wrote"),
        ({"max_tokens": 20}, "is not what tightkv export wrote"),
        ("[1]", "is not what tightkv export wrote"),
        ("{", "is not what tightkv export wrote"),
        (" " * (1 << 20) + "{}", "larger than"),
    ],
    ids=lambda x: str(x)[-20:].strip(),
)
def test_run_refuses_another_about_file(tmp_path, capsys, about, message):
    assert message in error_of(capsys, "run", folder_of(tmp_path, about), "--prompt", "a")


def test_run_refuses_prompts_and_folders(tmp_path, capsys):
    assert "give a folder that tightkv export wrote" in error_of(
        capsys, "run", tmp_path, "--prompt", "a"
    )
    folder_of(tmp_path, ABOUT)
    line = error_of(capsys, "run", tmp_path, "--prompt", "a" * 20)
    assert "the prompt has 20 tokens; this model was exported for 20 with its answer" in line
    line = error_of(capsys, "run", tmp_path, "--prompt", "a", "--max-new-tokens", 0)
    assert "it must be at least 1" in line
    assert "the prompt is empty" in error_of(capsys, "run", tmp_path, "--prompt", "")
    both = ("--prompt", "", "--prompt-file", tmp_path / "tightkv.json")
    assert "keep one of them" in error_of(capsys, "run", tmp_path, *both)
    line = error_of(capsys, "run", tmp_path, "--prompt", os.fsdecode(b"a\xff"))
    assert "character 1 of the prompt is not Unicode text" in line


def test_run_names_the_file_that_is_wrong(tmp_path, capsys):
    folder_of(tmp_path, {**ABOUT, "torch": "2.0"})
    assert "'nothing' does not exist" in error_of(capsys, "run", "nothing", "--prompt", "a")
    line = error_of(capsys, "run", tmp_path / "tokenizer.json", "--prompt", "a")
    assert "is not the model of its folder, model.pt2" in line
    assert main(["run", str(tmp_path), "--prompt", "a"]) == 2
    lines = capsys.readouterr().err
    assert "warning: " in lines and "exported with torch 2.0, this is " in lines
    assert "cannot be loaded (it was exported with torch 2.0" in lines
    (tmp_path / "tokenizer.json").write_text("{")
    line = error_of(capsys, "run", tmp_path, "--prompt", "a")
    assert "the tokenizer files in " in line and "export it again" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_run_says_that_there_is_no_gpu(tmp_path, capsys):
    folder_of(tmp_path, {**ABOUT, "device": "cuda"})
    (tmp_path / "model.kernels").write_bytes(b"")
    line = error_of(capsys, "run", tmp_path, "--prompt", "a")
    assert "was exported for a GPU; there is none here" in line


def test_a_failed_export_leaves_the_model_before_as_it_was(tmp_path, capsys, monkeypatch):
    def compile(program, package_path, inductor_configs):
        raise OSError("disk full")

    traced = SimpleNamespace(program=lambda: None, cache_bytes=lambda: 0)
    monkeypatch.setattr(package, "ExportableModel", lambda *_, **options: traced)
    model = write_tiny_folder(tmp_path / "model")
    out = tmp_path / "out"
    out.mkdir()
    folder_of(out, ABOUT)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile)
    assert "disk full" in error_of(capsys, "export", model, "--output", out, "--max-tokens", 64)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
