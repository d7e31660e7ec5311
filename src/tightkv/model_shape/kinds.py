"""The kind of each layer, from the many ways a config can say it."""

from collections.abc import Mapping, Sequence

from tightkv.files.strict_json import short
from tightkv.model_shape.families import ALL_SLIDE
from tightkv.model_shape.source import MOST_LAYERS, ModelConfig

# Names in layer_types and layers_block_type. "hybrid": attention and a state side by side;
# "indexed": attention with a sparse index, known only over a latent (mla).
LAYER_NAMES = {
    **dict.fromkeys(("full_attention", "attention"), "full"),
    **dict.fromkeys(("deepseek_sparse_attention", "indexed_attention"), "indexed"),
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    **dict.fromkeys(("linear_attention", "mamba", "conv"), "linear"),
    "hybrid": "hybrid",
    **dict.fromkeys(("mlp", "moe"), "none"),
}
PATTERN = {"*": "full", "M": "linear", "-": "none", "E": "none"}  # hybrid_override_pattern

# Fields that change what layers keep, in ways that are not read here.
# The first ones matter even where layer_types is given.
ADDS_TO_ATTENTION = ("indexer_n_heads", "linear_attn_config")
NOT_UNDERSTOOD = (
    "attention_types", "attn_type_list", "block_configs", "block_types",
    "global_attn_every_n_layers", "hybrid_layer_pattern", "layer_group_size", "ssm_cfg",
)  # fmt: skip
# Lists with one string per layer that do not say what the cache is.
UNRELATED_LISTS = ("architectures", "mlp_layer_types", "indexer_types")


def layer_kinds(cfg: ModelConfig) -> tuple[list[str], set[int]]:
    """full, indexed, sliding, chunked, linear, hybrid or none for each layer.

    And the layers whose cache others read: the last ones read the last before them of their kind.
    """
    _refuse_fields(cfg, ADDS_TO_ATTENTION)
    kinds = _listed(cfg)
    if kinds is None:
        _refuse_fields(cfg, NOT_UNDERSTOOD)
        _refuse_unread_lists(cfg)
        ways = (_lettered, _indices, _period, _no_rope, _windowed)
        kinds = next((found for way in ways if (found := way(cfg)) is not None), None)
    kinds = ["full"] * num_layers(cfg) if kinds is None else kinds
    if not 1 <= len(kinds) <= MOST_LAYERS:
        raise ValueError(f"{cfg.name} has {len(kinds)} layers; allowed: 1 to {MOST_LAYERS}")
    own = len(kinds) - (cfg.number("num_kv_shared_layers", least=0, most=len(kinds)) or 0)
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    crossing = set(cfg.numbers("cross_attention_layers") or ())  # they keep an image's keys
    alone = ["none" if i >= own or i in crossing else kind for i, kind in enumerate(kinds)]
    return alone, {last[kind] for kind in kinds[own:] if kind in last}


def num_layers(cfg: ModelConfig) -> int:
    return cfg.need("num_hidden_layers", "n_layer", "n_layers", most=MOST_LAYERS)


def window_size(cfg: ModelConfig) -> int | None:
    """The sliding window, or None where it is off."""
    if cfg.flag("use_sliding_window") is False or cfg.first("sliding_window") == 0:
        return None
    return cfg.number("sliding_window")


def _listed(cfg: ModelConfig) -> list[str] | None:
    field = next((x for x in ("layer_types", "layers_block_type") if cfg.words(x) is not None), "")
    names = cfg.words(field)
    if names is None:
        return None
    found = _named(cfg, field, names, LAYER_NAMES, ", ")
    # Nemotron-H counts its layers by this list alone.
    if cfg.model_type != "nemotron_h" and len(names) != num_layers(cfg):
        raise ValueError(
            f"{field} of {cfg.name} names {len(names)} layers, but there are {num_layers(cfg)}"
        )
    return found


def _named(
    cfg: ModelConfig, field: str, names: Sequence[str], known: Mapping[str, str], comma: str
) -> list[str]:
    """The kinds that a field names, each by a word or a letter."""
    if unknown := [name for name in names if name not in known]:
        raise ValueError(
            f"{field} of {cfg.name} has a layer of kind {unknown[0]!r}, which is not understood; "
            f"supported: {comma.join(known)}"
        )
    return [known[name] for name in names]


def _lettered(cfg: ModelConfig) -> list[str] | None:
    pattern = cfg.text("hybrid_override_pattern")
    if pattern is None:
        return None
    return _named(cfg, "hybrid_override_pattern", pattern, PATTERN, " ")


def _indices(cfg: ModelConfig) -> list[str] | None:
    indices = cfg.numbers("attn_layer_indices")
    if indices is None:
        indices = cfg.numbers("full_attn_idxs")
    if indices is None and cfg.model_type != "bamba":
        return None
    full = set(indices or ())
    return ["full" if i in full else "linear" for i in range(num_layers(cfg))]


def _period(cfg: ModelConfig) -> list[str] | None:
    if cfg.model_type == "falcon_h1":
        return ["hybrid"] * num_layers(cfg)
    if cfg.model_type == "jamba":
        period = cfg.need("attn_layer_period")
        offset = cfg.number("attn_layer_offset", least=0) or 0
        return ["full" if i % period == offset else "linear" for i in range(num_layers(cfg))]
    return _every(cfg, cfg.number("full_attention_interval"), "linear")


def _no_rope(cfg: ModelConfig) -> list[str] | None:
    """Llama 4: layers with RoPE see their own chunk only, the others everything."""
    if cfg.first("attention_chunk_size") is None:
        return None
    if flags := cfg.numbers("no_rope_layers"):
        if len(flags) != num_layers(cfg):
            raise cfg.wrong("no_rope_layers", f"a number for each of {num_layers(cfg)} layers")
        return ["chunked" if flag else "full" for flag in flags]
    every = _every(cfg, cfg.number("no_rope_layer_interval"), "chunked")
    return every or ["chunked"] * num_layers(cfg)


def _windowed(cfg: ModelConfig) -> list[str] | None:
    if window_size(cfg) is None:
        return None
    pattern = cfg.first("sliding_window_pattern")
    if isinstance(pattern, str):
        letters = {"L": "sliding", "G": "full"}
        if not pattern or set(pattern) - set(letters):
            raise ValueError(
                f"sliding_window_pattern={pattern!r} of {cfg.name}; supported: L (local) and G"
            )
        return [letters[pattern[i % len(pattern)]] for i in range(num_layers(cfg))]
    if pattern is not None:
        return _every(cfg, cfg.number("sliding_window_pattern"), "sliding")
    count = num_layers(cfg)
    if cfg.model_type in ALL_SLIDE:
        return ["sliding"] * count
    border = cfg.number("max_window_layers", least=0)
    if border is None:
        raise ValueError(
            f"sliding_window={window_size(cfg)} of {cfg.name}, but neither its config nor its "
            f"model_type {cfg.model_type!r} says which layers slide; add layer_types to the config"
        )
    slide = range(border, count)
    if cfg.model_type == "qwen2_moe":
        slide = range(0, border, 2)
    return ["sliding" if i in slide else "full" for i in range(count)]


def _every(cfg: ModelConfig, period: int | None, other: str) -> list[str] | None:
    """Kinds where every `period`-th layer is full and the rest `other`."""
    if period is None:
        return None
    return [other if (i + 1) % period else "full" for i in range(num_layers(cfg))]


def _refuse_fields(cfg: ModelConfig, fields: tuple[str, ...]) -> None:
    for field in fields:
        if cfg.first(field) is not None:
            raise ValueError(
                f"{field}={short(cfg.first(field))} of {cfg.name} changes what its layers keep, "
                f"and it is not supported; use layer_types instead"
            )


def _refuse_unread_lists(cfg: ModelConfig) -> None:
    """Refuse an unknown field with a word for each layer: these can only be kinds."""
    layers = cfg.first("num_hidden_layers", "n_layer", "n_layers")
    for field, value in cfg.values.items():
        if field in UNRELATED_LISTS or not isinstance(value, list) or len(value) != layers:
            continue
        if all(isinstance(entry, str) for entry in value):
            kinds = ", ".join(sorted(set(value)))
            raise ValueError(
                f"{field} of {cfg.name} names a kind for each layer ({kinds}), and this field is "
                f"not understood; only layer_types and layers_block_type are"
            )
