"""What a config.json leaves out because its family's code knows it."""

from __future__ import annotations

from typing import Any

_GEMMA = {"tie_word_embeddings": True}
_QWEN = {"use_sliding_window": False, "max_window_layers": 28}

# Applied where the config has no such key; an explicit null stays null.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4, "tie_word_embeddings": True},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True, "tie_word_embeddings": True},
    "gemma": _GEMMA,
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, **_GEMMA},
    "gemma3_text": {"sliding_window": 4096, "sliding_window_pattern": 6, **_GEMMA},
    "gemma3n_text": {
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "num_kv_shared_layers": 15,
        **_GEMMA,
    },
    "gemma4_text": {
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "global_head_dim": 512,
        **_GEMMA,
    },
    "gpt2": {"tie_word_embeddings": True},
    "gpt_bigcode": {"multi_query": True, "tie_word_embeddings": True},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2},
    "granitemoehybrid": {"mamba_expand": 2},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "lfm2": {"tie_word_embeddings": True},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "mistral": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN,
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
}

_LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_QWEN2 = {
    **_LLAMA_7B,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_QWEN35 = {
    "vocab_size": 248320,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_GEMMA3 = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}

# A composite config.json leaves out the sizes of its language part that equal these.
NESTED_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {**_GEMMA3, "intermediate_size": 9216},
    "gemma3n_text": {
        **_GEMMA3,
        "vocab_size": 262400,
        "hidden_size": 2048,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "gemma4_text": {**_GEMMA3, "vocab_size": 262144, "num_hidden_layers": 30},
    "llama": _LLAMA_7B,
    "llama4_text": {
        "vocab_size": 202048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    "mistral": {
        **_LLAMA_7B,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "qwen2": _QWEN2,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen3_5_text": {
        **_QWEN35,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    },
    "qwen3_5_moe_text": {
        **_QWEN35,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
    },
}

# Families whose sliding_window, where set, holds for every layer.
ALL_SLIDE = (
    "doge", "ministral3", "mistral", "mixtral", "moshi", "phi3", "phi4_multimodal", "phimoe",
    "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "starcoder2",
)  # fmt: skip

# Families whose scores have a bias by distance, and those with a learned logit beside the keys.
ALIBI_FAMILIES = ("bloom", "mpt")
SINK_FAMILIES = ("gpt_oss",)

# Families that have nothing this project can act on, and why.
_ENCODER = "it is an encoder: it reads a whole text at once and keeps no KV cache"
_RECURRENT = "it is recurrent: it has no attention layers and so no KV cache"
_ENCODERS = (
    "albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert",
    "mpnet", "roberta", "xlm-roberta",
)  # fmt: skip
REFUSED: dict[str, str] = {
    **dict.fromkeys(_ENCODERS, _ENCODER),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), _RECURRENT),
}
