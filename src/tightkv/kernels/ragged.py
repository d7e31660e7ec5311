"""Short prompts of many sequences after long prefixes, with an engine's varlen attention.

Cached and new tokens of several sequences are brought to one workspace, in the frame of the pages.
One call attends to it, causal from the end of each sequence, and the output is rotated back.
"""

from typing import Any

import torch
from torch import Tensor

from tightkv.kernels.sdpa import give_up_varlen, varlen_attention
from tightkv.kernels.view import CacheView
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout


def try_extend_ragged(
    codec: Codec,
    query: Tensor,
    view: CacheView,
    ops: Any,
    *,
    scale: float,
    new_key: Tensor | None,
    new_value: Tensor | None,
    out: Tensor,
) -> Tensor | None:
    """Causal attention of query [N, Hq, D] over the cache and new tokens [N, Hkv, D].

    Fills `out` and returns the LSE [N, Hq]; None where no engine's attention takes the call.
    `ops` is `triton.ragged`, or does the same.
    """
    attention = varlen_attention()
    if attention is None or new_key is None or new_value is None:
        return None
    if not can_extend_ragged(codec, query, view, new_key, new_value):
        return None
    layout, groups = codec.layout, view.ragged
    fresh = all(group.is_fresh for group in groups)
    room = 0 if fresh else max(group.tokens for group in groups)
    shape = (room, layout.num_kv_heads, layout.head_dim)
    key, value = (torch.empty(shape, dtype=layout.dtype, device=query.device) for _ in range(2))
    rotated = query if fresh else ops.rotate_queries(codec, query)
    mixed = out if fresh else torch.empty_like(rotated)
    lses = []
    for group in groups:
        mine, tokens = group.queries, slice(0, group.tokens)
        if mine.start == mine.stop:
            continue
        k, v = new_key[mine], new_value[mine]
        if fresh and group.rows.stop - group.rows.start > 1:  # as in a workspace
            k, v = (torch.nan_to_num(x, 0.0, 0.0, 0.0) for x in (k, v))
        if not fresh:
            ops.load_workspace(codec, view, group, k, v, key[tokens], value[tokens])
            k, v = key[tokens], value[tokens]
        try:
            lses.append(attention(rotated[mine], k, v, group, scale, mixed[mine]))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # missing, or it refuses the shape
            give_up_varlen(attention, error)
            return None
    if not fresh:
        ops.unrotate(codec, mixed, out)
    return lses[0] if len(lses) == 1 else torch.cat(lses)


def can_extend_ragged(
    codec: Codec, query: Tensor, view: CacheView, new_key: Tensor, new_value: Tensor
) -> bool:
    """Whether groups were planned for these queries, and FlashAttention takes their dtype."""
    return (
        len(view.ragged) > 0
        and len(query) == view.ragged[-1].queries.stop
        and query.dtype == new_key.dtype == new_value.dtype == codec.layout.dtype
        and fits_varlen(codec.layout)
    )


def fits_varlen(layout: PageLayout) -> bool:
    """Whether FlashAttention takes a layout: half precision, and heads of up to 256."""
    return layout.dtype in (torch.float16, torch.bfloat16) and layout.head_dim <= 256
