"""An exported model in a folder: model.pt2, the tokenizer's files, and tightkv.json about both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tightkv import __version__
from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.export.operator import load_operator
from tightkv.files import whole_file
from tightkv.integrations.transformers.export import ExportableModel, ExportError
from tightkv.layout import MAX_TOKENS
from tightkv.strict_json import parse_json

MODEL_FILE, ABOUT_FILE = "model.pt2", "tightkv.json"
_SCHEMA = 1
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class About:
    """What tightkv.json says."""

    max_tokens: int
    dtype: str
    stop_tokens: list[int]
    cache_bytes: int
    config: dict[str, Any]
    torch: str
    tightkv: str = __version__
    format: int = FORMAT_VERSION
    schema: int = _SCHEMA


def write_package(
    model: Any,
    tokenizer: Any,
    quant: KVQuantConfig,
    folder: Path,
    *,
    max_tokens: int,
    tell: Callable[[str], None],
) -> About:
    """Export, compile with AOTInductor, and write everything; tightkv.json comes last."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise ExportError("AOTInductor compiles C++; install a compiler (g++ or clang++)")
    folder.mkdir(parents=True, exist_ok=True)
    tell("measuring the model and making its caches")
    exportable = ExportableModel(model.requires_grad_(False), quant, max_tokens=max_tokens)
    tell("tracing")
    try:
        program = exportable.program()
    except (RuntimeError, TypeError, torch._dynamo.exc.TorchDynamoException) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ExportError(f"torch.export cannot trace {type(model).__name__}: {reason}") from error
    tell("compiling, which takes minutes")
    with whole_file(folder / MODEL_FILE) as path:
        package = path.with_name(path.name + ".pt2")  # torch wants that ending
        try:
            torch._inductor.aoti_compile_and_package(program, package_path=str(package))
            package.replace(path)
        finally:
            package.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    about = About(
        max_tokens=max_tokens,
        dtype=str(model.dtype).removeprefix("torch."),
        stop_tokens=_stop_tokens(model, tokenizer),
        cache_bytes=exportable.cache_bytes(),
        config=quant.to_dict(),
        torch=torch.__version__,
    )
    with whole_file(folder / ABOUT_FILE) as path:
        path.write_text(json.dumps(asdict(about), indent=2) + "\n", encoding="utf-8")
    return about


def read_about(folder: Path) -> About:
    """tightkv.json, checked."""
    path = folder / ABOUT_FILE
    if not path.is_file() or not (folder / MODEL_FILE).is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {MODEL_FILE} and {ABOUT_FILE}; give a folder that "
            "tightkv export wrote"
        )
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{str(path)!r} is larger than {_MOST_BYTES} bytes")
    try:
        fields = parse_json(data)
        about = About(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is not what tightkv export wrote: {error}") from None
    if (about.schema, about.format) != (_SCHEMA, FORMAT_VERSION):
        raise ValueError(
            f"{str(path)!r} has schema {about.schema!r} and format {about.format!r}; this tightkv "
            f"reads {_SCHEMA} and {FORMAT_VERSION}: export the model again"
        )
    stops = about.stop_tokens
    if (
        type(about.max_tokens) is not int
        or not 1 <= about.max_tokens <= MAX_TOKENS
        or type(stops) is not list
        or any(type(token) is not int for token in stops)
    ):
        raise ValueError(
            f"{str(path)!r} has max_tokens={about.max_tokens!r} and stop_tokens={stops!r}; "
            f"expected 1 to {MAX_TOKENS}, and a list of whole numbers"
        )
    return about


def load_package(folder: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """(input_ids [1, T], cache_position [T]) -> logits. It is machine code: trust its maker."""
    load_operator()
    run: Callable[[Tensor, Tensor], Tensor] = torch._inductor.aoti_load_package(
        str(folder / MODEL_FILE)
    )
    return run


def _stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Every token that ends an answer."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    return [] if found is None else [found] if isinstance(found, int) else list(found)
