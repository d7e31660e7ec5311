"""What a JSON config says beside its kv_quant block: which model is served, and how."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tightkv.config import Windows, fields_of, is_windows, read_json, unknown_name

# The runtime block: name -> vLLM's option. exact_rows and sliding_windows are ours; page_size is
# the cache's (`config.fields_of`).
_RUNTIME = {
    "max_seq_len": "--max-model-len",
    "max_batch_size": "--max-num-seqs",
    "total_kv_pages": "--num-gpu-blocks-override",  # a block is a page
    "weight_dtype": "--dtype",
}
# What other servers' files have there and nothing here needs -> what happens instead.
_UNUSED = {
    "backend": "vLLM runs on the device that its build is for",
    "device": "vLLM runs on the device that its build is for",
    "kv_dtype": "exact tokens are kept in the dtype of the model",
    "max_new_tokens": "every request says how long its answer may be",
}
_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
# name -> what its value must be, and that in words
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((*_RUNTIME, "page_size"), (lambda n: type(n) is int and n >= 1, "a count")),
    "weight_dtype": (lambda name: isinstance(name, str), "the name of a dtype"),
    "exact_rows": (lambda n: type(n) is int and n >= 0, "a count"),
    "sliding_windows": (is_windows, "true, false, or the shortest window in tokens"),
    **dict.fromkeys(_UNUSED, (lambda _: True, "")),
    "kv_dtype": (_KV_DTYPES.__contains__, f"one of {', '.join(_KV_DTYPES)}: codes are kv_quant's"),
}
_MODEL_KEYS = ("model_dir", "model_id", "model_format")
_FORMAT = "huggingface"


@dataclass(frozen=True)
class ServerFile:
    """A model, the name it is served under, vLLM's options, and the plugin's own."""

    model: str | None = None
    served_name: str | None = None
    options: tuple[str, ...] = ()
    exact_rows: int | None = None
    windows: Windows = False
    notes: tuple[str, ...] = ()  # what the file asks for and is not done


def read_server_file(source: str | None) -> ServerFile:
    """The model and runtime blocks of a JSON file or text; nothing of none."""
    document = {} if source is None else read_json(source)
    fields_of(document)  # refuses what may not stand there
    if "kv_quant" not in document:
        return ServerFile()
    model, name = _model(document.get("model"))
    runtime = _runtime(document.get("runtime", {}))
    words = [word for key in _RUNTIME if key in runtime for word in (_RUNTIME[key], runtime[key])]
    notes = [
        f"{key}={runtime[key]!r} is not used: {_UNUSED[key]}" for key in _UNUSED if key in runtime
    ]
    rows, windows = runtime.get("exact_rows"), runtime.get("sliding_windows", False)
    return ServerFile(model, name, tuple(map(str, words)), rows, windows, tuple(notes))


def model_of(given: str | None, sources: Sequence[str]) -> str | None:
    """The model of the command line, else the one that the config files name."""
    named = {read_server_file(source).model for source in sources} - {None}
    if given is not None or not named:
        return given
    if len(named) > 1:
        raise ValueError(
            f"the config files name {', '.join(map(repr, sorted(map(str, named))))}; "
            "give the model on the command line"
        )
    return named.pop()


def _model(block: Any) -> tuple[str | None, str | None]:
    if block is None or (isinstance(block, str) and block):
        return block, None
    if not isinstance(block, Mapping) or not isinstance(block.get("model_dir"), str):
        raise ValueError(
            f"model={block!r}; it must be a folder or hub id, or an object with a 'model_dir'"
        )
    _refuse_unknown("model", block, _MODEL_KEYS)
    if block.get("model_format", _FORMAT) != _FORMAT:
        raise ValueError(f"model_format={block['model_format']!r}; supported: {_FORMAT}")
    name = block.get("model_id")
    if name is not None and not isinstance(name, str):
        raise ValueError(f"model_id={name!r}; it must be a name")
    return block["model_dir"], name


def _runtime(block: Any) -> dict[str, Any]:
    """The block, checked, without entries that are null."""
    if not isinstance(block, Mapping):
        raise ValueError(f"runtime={block!r}; it must be an object of {', '.join(_RUNTIME)}")
    _refuse_unknown("runtime", block, tuple(_RULES))
    given = {name: value for name, value in block.items() if value is not None}
    for name, value in given.items():
        good, wanted = _RULES[name]
        if not good(value):
            raise ValueError(f"{name}={value!r} in the runtime block; it must be {wanted}")
    return given


def _refuse_unknown(where: str, block: Mapping[str, Any], allowed: Sequence[str]) -> None:
    for name in block:
        if name not in allowed:
            raise ValueError(unknown_name(f"name in the {where} block", name, allowed))
