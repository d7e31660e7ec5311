"""The bundled model: its GGUF file made, once, into a folder that transformers loads quickly."""

import hashlib
import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tightkv.config import cache_root
from tightkv.tools.model_loading.source import BUNDLED_NAME, bundled_gguf

# Bumped whenever the same GGUF file would be converted to other files.
_CONVERSION = 1
_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_ABANDONED_SECONDS = 24 * 3600  # after these, what a killed conversion left is removed


def bundled_folder(progress: Callable[[str], None]) -> Path:
    """The converted bundled model; the first call converts it, which takes half a minute.

    The folder appears whole or not at all: it is written beside its place and then renamed.
    """
    gguf, root = bundled_gguf(), cache_root()
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()[:16]
    folder = root / f"{gguf.stem}-{gguf.stat().st_size}-{digest}-{_CONVERSION}"
    if _is_whole(folder):
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{folder.name}.lock"):
            if not _is_whole(folder):  # another process may have made it while this one waited
                _make(folder, gguf, progress)
    except OSError as error:
        raise OSError(
            f"the bundled model cannot be converted into {root} ({error}); "
            "set TIGHTKV_CACHE_DIR to a folder with 300 MB of space"
        ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    """Whether every file is there and none is cut off, as a lost disk may leave them."""
    try:
        for name in _FILES:
            if name.endswith(".json"):
                json.loads((folder / name).read_bytes())
            else:
                with safe_open(folder / name, framework="pt"):
                    pass  # it compares its header with the file's size
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def _make(folder: Path, gguf: Path, progress: Callable[[str], None]) -> None:
    for other in folder.parent.glob(f"{folder.name}.*"):
        if other.is_dir() and time.time() - other.stat().st_mtime > _ABANDONED_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    begin = time.monotonic()
    progress(f"converting the bundled {BUNDLED_NAME}, once; this takes half a minute or so")
    beside = {"prefix": f"{folder.name}.", "dir": str(folder.parent)}
    with tempfile.TemporaryDirectory(**beside, ignore_cleanup_errors=True) as unfinished:
        convert(gguf, Path(unfinished), progress)
        shutil.rmtree(folder, ignore_errors=True)  # files that somebody took parts of
        Path(unfinished).rename(folder)
    progress(f"converted in {time.monotonic() - begin:.0f} s; kept in {folder}")


def convert(gguf: Path, folder: Path, progress: Callable[[str], None]) -> None:
    """Write the model and tokenizer of a GGUF file as bf16 safetensors, tokenizer and config."""
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    progress("reading the tokenizer (1 of 3)")
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    progress("reading and dequantizing the weights (2 of 3)")
    # plain weights, also where transformers could keep them packed; older ones cannot
    packed = getattr(transformers, "GgufConfig", None)
    plain = None if packed is None else packed(dequantize=True)
    with redirect_stderr(io.StringIO()):  # transformers' bar for GGUF tensors cannot be turned off
        model = transformers.AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=plain
        )
    progress("writing (3 of 3)")
    weights = {name: w.to(torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures, model.config.dtype = [type(model).__name__], torch.bfloat16
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
