"""CacheFormat: what a scheduler knows of the pages that its engine's workers hold."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from tightkv.integrations.vllm.layer_numbers import model_layers
from tightkv.model_shape.cache_bytes import CacheBytes, LayerBytes
from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import PageLayout, window_step

ENGINE_FORMAT = "_tightkv_format"  # of a VllmConfig, in the process of the scheduler


@dataclass(frozen=True)
class CacheFormat:
    """The format of one worker's cache, or of all workers' (`joined`)."""

    fingerprint: str
    """A digest of what the bytes of every compressed layer mean."""
    name: str
    page_size: int
    exact_pages: int
    window_step: int
    """Tokens by which the window moves on, in the layer where it begins first."""
    rows: int
    """Sequences that can have a ring at a time."""
    bytes_per_token: float
    plain_bytes_per_token: int
    """Bytes per token of a 16-bit cache."""
    kernels: tuple[str, ...]
    block_bytes: float = 0
    """Bytes of one of vLLM's blocks, which belongs to layers of one kind."""

    @property
    def ratio(self) -> float:
        return self.plain_bytes_per_token / self.bytes_per_token

    def reusable_tokens(self, newest: int) -> int:
        """Tokens before the window of token `newest`."""
        end = (newest // self.window_step + 1) * self.window_step
        return max(0, end // self.page_size - self.exact_pages) * self.page_size


def worker_format(worker: Any) -> CacheFormat | None:
    """The format of a worker, which runs this when its cache is allocated."""
    found = format_of(worker.vllm_config)
    if found is None:
        return None
    impls = _impls(worker.vllm_config)
    groups = worker.model_runner.kv_cache_config.kv_cache_groups
    block_bytes = (
        group.kv_cache_spec.block_size
        * sum(impls[name].layout.bytes_per_token for name in group.layer_names if name in impls)
        for group in groups
    )
    return replace(found, block_bytes=max(block_bytes))


def weights_mark(worker: Any) -> str:
    """A digest of numbers from all over a worker's parameters and rotary tables."""
    model = worker.get_model()
    rotary = (x for name, x in model.named_buffers() if name.endswith("cos_sin_cache"))
    found = (x.detach() for x in (*model.parameters(), *rotary) if x.numel() and not x.is_meta)
    plain = (x for x in found if not hasattr(x, "__tensor_flatten__"))  # else made of others
    return _hash(*map(_grid, plain))


def _grid(x: Tensor) -> Tensor:
    """Numbers from all parts of x: vLLM fuses projections, which may change one by one."""
    most = 128 if x.dim() < 3 else 16
    return x[tuple(slice(None, None, -(-n // most)) for n in x.shape)]


def _impls(vllm_config: Any) -> dict[str, Any]:
    """The attention of layers that have pages of their own."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    impls = {name: getattr(layer, "impl", None) for name, layer in layers.items()}
    return {
        name: impl
        for name, impl in impls.items()
        if isinstance(getattr(impl, "layout", None), PageLayout | LatentLayout)
        and getattr(impl, "reads", None) is None
    }


def format_of(vllm_config: Any) -> CacheFormat | None:
    """The format of this process' installed layers; None if none is compressed."""
    impls = _impls(vllm_config)
    if not impls:
        return None
    numbers = model_layers(
        impls, {name for name, impl in impls.items() if getattr(impl, "is_draft", False)}
    )
    layouts = [impl.layout for impl in impls.values()]
    size = CacheBytes(tuple(LayerBytes.of_layout(layout) for layout in layouts))
    first = next(iter(impls.values()))
    latent = isinstance(first.layout, LatentLayout)  # coded token by token, without rings
    return CacheFormat(
        fingerprint=_digest([_meaning(numbers[name], impl) for name, impl in impls.items()]),
        name="+".join(sorted({layout.cfg.name for layout in layouts})),
        page_size=first.layout.page_size,
        exact_pages=0 if latent else first.layout.cfg.exact_pages,
        window_step=min(window_step(layout.cfg) for layout in layouts),
        rows=0 if latent else first.limits.rows,
        bytes_per_token=size.bytes_per_token,
        plain_bytes_per_token=size.bf16_bytes_per_token,
        kernels=tuple(sorted({impl.kernels.NAME for impl in impls.values()})),
    )


def joined(formats: Sequence[CacheFormat | None]) -> CacheFormat | None:
    """The format of an engine from those of its workers, in the order of their ranks."""
    known = [found for found in formats if found is not None]
    if not known:
        return None
    return replace(
        known[0],
        fingerprint=_digest([None if one is None else one.fingerprint for one in formats]),
        window_step=min(one.window_step for one in known),
        rows=min(one.rows for one in known),
        bytes_per_token=sum(one.bytes_per_token for one in known),
        plain_bytes_per_token=sum(one.plain_bytes_per_token for one in known),
        kernels=tuple(sorted({name for one in known for name in one.kernels})),
        block_bytes=sum(one.block_bytes for one in known),
    )


def engine_format(vllm_config: Any) -> CacheFormat | None:
    """What `joined` gives the scheduler, in a worker: all workers of the engine run this."""
    formats = [format_of(vllm_config)]
    for group in (get_tp_group(), get_pp_group()):  # ranks of a stage follow each other
        parts = [formats] * group.world_size
        torch.distributed.all_gather_object(parts, formats, group=group.cpu_group)
        formats = [found for part in parts for found in part]
    return joined(formats)


def _meaning(number: int, impl: Any) -> tuple[Any, ...]:
    """What a layer's bytes depend on: its format, its heads, and what tokens are relative to."""
    layout = impl.layout
    if isinstance(layout, LatentLayout):
        sizes = layout.rank, layout.rope_dim, str(layout.dtype)
        cfg = layout.cfg.replace(window_bits=16)  # there is no window, whatever the default
        return "latent", number, cfg.fingerprint(), *sizes
    centers = None if impl.centers is None else _hash(*impl.centers)
    scale = None if impl.key_scale is None else _hash(impl.key_scale.value)
    heads = layout.num_kv_heads, layout.head_dim
    meaning = number, layout.cfg.fingerprint(), *heads, str(layout.raw_dtype), centers, scale
    return (*meaning, "packed", impl.packed_pages) if impl.packed_pages else meaning


def _hash(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(x.cpu().float().numpy().tobytes() for x in tensors)).hexdigest()


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
