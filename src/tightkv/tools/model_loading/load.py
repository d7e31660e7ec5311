"""load_model: a model and its tokenizer by folder, by hub id, or the bundled one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging as hf_logging

import tightkv.integrations.transformers  # noqa: F401 - registers the attention "tightkv"
from tightkv.tools.model_loading.bundled import bundled_folder
from tightkv.tools.model_loading.source import DTYPE_NAMES, check_source, is_hub_id, model_folder

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
_CPUINFO = Path("/proc/cpuinfo")
# What that file calls instructions that multiply bf16 numbers: x86, x86, ARM.
_BF16_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}


def load_model(
    source: str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    attn_implementation: str = "tightkv",
    progress: Callable[[str], None] | None = None,
) -> tuple[Any, Any]:
    """The model, ready to generate, and its tokenizer.

    `source` is a local folder or a hub id; None is the bundled SmolLM2-135M-Instruct.
    `device` None takes CUDA where there is one; "auto" spreads the model over all devices.
    `dtype` None is bf16 on CUDA and on a CPU that multiplies bf16 numbers, else float32.
    `progress` gets a line for each slow step; without it these go to the logger "tightkv".
    """
    check_source(source)
    report = progress or logging.getLogger("tightkv").info
    place = _device(device)
    kind = None if dtype is None else str(dtype).removeprefix("torch.")
    if kind not in (None, *DTYPES):
        raise ValueError(f"dtype={kind!r}; supported: {', '.join(DTYPES)}")
    options: dict[str, Any] = {"dtype": default_dtype(place) if kind is None else DTYPES[kind]}
    options |= {"device_map": "auto"} if place is None else {}
    with quiet():
        if source is None:
            name = str(bundled_folder(report))
        elif not is_hub_id(source):
            name = str(model_folder(source))
        else:
            report(f"looking for {source} in the hub's local cache and on the hub")
            name = source
        with _one_line_errors(source):
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
            model = _pretrained(name, attn_implementation, report, **options)
    if place is not None:
        model.to(place)
    return model.eval(), tokenizer


def _pretrained(
    name: str, implementation: str, report: Callable[[str], None], **options: Any
) -> Any:
    """Falcon, GPT-J and GPT-Neo have a class for each implementation they know, and no others."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    try:
        return load(name, attn_implementation=implementation, **options)
    except KeyError as error:
        if error.args != (implementation,):
            raise
    report(f"this model has no attention {implementation!r}: the whole cache is read at every step")
    return load(name, **options)


def default_dtype(device: torch.device | None) -> torch.dtype:
    """bf16 where it is fast, else float32. None stands for every device there is."""
    on_cpu = not torch.cuda.is_available() if device is None else device.type == "cpu"
    if not on_cpu:
        return torch.bfloat16
    try:
        words = _CPUINFO.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return torch.float32
    return torch.float32 if _BF16_FLAGS.isdisjoint(words) else torch.bfloat16


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress bars and only errors."""
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _device(device: torch.device | str | None) -> torch.device | None:
    """A device that is there; None means all of them."""
    if device == "auto":
        return None
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device={device!r}; supported: cpu, cuda, cuda:N, auto") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if place.type == "cuda" and (place.index or 0) >= count:
        raise ValueError(f"device={str(device)!r}; torch sees {count} CUDA devices; use cpu")
    return place


@contextmanager
def _one_line_errors(source: str | None) -> Iterator[None]:
    """Say which model it was, and only the first line of what transformers says."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        if source is not None and is_hub_id(source):
            message = (
                f"{source!r} is no local folder, and it cannot be had from the hub ({reason}); "
                "give a local model folder, or check the name and the network"
            )
        else:
            message = f"the model {source or 'bundled'!r} cannot be loaded: {reason}"
        raise ValueError(message) from error
