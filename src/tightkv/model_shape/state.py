"""Bytes of the constant state of convolution, Mamba and linear-attention layers.

A convolution keeps `kernel` columns in the model's 16-bit dtype, a recurrence its matrix in
float32, as transformers does.
"""

from tightkv.model_shape.source import ModelConfig

CONV_BYTES = 2
RECURRENT_BYTES = 4


def state_bytes(cfg: ModelConfig, hidden_size: int, num_heads: int, head_dim: int) -> int | None:
    """Bytes per sequence, or None where the config does not name the sizes."""
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
