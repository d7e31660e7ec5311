"""vLLM's options as vLLM's own parser reads them, and those among them that `serve` sets itself.

vLLM takes underscores for dashes, `=` or a space before a value, unambiguous prefixes of names,
`--option.key value` for an entry of a JSON option, and more options from a YAML file. An option
with keys replaces the whole of the same option as JSON: the command may have only one of the two.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tightkv.tools.cli.shared.output import MissingPackageError

ADDITIONAL, _MODEL, _FILE = "--additional-config", "--model", "--config"
_OURS = "tightkv"
_SHORTEST = len("--ad")  # a shorter prefix is ambiguous to vLLM


def with_dashes(word: str) -> str:
    """--max_model_len=1 -> --max-model-len=1; keys after a dot and values stay."""
    return re.sub(r"^--[^.=]*", lambda name: name[0].replace("_", "-"), word)


def name_of(word: str) -> str:
    return re.split("[.=]", word, maxsplit=1)[0]


def take_model(given: str | None, options: Sequence[str]) -> tuple[str | None, list[str]]:
    """The model, which --model may name instead, and the options without that."""
    left = []
    for word, value in _pairs(options, lambda name: name == _MODEL):
        if value is None:
            left.append(word)
        elif given not in (None, value):
            raise ValueError(
                f"{_MODEL} {value} and the model {given!r}; give one of them, before vLLM's options"
            )
        else:
            given = value
    for before, word in pairwise(["--=", *left]):
        if before.startswith("--") and "=" in before and not word.startswith("-"):
            raise ValueError(f"{word!r} is no option's value; vLLM would ignore it")
    return given, left


def read_vllm_file(options: Sequence[str]) -> dict[str, Any]:
    """Options and values of the YAML file that vLLM's --config names; nothing without one."""
    if _FILE not in options[:-1]:  # the only form that vLLM reads
        return {}
    path = options[options.index(_FILE) + 1]
    try:
        import yaml
    except ImportError:
        raise MissingPackageError(f"vLLM's {_FILE} {path}", "vLLM", "vllm") from None
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"vLLM's {_FILE} {path} cannot be read: {error}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"vLLM's {_FILE} {path}; it must be a mapping of vLLM's options")
    found = {with_dashes(f"--{name}"): value for name, value in data.items()}
    model = found.get(_MODEL, "")
    if not isinstance(model, str):
        raise ValueError(f"model: {model!r} in vLLM's {_FILE} {path}; it must be a string")
    return found


def with_ours(options: Sequence[str], file: Mapping[str, Any], ours: Any) -> list[str]:
    """The options with `ours` as the entry "tightkv" of --additional-config.

    Every other entry is kept, wherever it was given; one of that name is refused.
    """
    left, with_keys = list[str](), list[str]()
    given = [
        (name, f"{name} in vLLM's {_FILE} file", value)
        for name, value in file.items()
        if _is_additional(name_of(name))
    ]
    for word, value in _pairs(options, _is_additional):
        if value is None:
            left.append(word)
            continue
        given.append((word, word, value))
        if "." in word:
            with_keys.append(f"{ADDITIONAL}.{word.split('.', 1)[1]}={value}")
    entries: dict[str, Any] = {}
    for word, where, value in given:
        if "." in word:
            _refuse_ours(where, word.split(".")[1].removesuffix("+"), value)
        else:
            entries |= _entries(where, value)
    if not any("." in word for word, *_ in given):
        return [*left, ADDITIONAL, json.dumps({**entries, _OURS: ours})]
    for key in entries:
        if "." in key or key.endswith("+"):
            raise ValueError(
                f"{ADDITIONAL} has the key {key!r}, and there are options like {ADDITIONAL}.KEY, "
                "which cannot name it; give all of it as one JSON object"
            )
    words = [f"{ADDITIONAL}.{key}={json.dumps(value)}" for key, value in entries.items()]
    return [*left, *words, *with_keys, f"{ADDITIONAL}.{_OURS}", json.dumps(ours)]


def _is_additional(name: str) -> bool:
    return len(name) >= _SHORTEST and ADDITIONAL.startswith(name)


def _pairs(options: Sequence[str], wanted: Any) -> Iterator[tuple[str, str | None]]:
    """(option, value) of those whose name is wanted, and (word, None) of all other words."""
    words = iter(options)
    for word in words:
        if not wanted(name_of(word)):
            yield word, None
            continue
        option, equals, value = word.partition("=")
        if not equals:
            value = next(words, "")
        if not value:
            raise ValueError(f"{option} without a value")
        yield option, value


def _entries(where: str, value: Any) -> dict[str, Any]:
    text = value
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        data = json.loads(text)
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{where} {text!r} is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where} {text!r}; it must be a JSON object")
    for key in data:
        _refuse_ours(where, key, text)
    return data


def _refuse_ours(where: str, key: str, value: Any) -> None:
    if key == _OURS:
        raise ValueError(
            f'{where} {value}: tightkv serve sets "{_OURS}" there itself; give its fields as '
            f"options of tightkv serve (--preset NAME, --sinks N) or as its {_FILE} FILE"
        )
