"""append and attend as operators torch.compile, torch.export and CUDA graphs see through.

`tightkv::append` and `tightkv::attend` take tensors and plain values; which config, shape and
kernels they stand for travels as one string. `append` and `attend` here have the signatures of
the kernel modules.
"""

from __future__ import annotations

import functools
import json
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tightkv.codec import Codec
from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.kernels.check import FLOATS, check_append, check_attend
from tightkv.kernels.registry import select
from tightkv.kernels.view import CacheView
from tightkv.layout import PageLayout, page_layout

_DTYPES = {str(d).removeprefix("torch."): d for d in FLOATS}


def spec_of(layout: PageLayout, kernels: str = "auto") -> str:
    """The string that stands for a layout and the kernels to use."""
    fields = {
        "format": FORMAT_VERSION,
        "config": layout.cfg.to_dict(),
        "heads": layout.num_kv_heads,
        "head_dim": layout.head_dim,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "kernels": kernels,
    }
    return json.dumps(fields, sort_keys=True)


@functools.lru_cache(maxsize=256)
def _codec(spec: str) -> Codec:
    try:
        data = json.loads(spec)
        version, heads, head_dim = data["format"], data["heads"], data["head_dim"]
        config, dtype, _ = data["config"], data["dtype"], data["kernels"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"spec={spec[:80]!r} is not one that spec_of made: {error!r}") from None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"spec has format {version!r}; this tightkv reads format {FORMAT_VERSION}: "
            "make the model again with this version"
        )
    if dtype not in _DTYPES or type(heads) is not int or type(head_dim) is not int:
        raise ValueError(
            f"spec has dtype={dtype!r}, heads={heads!r}, head_dim={head_dim!r}; "
            f"expected one of {', '.join(_DTYPES)} and two whole numbers"
        )
    return Codec(page_layout(KVQuantConfig.from_dict(config), heads, head_dim, _DTYPES[dtype]))


@functools.lru_cache(maxsize=256)
def _kernels(spec: str, device: torch.device) -> ModuleType:
    return select(json.loads(spec)["kernels"], device, _codec(spec).layout)


@torch.library.custom_op(
    "tightkv::append",
    mutates_args=("pages", "ring_key", "ring_value", "sink_key", "sink_value"),
)
def _append(
    spec: str,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    ring_valid_from: Tensor,
    max_new: int,
    encode_partial_page: bool,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    left_pad: Tensor,
    ring_read_from: Tensor,
    sink_counts: Tensor,
    ring_rows: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
    feedback: Tensor | None = None,
) -> None:
    view = CacheView(
        pages, block_table, lengths, left_pad, ring_read_from, sink_counts, ring_rows,
        ring_key, ring_value, sink_key, sink_value, feedback=feedback,
    )  # fmt: skip
    codec = _codec(spec)
    check_append(
        codec.layout,
        view,
        key,
        value,
        cu_seqlens,
        ring_valid_from,
        max_new=max_new,
        encode_partial_page=encode_partial_page,
    )
    _kernels(spec, key.device).append(
        codec,
        view,
        key,
        value,
        cu_seqlens,
        ring_valid_from,
        max_new=max_new,
        encode_partial_page=encode_partial_page,
    )


@torch.library.custom_op("tightkv::attend", mutates_args=())
def _attend(
    spec: str,
    query: Tensor,
    cu_seqlens: Tensor,
    max_queries: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    mask: Tensor | None,
    new_key: Tensor | None,
    new_value: Tensor | None,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    left_pad: Tensor,
    ring_read_from: Tensor,
    sink_counts: Tensor,
    ring_rows: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    sink_key: Tensor,
    sink_value: Tensor,
) -> tuple[Tensor, Tensor]:
    view = CacheView(
        pages, block_table, lengths, left_pad, ring_read_from, sink_counts, ring_rows,
        ring_key, ring_value, sink_key, sink_value,
    )  # fmt: skip
    codec = _codec(spec)
    options: dict[str, Any] = {
        "max_queries": max_queries, "scale": scale, "window": window or None,
        "softcap": softcap or None, "mask": mask, "new_key": new_key, "new_value": new_value,
    }  # fmt: skip
    check_attend(codec.layout, query, view, cu_seqlens, **options)
    out, lse = _kernels(spec, query.device).attend(
        codec, query, view, cu_seqlens, causal=causal, **options
    )
    return out, lse


@_attend.register_fake
def _(spec, query, *arguments):
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    return torch.empty_like(query), lse


def _tensors(view: CacheView) -> tuple[Tensor, ...]:
    return (
        view.pages, view.block_table, view.lengths, view.left_pad, view.ring_read_from,
        view.sink_counts, view.ring_rows, view.ring_key, view.ring_value, view.sink_key,
        view.sink_value,
    )  # fmt: skip


def append(
    spec: str,
    view: CacheView,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    ring_valid_from: Tensor,
    *,
    max_new: int,
    encode_partial_page: bool,
) -> None:
    """`kernels.*.append` with a spec in place of the codec."""
    options = (max_new, encode_partial_page, *_tensors(view), view.feedback)
    _append(spec, key, value, cu_seqlens, ring_valid_from, *options)


def attend(
    spec: str,
    query: Tensor,
    view: CacheView,
    cu_seqlens: Tensor,
    *,
    max_queries: int,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`kernels.*.attend` with a spec in place of the codec."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = (max_queries, scale, causal, window or 0, softcap or 0.0, mask, new_key, new_value)
    out, lse = _attend(spec, query, cu_seqlens, *options, *_tensors(view))
    return out, lse
