"""Exported tiny models as .pte files in ExecuTorch's runtime."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from greedy import COUNT, greedy, with_tight_cache
from models import prompt, tiny
from tightkv.cli import main
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.model_loading.load import load_model
from tiny_folder import write_tiny_folder

pytest.importorskip("executorch", reason="needs ExecuTorch")

from tightkv.integrations import executorch


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("llama", "portable"), ("gemma2", "xnnpack")])
def test_a_pte_says_what_the_tight_cache_says(tmp_path, family, backend):
    model = tiny(family).requires_grad_(False)
    program = ExportableModel(model, "k4v4", max_tokens=320).program()
    path = tmp_path / "model.pte"
    path.write_bytes(executorch.to_pte(program, backend=backend, get_max_seq_len=320))
    run = executorch.load_pte(path)
    for count, seed in ((100, 1), (7, 2)):
        ids = prompt(1, count, seed)
        tokens, logits = greedy(run, ids, COUNT)
        expected, tight_logits = greedy(with_tight_cache(model, "k4v4"), ids, COUNT)
        assert torch.equal(tokens, expected)
        torch.testing.assert_close(logits, tight_logits, atol=1e-3, rtol=1e-3)
    with pytest.raises(RuntimeError):
        run(prompt(1, 4), torch.arange(318, 322))  # beyond the cache


@pytest.mark.slow
def test_the_commands(tmp_path, capsys):
    model = write_tiny_folder(tmp_path / "model")
    out, text = tmp_path / "out", "The quick brown fox. " * 4
    argv = ["--format", "pte", "--backend", "portable", "--max-tokens", "300"]
    argv += ["--dtype", "float32", "--preset", "k4v4"]
    assert main(["export", str(model), "--output", str(out), *argv]) == 0
    assert "model.pte: " in capsys.readouterr().out
    argv = ["--prompt", text, "--raw", "--max-new-tokens", "100", "--json"]
    assert main(["run", str(out / "model.pte"), *argv]) == 0
    answer = json.loads(capsys.readouterr().out)["tokens"]
    tight, tokenizer = load_model(str(model), dtype="float32", device="cpu")
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    expected, _ = greedy(with_tight_cache(tight, "k4v4"), ids, 100)
    assert answer == expected[0, : len(answer)].tolist()
    assert len(answer) == 100 or answer[-1] == 1


@pytest.mark.slow
def test_the_runner_without_torch_or_python(tmp_path):
    """examples/executorch, built against the wheel."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    model, ids = tiny("qwen2").requires_grad_(False), prompt(1, 100)
    program = ExportableModel(model, "k3v3", max_tokens=320).program()
    (tmp_path / "model.pte").write_bytes(executorch.to_pte(program, backend="portable"))
    example = Path(__file__).parents[2] / "examples" / "executorch"
    wheel, _ = executorch.installed()
    prefix = f"-DCMAKE_PREFIX_PATH={wheel / 'share/cmake'}"
    for command in (["-S", example, "-B", tmp_path, prefix], ["--build", tmp_path]):
        subprocess.run(["cmake", *command], check=True, capture_output=True)
    words = [tmp_path / "run", tmp_path / "model.pte", COUNT, *ids[0].tolist()]
    done = subprocess.run([str(w) for w in words], check=True, capture_output=True, text=True)
    expected, _ = greedy(with_tight_cache(model, "k3v3"), ids, COUNT)
    assert done.stdout.split() == [str(token) for token in expected[0].tolist()]


def test_the_library_is_kept():
    path = executorch.operator_library()
    executorch.operator_library.cache_clear()
    assert executorch.operator_library() == path and path.is_file()


def test_other_backends_are_refused():
    with pytest.raises(ValueError, match="backend='cuda'; supported: xnnpack, portable"):
        executorch.to_pte(None, backend="cuda")
