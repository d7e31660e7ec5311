"""attend(): attention over a compressed layer, every operand checked, kernel chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from tightkv.cache import PagedKV, even_rows
from tightkv.kernels.view import CacheView

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def attend(
    cache: PagedKV,
    query: Tensor,
    *,
    view: CacheView | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of query [B, Lq, Hq, D] over a layer: output [B, Lq, Hq, D], LSE [B, Lq, Hq].

    Row b attends to sequence b. Query i is token length - Lq + i of its row, so causal
    attention with Lq != tokens aligns to the end; with new_key/new_value [B, Lq, Hkv, D] the
    queries' own tokens follow the cache without being in it. `view` is the layer's own view
    unless given. See `kernels.reference.attend` for the other options.
    """
    tokens = 0
    if view is None:
        tokens, view = max(cache.table.lengths, default=0), cache.view()
    elif mask is not None and view.batch:
        tokens = int(view.lengths.max())
    layout = cache.layout
    heads, d = layout.num_kv_heads, layout.head_dim
    _expect("query", query, (view.batch, None, None, d), cache.device)
    if query.shape[2] % heads:
        raise ValueError(
            f"query has {query.shape[2]} heads; the cache has {heads}: not a whole multiple"
        )
    if query.dtype not in _FLOATS:
        raise ValueError(f"query is {query.dtype}; supported: float16, bfloat16, float32")
    if (new_key is None) != (new_value is None):
        raise ValueError("new_key and new_value go together; only one was given")
    if new_key is not None and new_value is not None:
        wanted = (view.batch, query.shape[1], heads, d)
        _expect("new_key", new_key, wanted, cache.device)
        _expect("new_value", new_value, wanted, cache.device)
        tokens += new_key.shape[1]
    if window is not None and window < 1:
        raise ValueError(f"window={window}; it must be at least 1, or None for no window")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap={softcap}; it must be positive, or None for no cap")
    if mask is not None:
        _expect("mask", mask, (None, None, query.shape[1], None), cache.device)
        if mask.shape[0] not in (1, view.batch) or mask.shape[1] not in (1, query.shape[2]):
            raise ValueError(
                f"mask has shape {tuple(mask.shape)}; expected "
                f"[{view.batch} or 1, {query.shape[2]} or 1, {query.shape[1]}, tokens]"
            )
        if mask.shape[3] < tokens:
            raise ValueError(f"mask covers {mask.shape[3]} tokens; the cache has {tokens}")
    batch, lq = query.shape[:2]
    out, lse = cache.kernels.attend(
        cache.codec,
        query.flatten(0, 1),
        view,
        even_rows(batch, lq, query.device),
        max_queries=lq,
        scale=scale,
        causal=causal,
        window=window,
        softcap=softcap,
        mask=mask,
        new_key=None if new_key is None else new_key.flatten(0, 1),
        new_value=None if new_value is None else new_value.flatten(0, 1),
    )
    return out.unflatten(0, (batch, lq)), lse.unflatten(0, (batch, lq))


def _expect(name: str, x: Tensor, shape: tuple[int | None, ...], device: torch.device) -> None:
    """Rank first, then each size that is fixed, then the device."""
    wanted = "[" + ", ".join("*" if n is None else str(n) for n in shape) + "]"
    fits = x.dim() == len(shape) and all(
        n is None or n == m for n, m in zip(shape, x.shape, strict=False)
    )
    if not fits:
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {wanted}")
    if x.device.type != device.type:
        raise ValueError(f"{name} is on {x.device}; the cache is on {device}")
