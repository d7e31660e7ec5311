"""Which configs a run measures, and what each is called in tables and files."""

from collections.abc import Iterable

from tightkv.config import PRESETS, KVQuantConfig

# The name of a config says these.
_NAMED = ("key_bits", "value_bits", "key_method", "value_method")


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


def label(cfg: KVQuantConfig) -> str:
    """The config's name and every field that differs from its preset, as k4v4 page_size=128."""
    named = {field: getattr(cfg, field) for field in _NAMED}
    base = KVQuantConfig.preset(cfg.name) if cfg.name in PRESETS else KVQuantConfig(**named)
    plain = base.to_dict()
    changed = [f"{name}={value}" for name, value in cfg.to_dict().items() if value != plain[name]]
    return " ".join([cfg.name, *changed])
