"""How many bytes a model's weights take: counted on disk, or estimated from its config."""

import math
from collections.abc import Mapping
from pathlib import Path

from tightkv.files.tensor_file import read_header, safetensors_files
from tightkv.model_shape.families import MLP_MATRICES
from tightkv.model_shape.shape import LayerShape, ModelShape
from tightkv.model_shape.source import ModelConfig

_GATED = 3  # of MLP_MATRICES
FP8_METHODS = ("fp8", "fbgemm_fp8", "modelopt_fp8")


def stored_weights(folder: Path) -> tuple[int, int | None] | None:
    """Bytes and parameters of the weights a folder would load, or None where it has none.

    The number of parameters is None where the format hides it.
    """
    files = safetensors_files(folder)
    if files:  # sizes count wherever they are: shards may have tensors of one name
        tensors = [tensor for path in files for tensor in read_header(path).values()]
        parameters = sum(math.prod(tensor.shape) for tensor in tensors)
        return sum(tensor.bytes for tensor in tensors), parameters
    files = sorted(folder.glob("pytorch_model*.bin"))
    return (sum(path.stat().st_size for path in files), None) if files else None


def weights_dtype(shape: ModelShape) -> str | None:
    """What the checkpoint stores: its dtype, or that of its quantization; None where unclear."""
    quantization = shape.config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return str(shape.dtype).removeprefix("torch.")
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method in FP8_METHODS:
        return "fp8"
    if method == "mxfp4" or bits == 4 or quantization.get("load_in_4bit"):
        return "int4"
    return "int8" if bits == 8 or quantization.get("load_in_8bit") else None


def estimate_parameters(shape: ModelShape) -> int | None:
    """Parameters of a standard decoder-only transformer; None where the config does not tell.

    Vision and audio towers, norms and biases are not in it.
    """
    cfg = ModelConfig(shape.config, shape.name, None, False)
    if shape.model_type not in MLP_MATRICES or any(layer.state_bytes for layer in shape.layers):
        return None
    needed = ["intermediate_size"] if MLP_MATRICES[shape.model_type] == _GATED else []
    if any(layer.kind == "mla" for layer in shape.layers):
        needed += ["qk_nope_head_dim", "v_head_dim"]
    if any(cfg.number(name) is None for name in needed):
        return None
    embeddings = 1 if cfg.flag("tie_word_embeddings") else 2
    total = embeddings * shape.vocab_size * shape.hidden_size
    if shape.model_type in ("gpt2", "gpt_bigcode"):
        total += (shape.max_positions or 0) * shape.hidden_size
    sparse = _sparse_layers(cfg, shape.num_layers)
    for index, layer in enumerate(shape.layers):
        total += _attention(cfg, shape, layer) + _mlp(cfg, shape, index in sparse)
    return total


def _attention(cfg: ModelConfig, shape: ModelShape, layer: LayerShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_heads
    if layer.kind != "mla":
        queries, outputs = heads * layer.head_dim, heads * layer.value_head_dim
        return hidden * (queries + layer.elements_per_token + outputs)
    nope, rope = cfg.need("qk_nope_head_dim"), cfg.need("qk_rope_head_dim")
    value, rank = cfg.need("v_head_dim"), cfg.need("kv_lora_rank")
    query_rank, queries = cfg.number("q_lora_rank"), heads * (nope + rope)
    query = hidden * queries if query_rank is None else query_rank * (hidden + queries)
    down, up = hidden * (rank + rope), rank * heads * (nope + value)
    return query + down + up + heads * value * hidden


def _mlp(cfg: ModelConfig, shape: ModelShape, sparse: bool) -> int:
    hidden, matrices = shape.hidden_size, MLP_MATRICES[shape.model_type]
    dense = cfg.number("ffn_hidden_size", "n_inner", "intermediate_size") or 4 * hidden
    experts = cfg.number("num_local_experts", "num_experts", "n_routed_experts")
    if experts is None or not sparse:
        return matrices * hidden * dense
    width = cfg.number("moe_intermediate_size") or dense
    shared = cfg.number("shared_expert_intermediate_size")
    if shared is None:
        shared = (cfg.number("n_shared_experts", least=0) or 0) * width
    return hidden * experts + matrices * hidden * (experts * width + shared)


def _sparse_layers(cfg: ModelConfig, count: int) -> set[int]:
    """Layers whose MLP has experts, if the model has any."""
    step = cfg.number("decoder_sparse_step") or 1
    first = cfg.number("first_k_dense_replace", least=0) or 0
    found = {i for i in range(first, count) if (i + 1) % step == 0}
    return found - set(cfg.numbers("mlp_only_layers") or ())
