"""Where a config comes from: presets and aliases by name, the environment, JSON text and files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tightkv.config.fields import DEFAULTS, unknown_name
from tightkv.files.strict_json import parse_json

# Presets: key and value bits, and what else measurement chose for them (docs/log.md).
PRESET_OPTIONS: dict[str, dict[str, Any]] = {
    "k8v8": {"key_bits": 8, "value_bits": 8},
    "k8v4": {"key_bits": 8, "value_bits": 4},
    "k4v4": {"key_bits": 4, "value_bits": 4},
    "k4v3": {"key_bits": 4, "value_bits": 3},
    "k3v3": {"key_bits": 3, "value_bits": 3},
    "k4v2": {"key_bits": 4, "value_bits": 2},
    "k3v2": {"key_bits": 3, "value_bits": 2},
    "k2v2": {
        "key_bits": 2,
        "value_bits": 2,
        "key_scale": "corrected",
        "page_size": 32,
        "exact_pages": 6,
        "mean_bits": 8,
    },
}
PRESETS = tuple(PRESET_OPTIONS)

# Which sliding windows the vLLM plugin compresses; not a property of a page, so not a field.
Windows = bool | int
"""False: no window; True: windows that become smaller; N: windows of at least N tokens."""

# Names that other servers' configs use for options of the cache (docs/config.md).
SWITCH = "enabled"
WINDOW = "residual_window"
PROTECTED = "protected_layers"
ALIASES = (SWITCH, WINDOW, PROTECTED)
_FIELDS_OF_PROTECTED = ("protected_first", "protected_last")

ENV_PREFIX = "TIGHTKV_"
# These variables ask for compression, as TIGHTKV_<FIELD> does.
ENV_SOURCES = ("TIGHTKV_PRESET", "TIGHTKV_CONFIG")
# These only say how or where things are done.
ENV_SETTINGS = ("TIGHTKV_KERNELS", "TIGHTKV_CACHE_DIR", "TIGHTKV_CPU_ISA")

# A JSON document has the fields at its top, or in this block. Blocks of a server may be beside it,
# which only `tightkv serve` reads.
_BLOCK, _SERVER_BLOCKS = "kv_quant", ("model", "runtime")


def expand(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, checked, with protected_layers written as fields.

    residual_window stays: how many pages it is depends on page_size, which another source may set.
    """
    left = dict(options)
    if SWITCH in left and type(left[SWITCH]) is not bool:
        raise ValueError(f"{SWITCH}={left[SWITCH]!r}; it must be true or false")
    if WINDOW in left:
        _check_count(WINDOW, left[WINDOW], "of newest tokens in the window")
        _refuse_both(left, WINDOW, ("exact_pages",))
    if PROTECTED in left:
        _refuse_both(left, PROTECTED, _FIELDS_OF_PROTECTED)
        count = left.pop(PROTECTED)
        _check_count(
            PROTECTED, count, "of layers at each end; name single layers with layer_bits, '0=k8v8'"
        )
        left |= dict.fromkeys(_FIELDS_OF_PROTECTED, count)
    return left


def overlay(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `options`. Whoever sets anything switches a cache on that was switched off."""
    gone = {SWITCH} if given else set()
    gone |= {WINDOW} if "exact_pages" in given else set()
    gone |= {"exact_pages"} if WINDOW in given else set()
    return {name: value for name, value in options.items() if name not in gone} | dict(given)


def _check_count(name: str, value: object, what: str) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}={value!r}; it must be a count {what}")


def _refuse_both(options: Mapping[str, Any], alias: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        if field in options:
            raise ValueError(f"{alias!r} and {field!r} set the same option; keep one of them")


def _from_text(field: str, text: str) -> Any:
    """An environment string as the field's type."""
    kind: type = type(DEFAULTS[field])
    try:
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[text.strip().lower()]
        if kind is tuple:
            return tuple(int(part) for part in text.replace(",", " ").split())
        return kind(text)
    except (ValueError, KeyError):
        forms = {"bool": "0, 1, true or false", "tuple": "numbers with commas"}
        wanted = forms.get(kind.__name__, kind.__name__)
        raise ValueError(f"{ENV_PREFIX}{field.upper()}={text!r}; it must be {wanted}") from None


def env_requests(env: Mapping[str, str]) -> list[str]:
    """The variables that ask for compression; an unknown TIGHTKV_* name is refused."""
    fields = [ENV_PREFIX + field.upper() for field in DEFAULTS]
    known = (*ENV_SOURCES, *fields, *ENV_SETTINGS)
    for name in env:
        if name.startswith(ENV_PREFIX) and name not in known:
            raise ValueError(unknown_name("environment variable", name, known))
    return [name for name in env if name in known and name not in ENV_SETTINGS]


def env_fields(env: Mapping[str, str]) -> dict[str, Any]:
    """What the TIGHTKV_* variables set, as `KVQuantConfig.from_dict` takes it."""
    options: dict[str, Any] = {}
    if "TIGHTKV_PRESET" in env:
        options["preset"] = env["TIGHTKV_PRESET"]
    if "TIGHTKV_CONFIG" in env:
        options = overlay(options, fields_of(read_json(env["TIGHTKV_CONFIG"])))
    fields = {}
    for name in env_requests(env):
        if name not in ENV_SOURCES:
            field = name[len(ENV_PREFIX) :].lower()
            fields[field] = _from_text(field, env[name])
    return overlay(options, fields)


def is_off(options: Mapping[str, Any]) -> bool:
    """Whether {"enabled": false} leaves everything uncompressed."""
    return fields_of(options).get(SWITCH) is False


def fields_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """The config fields of a document: its kv_quant block, or all of it where there is none.

    Aliases are checked. page_size may stand in the runtime block instead.
    """
    if _BLOCK not in document:
        return expand(document)
    for name in document:
        if name in (*DEFAULTS, "preset", *ALIASES):
            raise ValueError(f"{name!r} is next to {_BLOCK!r}; move it into that block")
        if name not in (_BLOCK, *_SERVER_BLOCKS):
            raise ValueError(unknown_name("block", name, (_BLOCK, *_SERVER_BLOCKS)))
    inner = document[_BLOCK]
    if not isinstance(inner, Mapping):
        raise ValueError(f"{_BLOCK}={inner!r}; it must be an object of config fields")
    runtime = document.get("runtime") or {}
    if not isinstance(runtime, Mapping):
        raise ValueError(f"runtime={runtime!r}; it must be an object")
    size = runtime.get("page_size")
    if size is not None and inner.get("page_size", size) != size:
        raise ValueError(
            f"page_size={inner['page_size']!r} in {_BLOCK!r} and {size!r} in 'runtime'; keep one"
        )
    return expand({**inner, **({} if size is None else {"page_size": size})})


def read_source(source: str | os.PathLike[str]) -> dict[str, Any]:
    """The options that a preset's name, JSON text or a .json file stands for."""
    text = os.fspath(source)
    if text in PRESETS:
        return {"preset": text}
    if not text.lstrip().startswith("{") and not text.endswith(".json"):
        raise ValueError(
            unknown_name("preset", text, PRESETS)
            + "; or give JSON text or the path of a .json file"
        )
    return read_json(text)


def read_json(source: str) -> dict[str, Any]:
    """A JSON object from text or from a file."""
    text = source
    if not source.lstrip().startswith("{"):
        try:
            text = Path(source).read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"config file {source!r} does not exist") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"config file {source!r} cannot be read: {error}") from None
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(f"config {source!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"config {source!r} is a JSON {type(data).__name__}; it must be an object")
    return data


def is_windows(given: Any) -> bool:
    return type(given) is bool or (type(given) is int and given >= 1)


def cache_root() -> Path:
    """The folder of converted models and compiled kernels.

    $TIGHTKV_CACHE_DIR, or the user's cache directory. An OSError where the user has no home.
    """
    own, shared = os.environ.get("TIGHTKV_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared) if shared else Path.home() / ".cache") / "tightkv"
    except RuntimeError as error:  # containers may run as a user that the system does not know
        raise OSError(f"no cache folder ({error}); set TIGHTKV_CACHE_DIR to one") from None
