"""The folder of the checkpoint that an engine has loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def checkpoint_folder(vllm_config: Any) -> Path | str:
    """Where the loaded weights lie, or why that is not known."""
    load, model = vllm_config.load_config, vllm_config.model_config
    if load.load_format == "dummy":
        return "its weights are random (load_format dummy)"
    path = Path(model.model)
    if path.is_dir():
        return path
    if path.is_file():
        return f"{model.model!r} is a file; folders with safetensors files are read"
    try:
        from huggingface_hub import snapshot_download

        found = snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    except (ImportError, OSError, ValueError):
        return f"{model.model!r} is neither a folder nor in the hub's local cache"
    return Path(found)
