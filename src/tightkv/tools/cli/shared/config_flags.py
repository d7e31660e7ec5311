"""One flag for every field of KVQuantConfig, plus --preset and --config."""

import argparse
import dataclasses
import inspect
import os
import re
from collections.abc import Iterable
from typing import Any

from tightkv.config import ENV_PREFIX, PRESETS, KVQuantConfig, env_fields, fields_of, read_json
from tightkv.config.fields import ConfigFields
from tightkv.config.sources import PRESET_OPTIONS, overlay

OFF_LINE = 'the cache is not compressed: the config has "enabled": false'
_DEST = "kv_"
# `--seed` is the seed of sampling in every command that has one.
_FLAG_NAMES = {"seed": "--rotation-seed"}
_NAMED = ("key_bits", "value_bits", "key_method", "value_method")  # said by a config's name
_METAVARS = {int: "N", float: "X", str: "NAME", tuple: "N,N"}


def flag_name(field: str) -> str:
    """key_bits -> --key-bits."""
    return _FLAG_NAMES.get(field, "--" + field.replace("_", "-"))


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """The cache's options. A flag that is not given leaves its field to the other sources."""
    group = parser.add_argument_group(
        "KV cache",
        "A flag wins over --config, that over --preset, that over the environment "
        f"({ENV_PREFIX}PRESET, {ENV_PREFIX}CONFIG, {ENV_PREFIX}<FIELD>), that over the defaults.",
    )
    group.add_argument("--preset", metavar="NAME", help=f"one of {', '.join(PRESETS)}")
    group.add_argument("--config", metavar="FILE", help="fields as JSON: a .json file, or its text")
    docs = field_docs()
    for field in dataclasses.fields(KVQuantConfig):
        kind: type = type(field.default)
        default = field.default if field.default != () else "none"
        about = f"{docs.get(field.name, '')} (default: {default})".replace("%", "%%").strip()
        options: dict[str, Any] = {"dest": _DEST + field.name, "default": argparse.SUPPRESS}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options |= {"type": _numbers if kind is tuple else kind, "metavar": _METAVARS[kind]}
        group.add_argument(flag_name(field.name), help=about, **options)


def config_from_args(args: argparse.Namespace) -> KVQuantConfig:
    """The config that flags, --config, --preset and the environment give together."""
    return KVQuantConfig.from_dict(options_from_args(args))


def options_from_args(args: argparse.Namespace) -> dict[str, Any]:
    """The same as options, which also say whether the cache is switched off (`config.is_off`)."""
    layers = [
        env_fields(os.environ),
        {} if args.preset is None else {"preset": args.preset},
        {} if args.config is None else fields_of(read_json(args.config)),
        given_fields(args),
    ]
    options: dict[str, Any] = {}
    for layer in layers:
        preset = layer.pop("preset", None)
        options = overlay(options, {} if preset is None else _preset_fields(preset))
        options = overlay(options, layer)
    return options


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Only the fields whose flag is on the command line."""
    names = (field.name for field in dataclasses.fields(KVQuantConfig))
    return {name: getattr(args, _DEST + name) for name in names if hasattr(args, _DEST + name)}


def shortest(config: KVQuantConfig) -> dict[str, Any]:
    """The fewest fields that `KVQuantConfig.from_dict` makes this config of."""
    bases = ((name, KVQuantConfig.preset(name)) for name in PRESETS)
    return min(({"preset": name, **_beside(config, base)} for name, base in bases), key=len)


def label(cfg: KVQuantConfig) -> str:
    """The config's name and every field that differs from its preset, as k4v4 page_size=128."""
    named = {field: getattr(cfg, field) for field in _NAMED}
    base = KVQuantConfig.preset(cfg.name) if cfg.name in PRESETS else KVQuantConfig(**named)
    return " ".join([cfg.name, *(f"{name}={v}" for name, v in _beside(cfg, base).items())])


def _beside(config: KVQuantConfig, base: KVQuantConfig) -> dict[str, Any]:
    plain = base.to_dict()
    return {name: value for name, value in config.to_dict().items() if value != plain[name]}


def parse_configs(
    sources: Iterable[str], calibration: str | None = None
) -> dict[str, KVQuantConfig]:
    """Presets, JSON texts and JSON files -> label -> config; the same one twice is refused.

    With a calibration, each is there without it and with it.
    """
    configs: dict[str, KVQuantConfig] = {}
    for source in sources:
        cfg = KVQuantConfig.parse(source)
        both = [cfg] if calibration is None else [cfg, cfg.replace(calibration=calibration)]
        for one in both:
            name = label(one)
            if name in configs:
                raise ValueError(f"the config {name!r} is given twice; leave one out")
            configs[name] = one
    if not configs:
        raise ValueError("no preset and no config is given; give --presets or --config")
    return configs


def field_docs() -> dict[str, str]:
    """The line of documentation that follows each field in the source of the config."""
    try:
        source = inspect.getsource(ConfigFields)
    except OSError:  # an installation without sources
        return {}
    return dict(re.findall(r'^ {4}(\w+): .*\n {4}"""(.*)"""$', source, re.MULTILINE))


def _numbers(text: str) -> tuple[int, ...]:
    """'3,7' or '3 7' -> (3, 7)."""
    try:
        return tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; give whole numbers with commas") from None


def _preset_fields(name: str) -> dict[str, Any]:
    """The fields in which presets differ; the others are left to what lies below."""
    chosen = KVQuantConfig.preset(name)
    changed = (field for options in PRESET_OPTIONS.values() for field in options)
    return {field: getattr(chosen, field) for field in changed}
