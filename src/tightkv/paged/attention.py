"""attend(): attention over a compressed layer, every operand checked, kernel chosen."""

from typing import Any

from torch import Tensor

from tightkv.kernels.check import (
    check_heads,
    check_mask,
    check_mask_tokens,
    check_new_tokens,
    check_options,
    expect,
)
from tightkv.kernels.ragged_plan import uniform_cu_seqlens
from tightkv.kernels.view import AttendOptions, CacheView
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import RowTensors


def attend(
    cache: PagedKV,
    query: Tensor,
    *,
    rows: RowTensors | None = None,
    same_length: int | None = None,
    **given: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of query [B, Lq, Hq, D] over a layer: output [B, Lq, Hq, D], LSE [B, Lq, Hq].

    Row b attends to sequence b. Query i is token length - Lq + i of its row, so causal
    attention with Lq != tokens aligns to the end; with new_key/new_value [B, Lq, Hkv, D] the
    queries' own tokens follow the cache without being in it. `rows` and `same_length` are as in
    `PagedKV.view`. `given` are scale, causal, window, softcap, mask, new_key and new_value of
    `AttendOptions`.
    """
    options = AttendOptions(query.shape[1] if query.dim() == 4 else 0, **given)
    lq, scale, causal, window, softcap, mask, new_key, new_value, _ = options
    plain = rows is None and mask is None and new_key is None and new_value is None
    again = cache.attend_again(query, (scale, causal, window, softcap)) if plain else None
    if again is not None:
        return again
    layout, view = cache.layout, cache.view(rows, same_length)
    batch, heads, d = view.batch, layout.num_kv_heads, layout.head_dim
    expect("query", query, (batch, "Lq", "Hq", d), cache.device)
    check_heads(layout, query.shape[2])
    check_options(scale=scale, window=window, softcap=softcap)
    if (new_key is None) != (new_value is None):
        raise ValueError("new_key and new_value go together; only one was given")
    if new_key is not None and new_value is not None:
        wanted = (batch, lq, heads, d)
        expect("new_key", new_key, wanted, cache.device)
        expect("new_value", new_value, wanted, cache.device)
        check_new_tokens(layout, new_key, new_value, "new_")
    if mask is not None:
        check_mask(mask, batch, query.shape[2], lq, cache.device)
        tokens = max(cache.table.lengths, default=0) if rows is None else _most_tokens(view)
        if tokens is not None:
            check_mask_tokens(mask, tokens + (0 if new_key is None else lq))
    cu_seqlens = uniform_cu_seqlens(batch, lq, query.device)
    if plain and cache.kernels.NAME == "cpu":
        return cache.attend_first(query, view, cu_seqlens, options)
    if cache.kernels.TAKES.batches:
        return cache.kernels.attend(cache.codec, query, view, cu_seqlens, options)
    if new_key is not None and new_value is not None:
        new = new_key.flatten(0, 1), new_value.flatten(0, 1)
        options = options._replace(new_key=new[0], new_value=new[1])
    out, lse = cache.kernels.attend(cache.codec, query.flatten(0, 1), view, cu_seqlens, options)
    return out.unflatten(0, (batch, lq)), lse.unflatten(0, (batch, lq))


def _most_tokens(view: CacheView) -> int | None:
    """The length of the longest row, where the host knows it."""
    if view.lengths.device.type == "cpu":
        return max(view.lengths.tolist(), default=0)
    return view.same_length
