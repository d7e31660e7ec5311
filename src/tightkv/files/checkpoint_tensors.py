"""The safetensors files that a model's folder would load, and the tensors in them."""

import json
from pathlib import Path

from tightkv.files.tensor_file import StoredTensor, read_header


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor a folder would load, by name; none where it has no safetensors files."""
    return {
        name: tensor
        for path in safetensors_files(folder)
        for name, tensor in read_header(path).items()
    }


def safetensors_files(folder: Path) -> list[Path]:
    """What transformers would load: the indexed shards, else model.safetensors, else any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = {str(name) for name in found}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{index} is not an index of safetensors files") from None
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            return []  # an index without its shards: nothing to measure
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())
