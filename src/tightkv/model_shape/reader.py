"""read_model_shape: a model's config as the shapes of its layers' caches."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from tightkv.model_shape import shape as shapes
from tightkv.model_shape.families import ALIBI_FAMILIES, REFUSED, SINK_FAMILIES
from tightkv.model_shape.kinds import layer_kinds, window_size
from tightkv.model_shape.source import MOST_DIM, MOST_HEADS, ModelConfig, load_config

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
    "float32": torch.float32,
    "float": torch.float32,
}

CONV_BYTES, RECURRENT_BYTES = 2, 4  # of a number in the states of convolutions, of recurrences
# Any of these says which layers are recurrent.
SAYS_LAYERS = (
    "layer_types", "layers_block_type", "hybrid_override_pattern", "full_attn_idxs",
    "attn_layer_indices",
)  # fmt: skip


def read_model_shape(source: Any) -> shapes.ModelShape:
    """The shape of a folder with config.json, such a file, a mapping, or a transformers config.

    Raises FileNotFoundError where there is no such file, and ValueError where the model has no
    KV cache or where the config is not understood.
    """
    cfg = load_config(source)
    _refuse_models_without_cache(cfg)
    notes: list[str] = []
    num_heads = cfg.need("num_attention_heads", "n_head", "n_heads", most=MOST_HEADS)
    hidden_size = cfg.need("hidden_size", "n_embd", "d_model", "n_embed")
    layers = _layers(cfg, num_heads, hidden_size, notes)
    cfg.record("quantization_config")
    return shapes.ModelShape(
        name=cfg.name,
        model_type=cfg.model_type,
        layers=layers,
        num_heads=num_heads,
        hidden_size=hidden_size,
        vocab_size=cfg.need("vocab_size"),
        dtype=_dtype(cfg, notes),
        max_positions=_max_positions(cfg),
        notes=tuple(notes),
        folder=cfg.folder,
        config=cfg.values,
        composite=cfg.nested,
    )


def _refuse_models_without_cache(cfg: ModelConfig) -> None:
    if cfg.flag("is_encoder_decoder"):
        raise ValueError(
            f"{cfg.name} is an encoder-decoder model (model_type {cfg.model_type!r}); only "
            f"decoder-only models are supported"
        )
    masked = [a for a in cfg.words("architectures") or () if a.endswith("ForMaskedLM")]
    reason = REFUSED.get(cfg.model_type) or (REFUSED["bert"] if masked else None)
    if reason and not cfg.flag("is_decoder"):
        raise ValueError(f"{cfg.name} (model_type {cfg.model_type!r}) has no KV cache: {reason}")
    if cfg.first("vocab_size") is None:
        raise ValueError(
            f"the config of {cfg.name} has no vocab_size: it is not that of a language model"
        )


def _layers(
    cfg: ModelConfig, num_heads: int, hidden_size: int, notes: list[str]
) -> tuple[shapes.LayerShape, ...]:
    kinds, shared = layer_kinds(cfg)
    heads, head_dim = _kv_heads(cfg, num_heads), _head_dim(cfg, num_heads, hidden_size)
    state = _state_bytes(cfg, hidden_size, num_heads, head_dim)
    recurrent = {"linear", "hybrid"} & set(kinds)
    if state is None and recurrent:
        notes.append("the config does not give the size of the recurrent state; counted as 0")
    if state is not None and not recurrent and cfg.first(*SAYS_LAYERS) is None:
        raise ValueError(
            f"{cfg.name} (model_type {cfg.model_type!r}) has recurrent layers, but its config does "
            f"not say which; add layer_types to it"
        )
    window = _useful_window(cfg, kinds, notes)
    latent = None if cfg.first("kv_lora_rank") is None else _latent_layer(cfg, set(kinds))
    value_head_dim = cfg.number("v_head_dim", most=MOST_DIM)
    alibi = cfg.model_type in ALIBI_FAMILIES or cfg.flag("alibi")
    extras = (shapes.ALIBI,) * bool(alibi) + (shapes.SINKS,) * (cfg.model_type in SINK_FAMILIES)
    found = []
    for index, kind in enumerate(kinds):
        layer_heads, layer_dim = _layer_override(cfg, index, kind, heads, head_dim)
        sizes = layer_heads, layer_dim, value_head_dim or layer_dim
        if kind == "none":
            shape = shapes.LayerShape("none")
        elif kind == "linear":
            shape = shapes.LayerShape("linear", state_bytes=state)
        elif latent is not None:
            shape = latent
        elif kind == "indexed":
            raise ValueError(
                f"layer {index} of {cfg.name} is of kind 'indexed_attention' without a latent "
                f"(kv_lora_rank), which is not understood"
            )
        elif kind == "sliding" and window is None:
            shape = shapes.LayerShape("full", *sizes, extras=(shapes.WINDOW,))
        elif kind == "sliding":
            shape = shapes.LayerShape("sliding", *sizes, window)
        elif kind == "chunked":
            shape = shapes.LayerShape("chunked", *sizes, cfg.need("attention_chunk_size"))
        else:
            own_state = state if kind == "hybrid" else 0
            own = ((shapes.SHARED,) if index in shared else ()) + extras
            shape = shapes.LayerShape("full", *sizes, state_bytes=own_state, extras=own)
        found.append(shape)
    if count := cfg.number("num_kv_shared_layers", least=0):
        notes.append(f"the last {count} layers read the cache of earlier ones and hold none")
    if crossing := cfg.numbers("cross_attention_layers"):
        notes.append(
            f"{len(crossing)} cross-attention layers hold the image's keys and values, which do "
            f"not grow with the text; not counted"
        )
    return tuple(found)


def _kv_heads(cfg: ModelConfig, num_heads: int) -> int:
    if cfg.flag("multi_query") and not cfg.flag("new_decoder_architecture"):
        return 1
    names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    heads = cfg.number(*names, most=MOST_HEADS) or num_heads
    if num_heads % heads and cfg.first("kv_lora_rank") is None:
        raise ValueError(
            f"{num_heads} query heads of {cfg.name} are not a multiple of its {heads} KV heads"
        )
    return heads


def _head_dim(cfg: ModelConfig, num_heads: int, hidden_size: int) -> int:
    if cfg.first("kv_lora_rank") is not None:
        return 0  # a latent instead of heads
    dim = cfg.number("head_dim", "attention_head_dim", most=MOST_DIM)
    if dim is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"the config of {cfg.name} has no head_dim, and hidden_size={hidden_size} is not a "
                f"multiple of {num_heads} heads"
            )
        dim = hidden_size // num_heads
        if dim > MOST_DIM:
            raise cfg.wrong("hidden_size", f"at most {MOST_DIM} for each of {num_heads} heads")
    return dim


def _layer_override(
    cfg: ModelConfig, index: int, kind: str, heads: int, head_dim: int
) -> tuple[int, int]:
    """KV heads and head_dim of one layer, which a config may name for single layers."""
    layers = cfg.record("per_layer_config") or {}
    values = layers.get(index) if layers.get(str(index)) is None else layers[str(index)]
    if values is not None:
        if not isinstance(values, Mapping):
            raise cfg.wrong("per_layer_config", "an object with an object for each layer")
        own = replace(cfg, values=values, name=f"layer {index} of {cfg.name}")
        own_heads = own.number("num_key_value_heads", most=MOST_HEADS)
        return own_heads or heads, own.number("head_dim", most=MOST_DIM) or head_dim
    if kind == "full" and cfg.first("global_head_dim") is not None:
        if cfg.flag("attention_k_eq_v"):
            heads = cfg.number("num_global_key_value_heads", most=MOST_HEADS) or heads
        return heads, cfg.need("global_head_dim", most=MOST_DIM)
    return heads, head_dim


def _latent_layer(cfg: ModelConfig, kinds: set[str]) -> shapes.LayerShape:
    """DeepSeek's latent and the shared RoPE key.

    An index is counted as vLLM 0.32 keeps it (models/deepseek_v2.py, Indexer): a byte per number
    and a float32 scale for 128 of them.
    """
    rank = cfg.need("kv_lora_rank", most=MOST_DIM)
    rope = cfg.need("qk_rope_head_dim", most=MOST_DIM)
    index = cfg.number("index_head_dim", most=MOST_DIM) or 0
    found = {
        shapes.INDEXED: index or "indexed" in kinds,
        shapes.BESIDE_OTHERS: {"linear", "hybrid"} & kinds,
        shapes.LATENT_WINDOW: {"sliding", "chunked"} & kinds,
    }
    return shapes.LayerShape(
        "mla",
        latent_dim=rank + rope,
        rope_dim=rope,
        index_bytes=index + index // 128 * 4,
        extras=tuple(extra for extra in found if found[extra]),
    )


def _useful_window(cfg: ModelConfig, kinds: list[str], notes: list[str]) -> int | None:
    """The window, or None if no sequence can be longer."""
    if "sliding" not in kinds:
        return None
    window, longest = window_size(cfg), _max_positions(cfg)
    if window is None:
        raise ValueError(f"{cfg.name} has sliding layers but its config has no sliding_window")
    if longest is not None and window >= longest:
        notes.append(
            f"sliding_window={window} never slides within max_position_embeddings={longest}: "
            f"its layers grow like full attention, and are not compressed"
        )
        return None
    return window


def _max_positions(cfg: ModelConfig) -> int | None:
    return cfg.number("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def _dtype(cfg: ModelConfig, notes: list[str]) -> torch.dtype:
    for field in ("dtype", "torch_dtype"):
        if (value := cfg.first(field)) is not None:
            text = str(value).removeprefix("torch.")
            if text not in DTYPES:
                raise cfg.wrong(field, ", ".join(DTYPES))
            return DTYPES[text]
    notes.append("the config names no dtype; bfloat16 is assumed")
    return torch.bfloat16


def _state_bytes(cfg: ModelConfig, hidden_size: int, num_heads: int, head_dim: int) -> int | None:
    """Bytes of a layer's constant state, per sequence; None where the config names no sizes.

    A convolution keeps `kernel` columns in the model's 16-bit dtype, a recurrence its matrix in
    float32, as transformers does.
    """
    if cfg.first("linear_num_value_heads") is not None:
        return _delta_net(cfg)
    if cfg.first("conv_L_cache") is not None:
        return hidden_size * cfg.need("conv_L_cache") * CONV_BYTES
    if cfg.first("mamba_n_groups", "mamba_ngroups", "n_groups") is not None:
        return _mamba2(cfg, hidden_size)
    if cfg.first("mamba_d_state") is not None:
        inner = cfg.need("mamba_expand") * hidden_size
        conv, recurrent = inner * cfg.need("mamba_d_conv"), inner * cfg.need("mamba_d_state")
        return conv * CONV_BYTES + recurrent * RECURRENT_BYTES
    if cfg.model_type == "minimax":  # lightning attention: one matrix per head
        return num_heads * head_dim * head_dim * RECURRENT_BYTES
    return None


def _delta_net(cfg: ModelConfig) -> int:
    key_heads, key_dim = cfg.need("linear_num_key_heads"), cfg.need("linear_key_head_dim")
    value_heads, value_dim = cfg.need("linear_num_value_heads"), cfg.need("linear_value_head_dim")
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    recurrent = value_heads * key_dim * value_dim
    kernel = cfg.need("linear_conv_kernel_dim")
    return channels * kernel * CONV_BYTES + recurrent * RECURRENT_BYTES


def _mamba2(cfg: ModelConfig, hidden_size: int) -> int:
    heads = cfg.need("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    inner = cfg.number("mamba_d_ssm")
    if cfg.first("mamba_num_heads") is not None:  # Nemotron-H names its head size, not the factor
        inner = heads * cfg.need("mamba_head_dim")
    if inner is None:
        inner = cfg.need("mamba_expand", "expand") * hidden_size
    groups = cfg.need("mamba_n_groups", "mamba_ngroups", "n_groups")
    states = cfg.need("mamba_d_state", "ssm_state_size")
    channels = inner + 2 * groups * states
    conv = channels * cfg.need("mamba_d_conv", "conv_kernel")
    return conv * CONV_BYTES + inner * states * RECURRENT_BYTES
