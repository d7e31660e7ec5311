"""How many bytes a model's cache takes under each config, and how much fits a memory budget.

`model_shape.compressible` says which layers are compressed, `cache_bytes` what layers take. Layers
that are not compressed (sliding, chunked, recurrent) stay as the model keeps them, at 16 bits.
Latents (MLA) are planned as in vLLM, which alone compresses them; so are sliding windows if asked
for.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tightkv.config import KVQuantConfig, Windows
from tightkv.model_shape import LayerShape, ModelShape, compressed_layers, skip_reason, weights
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.model_shape.compressible import windows_of_other_pages
from tightkv.model_shape.shape import INDEXED
from tightkv.pages.latent import LatentLayout, latent_layout
from tightkv.pages.layout import PageLayout

# Memory in MiB as the driver reports it, which is what can be allocated.
_GPU_FILE = Path(__file__).with_name("gpus.json")
GPUS: dict[str, int] = json.loads(_GPU_FILE.read_text(encoding="utf-8"))
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}

# Bytes per number in the caches to compare with. nvfp4: 4 bits, and an fp8 scale for 16 numbers.
BASELINES = {"bf16": 2, "fp8": 1, "nvfp4": 0.5625}
# Bytes per token of an indexed latent, whose formats have a size of their own (fp8_ds_mla and
# nvfp4_ds_mla: vLLM 0.32, MLAAttention.get_kv_cache_spec).
INDEXED_LATENT_BYTES = {"fp8": 656, "nvfp4": 352}
# Dtypes that no MLA backend of vLLM 0.32 has for other latents (supported_kv_cache_dtypes).
NOT_FOR_LATENTS = ("nvfp4",)

# A cache that holds this many tokens is limited by something else than memory.
_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class CachePlan(CacheBytes):
    """A model's whole cache under one config (or, as a baseline, without one)."""

    name: str
    config: KVQuantConfig | None = None
    refusal: str | None = None
    """Why the vLLM plugin refuses the config for this model's latents, if it does."""

    @property
    def bytes_per_token_per_layer(self) -> float | None:
        """Mean over the layers that can be compressed; None where there is none."""
        sizes = [layer.bytes_per_token for layer in self.layers if kept_reason(layer.shape) is None]
        return sum(sizes) / len(sizes) if sizes else None

    def max_tokens(self, memory: int) -> int | None:
        """The longest single sequence that fits `memory` bytes; None where none is too long."""
        if self.total_bytes(_NO_LIMIT) <= memory:
            return None
        return bisect_right(range(1, _NO_LIMIT), memory, key=self.total_bytes)

    def max_requests(self, memory: int, tokens: int) -> int:
        """How many sequences of `tokens` tokens fit together."""
        return max(0, memory) // max(1, self.total_bytes(tokens))


def kept_reason(layer: LayerShape) -> str | None:
    """Why no config compresses a layer; None where TightCache does or, for latents, vLLM."""
    return skip_reason(layer, "vllm" if layer.kind == "mla" else "transformers")


def baseline_plan(name: str, shape: ModelShape, ranks: int = 1) -> CachePlan:
    """One of BASELINES, for every attention layer that vLLM has it for."""
    sizes = []
    for layer in (each.shard(ranks) for each in shape.layers):
        if layer.kind == "mla" and INDEXED in layer.extras:
            sizes.append(LayerBytes(layer, latent_bytes=INDEXED_LATENT_BYTES.get(name)))
        elif layer.kind == "mla" and name in NOT_FOR_LATENTS:
            sizes.append(LayerBytes(layer))
        else:
            sizes.append(LayerBytes(layer, BASELINES[name]))
    return CachePlan(tuple(sizes), name)


def config_plan(
    name: str, shape: ModelShape, cfg: KVQuantConfig, ranks: int = 1, windows: Windows = False
) -> CachePlan:
    """The cache of one rank under `cfg`; `windows`: which sliding ones vLLM is to compress."""
    layers = [layer.shard(ranks) for layer in shape.layers]
    if (beyond := max(cfg.bits_of_layers(), default=0)) >= len(layers) > 0:
        raise ValueError(
            f"layer_bits={cfg.layer_bits!r} names layer {beyond}; the model has layers 0 to "
            f"{len(layers) - 1}"
        )
    # Protected layers are the first and last of those that are compressed.
    compressed = sorted(compressed_layers(layers) + compressed_windows(layers, cfg, windows))
    latent, refusal = _latents(layers, cfg, cache_dtype(shape))
    layouts: dict[int, PageLayout | LatentLayout] = {}
    if latent is not None:
        layouts = {i: latent for i, layer in enumerate(layers) if layer.kind == "mla"}
    for number, i in enumerate(compressed):
        layer_cfg = cfg.for_layer(number, len(compressed), i)
        if layer_cfg.compresses:
            heads, dim = layers[i].num_kv_heads, layers[i].head_dim
            layouts[i] = PageLayout(layer_cfg, heads, dim, cache_dtype(shape))
    sizes = (LayerBytes(layer, layout=layouts.get(i)) for i, layer in enumerate(layers))
    return CachePlan(tuple(sizes), name, cfg, refusal)


def compressed_windows(
    layers: Sequence[LayerShape], cfg: KVQuantConfig, windows: Windows
) -> list[int]:
    """Layers with a sliding window that the vLLM plugin compresses under `cfg`, by number."""
    found = {
        i: layer
        for i, layer in enumerate(layers)
        if skip_reason(layer, "vllm", windows, cfg) is None
    }
    other = windows_of_other_pages(found, cfg) if windows else set()
    return [i for i, layer in found.items() if layer.kind == "sliding" and i not in other]


def _latents(
    layers: list[LayerShape], cfg: KVQuantConfig, dtype: torch.dtype
) -> tuple[LatentLayout | None, str | None]:
    """The layout of the latents that can be compressed, or why `cfg` is refused for them."""
    latents = (layer for layer in layers if layer.kind == "mla" and kept_reason(layer) is None)
    layer = next(latents, None)  # a config gives all layers the same
    if layer is None:
        return None, None
    try:
        rank = layer.latent_dim - layer.rope_dim
        return latent_layout(cfg, rank, layer.rope_dim, dtype), None
    except ValueError as error:
        return None, str(error)


def latent_notes(plans: list[CachePlan], shape: ModelShape) -> list[str]:
    """Notes about the latents (MLA) in a model's plans."""
    latents = [layer for layer in shape.layers if layer.kind == "mla"]
    notes = []
    if any(kept_reason(layer) is None for layer in latents):
        notes.append(
            "latents (MLA) are compressed in vLLM alone; transformers keeps them in its "
            "DynamicCache"
        )
    if any(INDEXED not in layer.extras for layer in latents):
        notes += [
            f"{plan.name}: vLLM has none for latents (MLA); they are counted at 16 bits"
            for plan in plans
            if plan.name in NOT_FOR_LATENTS
        ]
    return notes + [
        f"{plan.name}: counted at 16 bits, for the vLLM plugin refuses it: {plan.refusal}"
        for plan in plans
        if plan.refusal is not None
    ]


def cache_dtype(shape: ModelShape) -> torch.dtype:
    """The 16-bit dtype that a cache is planned with."""
    return torch.bfloat16 if shape.dtype == torch.float32 else shape.dtype


@dataclass(frozen=True)
class Weights:
    """Bytes of the weights on one rank and where the number comes from."""

    bytes: int
    dtype: str | None
    source: str  # given, measured (files), counted (an empty model) or estimated (the config)


def plan_weights(shape: ModelShape, dtype: str | None = None, ranks: int = 1) -> Weights | None:
    """Measured where the files are there, else estimated; None where neither is possible."""
    stored_dtype = weights.weights_dtype(shape)
    quantized = shape.config.get("quantization_config") is not None
    stored = weights.stored_weights(shape.folder) if shape.folder else None
    if stored is not None:
        size, parameters = stored
        if dtype in (None, stored_dtype):
            return Weights(-(-size // ranks), stored_dtype, "measured")
        if parameters is not None and not quantized:
            return Weights(_bytes_of(parameters, dtype, ranks), dtype, "measured")
    parameters, dtype = weights.estimate_parameters(shape), dtype or stored_dtype
    if parameters is None or dtype is None:
        return None
    return Weights(_bytes_of(parameters, dtype, ranks), dtype, "estimated")


def count_weights(parameters: int, shape: ModelShape, dtype: str | None, ranks: int) -> Weights:
    """The weights of a model whose number of parameters is known."""
    dtype = dtype or weights.weights_dtype(shape)
    if dtype is None:
        method = shape.config["quantization_config"].get("quant_method")
        raise ValueError(f"weights of {shape.name} are quantized by {method!r}: give their size")
    return Weights(_bytes_of(parameters, dtype, ranks), dtype, "counted")


def _bytes_of(parameters: int, dtype: str | None, ranks: int) -> int:
    if dtype not in WEIGHT_BITS:
        raise ValueError(f"weights dtype {dtype!r}; supported: {', '.join(WEIGHT_BITS)}")
    return -(-parameters * WEIGHT_BITS[dtype] // (8 * ranks))
