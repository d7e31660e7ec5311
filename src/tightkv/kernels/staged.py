"""Prefill over a compressed prefix with torch's own attention kernels.

The prefix is brought to plain keys and values a bounded piece at a time; each piece, and the
exact tokens, go through the fastest attention torch has, and the parts are joined by their LSEs.
Memory beyond inputs and outputs does not grow with the prefix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tightkv.codec import Codec
from tightkv.kernels.view import CacheView

STAGE_TOKENS = 8192
LEAST_QUERIES = 256  # below this, decoding out of the pages is faster


class Parts:
    """Softmax-weighted sums of parts seen one after another, with their LSEs."""

    def __init__(self) -> None:
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """out [B, H, L, D], lse [B, H, L]."""
        if self.out is None or self.lse is None:
            self.out, self.lse = out.float(), lse
            return
        both = torch.logaddexp(self.lse, lse)
        self.out *= torch.exp(self.lse - both)[..., None]
        self.out += out * torch.exp(lse - both)[..., None]
        self.lse = both


def can_extend(codec: Codec, query: Tensor, view: CacheView, max_queries: int) -> bool:
    """Many queries, half precision, and unpadded rows of one length that the host knows."""
    return (
        view.same_length is not None
        and len(query) == view.batch * max_queries
        and max_queries >= LEAST_QUERIES
        and query.dtype == codec.layout.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
    )


def extend(
    codec: Codec,
    query: Tensor,
    view: CacheView,
    dequantize_pages: object,
    *,
    scale: float,
    new_key: Tensor,
    new_value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Causal attention of query [N, Hq, D] over the cache and new tokens [N, Hkv, D].

    Rows are sequences of the same length with the same number of queries.
    """
    assert view.same_length is not None
    length, ring_start, sinks = view.same_length
    batch, (n, hq, d), hkv = view.batch, query.shape, new_key.shape[1]
    tokens = n // batch
    q = query.view(batch, tokens, hq, d).transpose(1, 2)  # [B, Hq, T, D]

    exact_key, exact_value = (
        _exact_tokens(ring, sink, new.view(batch, tokens, hkv, d), view, length, ring_start, sinks)
        for ring, sink, new in (
            (view.ring_key, view.sink_key, new_key),
            (view.ring_value, view.sink_value, new_value),
        )
    )
    group = hq // hkv
    exact = Parts()
    exact.add(
        *attention(
            q,
            exact_key.repeat_interleave(group, 1),
            exact_value.repeat_interleave(group, 1),
            scale,
            causal=True,
        )
    )
    assert exact.out is not None and exact.lse is not None
    page = codec.layout.page_size
    stage = max(1, STAGE_TOKENS // page)
    pages = -(-ring_start // page)
    if not pages:
        return _rows(exact.out, query), _rows(exact.lse[..., None], query)[..., 0].float()

    # Heads of a group as further queries: every query sees the whole prefix.
    rotated = codec.key.rotation(q).to(query.dtype)
    packed = rotated.reshape(batch, hkv, group * tokens, d)
    prefix = Parts()
    for first in range(0, pages, stage):
        last = min(pages, first + stage)
        key, value = dequantize_pages(codec, view, first, last)  # type: ignore[operator]
        low = max(0, min(sinks, ring_start) - first * page)
        high = min(last * page, ring_start) - first * page
        if low < high:
            prefix.add(*attention(packed, key[:, :, low:high], value[:, :, low:high], scale))
    if prefix.out is None or prefix.lse is None:
        return _rows(exact.out, query), _rows(exact.lse[..., None], query)[..., 0].float()
    out = codec.value.rotation.inverse(prefix.out).reshape(batch, hq, tokens, d)
    exact.add(out, prefix.lse.reshape(batch, hq, tokens))
    return _rows(exact.out, query), _rows(exact.lse[..., None], query)[..., 0].float()


def _rows(x: Tensor, query: Tensor) -> Tensor:
    """[B, H, T, D] -> [B * T, H, D]."""
    return x.transpose(1, 2).flatten(0, 1).to(query.dtype if x.shape[-1] > 1 else x.dtype)


def _exact_tokens(
    ring: Tensor, sink: Tensor, new: Tensor, view: CacheView, length: int, start: int, sinks: int
) -> Tensor:
    """Sinks, ring and new tokens as [B, Hkv, tokens, D], in order of position."""
    owner = view.ring_rows.long()
    slots = torch.arange(start, length, device=ring.device) % ring.shape[1]
    kept = sink[owner, : min(sinks, start)]
    return torch.cat([kept, ring[owner][:, slots], new], 1).transpose(1, 2)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Output and LSE [B, H, L]; causal aligns the last query with the last key."""
    if q.device.type == "cpu":
        return _plain_attention(q, k, v, scale, causal)
    aten = torch.ops.aten
    k, v = k.contiguous(), v.contiguous()
    square = not causal or q.shape[2] == k.shape[2]
    if square and torch.cuda.get_device_capability(q.device) >= (9, 0):
        try:
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=scale
            )
            return out, lse.reshape(q.shape[:3])
        except RuntimeError:  # cuDNN is missing or refuses the shape
            pass
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, lse


def _plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]) @ v.float(), lse
