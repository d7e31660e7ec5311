"""Exported tiny models as .pte files in ExecuTorch's runtime, its text runner and a C++ program."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from greedy import COUNT, greedy, with_tight_cache
from models import prompt, tiny
from tightkv.integrations import executorch
from tightkv.integrations.transformers.export import ExportableModel
from tightkv.tools.cli import main
from tightkv.tools.model_loading.load import load_model
from tiny_folder import write_tiny_folder

pytestmark = pytest.mark.skipif(find_spec("executorch") is None, reason="needs ExecuTorch")
PROMPT = "The quick brown fox. " * 4
SHAPE = ("--max-tokens", "320", "--dtype", "float32", "--preset", "k4v4")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory, pytestconfig):
    """Without the optimization, which takes most of the time, but for --all-shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        if not pytestconfig.getoption("--all-shapes"):
            patch.setattr(executorch, "_FLAGS", ("-O0", *executorch._FLAGS[1:]))
        executorch.operator_library.cache_clear()
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model folder and what `tightkv export` made of it. Its answers are of ASCII letters."""
    root = tmp_path_factory.mktemp("exported")
    model, out = write_tiny_folder(root / "model", num_hidden_layers=1), root / "out"
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"][:66] = weights["lm_head.weight"][92:] = 0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    argv = ["export", str(model), "--output", str(out), "--format", "pte", "--backend", "portable"]
    assert main([*argv, *SHAPE]) == 0
    return model, out


@pytest.fixture(scope="module")
def expected(exported):
    """The tokens that a TightCache gives, and their text."""
    model, tokenizer = load_model(str(exported[0]), dtype="float32", device="cpu")
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    tokens, _ = greedy(with_tight_cache(model, "k4v4"), ids, COUNT)
    return ids[0].tolist(), tokens[0].tolist(), tokenizer.decode(tokens[0])


@pytest.mark.slow
def test_the_commands(exported, expected, capsys):
    argv = ["--prompt", PROMPT, "--raw", "--max-new-tokens", str(COUNT), "--json"]
    assert main(["run", str(exported[1] / "model.pte"), *argv]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == expected[1] and answer["text"] == expected[2]
    assert len(set(answer["tokens"])) > 5


@pytest.mark.slow
def test_many_prompts_and_the_end_of_the_cache(exported):
    model, _ = load_model(str(exported[0]), dtype="float32", device="cpu")
    run = executorch.load_pte(exported[1] / "model.pte")
    for count, seed in ((100, 1), (7, 2)):
        ids = prompt(1, count, seed)
        tokens, logits = greedy(run, ids, COUNT)
        same, tight_logits = greedy(with_tight_cache(model, "k4v4"), ids, COUNT)
        assert torch.equal(tokens, same)
        torch.testing.assert_close(logits, tight_logits, atol=1e-3, rtol=1e-3)
    with pytest.raises(RuntimeError):
        run(prompt(1, 4), torch.arange(318, 322))  # beyond the cache


TEXT_RUNNER = """
import ctypes, sys
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner
library, model, tokenizer, prompt, count, out = sys.argv[1:]
ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
runner, parts = TextLLMRunner(model, tokenizer), []
runner.generate(
    prompt, GenerationConfig(echo=False, max_new_tokens=int(count), temperature=0.0), parts.append
)
assert "tightkv" not in sys.modules
open(out, "w").write("".join(parts))
"""


@pytest.mark.slow
def test_executorchs_own_text_runner(exported, expected, tmp_path):
    """TextLLMRunner, with no file but those of the exported folder."""
    library, folder = executorch.operator_library(), exported[1]
    words = [library, folder / "model.pte", folder / "tokenizer.json", PROMPT, COUNT]
    done = subprocess.run(
        [sys.executable, "-c", TEXT_RUNNER, *map(str, words), str(tmp_path / "text")],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    assert (tmp_path / "text").read_text() == expected[2]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    """examples/executorch, built against the wheel: (model, prompt) -> tokens."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    example, build = (
        Path(__file__).parents[2] / "examples" / "executorch",
        tmp_path_factory.mktemp("c"),
    )
    wheel, _ = executorch.installed()
    options = [f"-DCMAKE_PREFIX_PATH={wheel / 'share/cmake'}", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (["-S", example, "-B", build, *options], ["--build", build]):
        subprocess.run(["cmake", *command], check=True, capture_output=True)

    def run(model, ids):
        words = [str(word) for word in (build / "run", model, COUNT, *ids)]
        done = subprocess.run(words, check=True, capture_output=True, text=True)
        return [int(token) for token in done.stdout.split()]

    return run


@pytest.mark.thorough
@pytest.mark.slow
def test_the_runner_without_torch_or_python(exported, expected, runner):
    assert runner(exported[1] / "model.pte", expected[0]) == expected[1]


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), [("qwen2", "portable"), ("gemma2", "xnnpack")])
def test_other_models_and_xnnpack(tmp_path, family, backend):
    model = tiny(family).requires_grad_(False)
    path = tmp_path / "model.pte"
    program = ExportableModel(model, "k3v3", max_tokens=320).program()
    path.write_bytes(executorch.to_pte(program, backend=backend))
    ids = prompt(1, 100)
    tokens, _ = greedy(executorch.load_pte(path), ids, COUNT)
    same, _ = greedy(with_tight_cache(model, "k3v3"), ids, COUNT)
    assert torch.equal(tokens, same)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_in_bf16(tmp_path, runner):
    """As the module says it, in Python and in C++."""
    model = tiny("llama", torch.bfloat16, num_hidden_layers=1).requires_grad_(False)
    static = ExportableModel(model, "k4v4", max_tokens=320)
    path = tmp_path / "model.pte"
    path.write_bytes(executorch.to_pte(static.program(), backend="xnnpack"))
    ids = prompt(1, 100)
    expected, _ = greedy(static, ids, COUNT)
    tokens, _ = greedy(executorch.load_pte(path), ids, COUNT)
    assert torch.equal(tokens, expected)
    assert runner(path, ids[0].tolist()) == expected[0].tolist()


def test_the_library_is_kept():
    path = executorch.operator_library()
    executorch.operator_library.cache_clear()
    assert executorch.operator_library() == path and path.is_file()


def test_other_backends_are_refused():
    with pytest.raises(ValueError, match="backend='cuda'; supported: xnnpack, portable"):
        executorch.to_pte(None, backend="cuda")
