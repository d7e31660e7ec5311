"""Prefill over a compressed prefix with torch's own attention kernels.

New tokens among themselves are plain causal attention. The prefix is brought to plain keys and
values a bounded piece at a time, in the frame of the pages; each piece goes through torch's
attention, and the parts are joined by their LSEs. Memory beyond inputs and outputs does not grow
with the prefix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tightkv.codec import Codec
from tightkv.kernels import reference
from tightkv.kernels.view import CacheView

LEAST_QUERIES = 256  # below this, decoding out of the pages is faster
PIECE_TOKENS = (2048, 8192)  # of the prefix at a time: with few queries, with many
PLANNED_TOKENS = 512  # cuDNN gets multiples of this
PADDED_FROM = 1024  # queries that are filled up to such a multiple


class Part(NamedTuple):
    """Attention over some of the tokens: `out` [B, H, L, D] and its LSE [B, H, L] in float32."""

    out: Tensor
    lse: Tensor


_Way = Callable[[Tensor, Tensor, Tensor, float, bool], Part]


class Steps(Protocol):
    """The work around torch's attention: `PlainSteps`, or the kernels of `triton.rows`."""

    def rotate_queries(self, codec: Codec, query: Tensor) -> Tensor:
        """Queries [B, H, T, D] into the frame of the pages' keys; contiguous, same dtype."""

    def load_prefix(
        self, codec: Codec, view: CacheView, first: int, count: int, key: Tensor, value: Tensor
    ) -> None:
        """Positions [first, first + count) to the start of key and value [B, Hkv, tokens, D].

        In the frame of the pages, exact tokens too; `first` begins a page, and the buffers hold
        whole pages. Needs a view whose `same_length` is known.
        """

    def join(self, old: Part, new: Part) -> Part:
        """Both parts as one, `out` in float32; `old` may be changed."""

    def finish(self, codec: Codec | None, prefix: Part, exact: Part) -> None:
        """Rotate the prefix's values back and join it into `exact` [B, Hq, T, D], in place.

        prefix is [B, Hkv, group * T, D]; without a codec it is not rotated.
        """


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
    steps: Steps,
    *,
    scale: float,
    new_key: Tensor,
    new_value: Tensor,
) -> tuple[Tensor, Tensor]:
    """Causal attention of query [N, Hq, D] over the cache and new tokens [N, Hkv, D].

    Rows are sequences of the same length with the same number of queries.
    """
    batch = view.batch
    tokens = len(query) // batch
    q, key, value = (
        _filled_up(x.unflatten(0, (batch, tokens))).transpose(1, 2)  # [B, H, T, D]
        for x in (query, new_key, new_value)
    )
    exact = attention(q, key, value, scale, causal=True)
    if view.same_length:
        steps.finish(codec, _attend_prefix(codec, q, view, steps, scale), exact)
    out, lse = (x.transpose(1, 2)[:, :tokens].flatten(0, 1) for x in exact)
    return out, lse


def _filled_up(x: Tensor) -> Tensor:
    """x [B, T, H, D] with zeros after it, so that cuDNN has planned for its length before.

    Nobody sees them: attention among new tokens is causal.
    """
    more = -x.shape[1] % PLANNED_TOKENS
    if not more or x.shape[1] < PADDED_FROM:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, more))


def _attend_prefix(
    codec: Codec, query: Tensor, view: CacheView, steps: Steps, scale: float
) -> Part:
    """Attention of query [B, Hq, T, D] over the whole prefix: [B, Hkv, group * T, D], rotated."""
    assert view.same_length is not None
    layout, length, tokens = codec.layout, view.same_length, query.shape[2]
    heads, d, page = layout.num_kv_heads, layout.head_dim, layout.page_size
    # Heads of a group as further queries: every query sees the whole prefix.
    packed = steps.rotate_queries(codec, query).view(view.batch, heads, -1, d)
    size = piece_tokens(tokens, page)
    held = min(size, -(-length // page) * page)
    key, value = (
        torch.empty(view.batch, heads, held, d, dtype=layout.dtype, device=query.device)
        for _ in range(2)
    )
    prefix: Part | None = None
    for first in range(0, length, size):
        count = min(size, length - first)
        steps.load_prefix(codec, view, first, count, key, value)
        for low, high in planned_cuts(count):
            piece = attention(packed, key[:, :, low:high], value[:, :, low:high], scale)
            prefix = piece if prefix is None else steps.join(prefix, piece)
            del piece  # its memory serves the next one
    assert prefix is not None
    return prefix


def piece_tokens(queries: int, page: int) -> int:
    """Tokens of the prefix to dequantize at a time: whole pages, about twice the queries.

    So the dequantized keys and values stay of the size of the queries' own tensors.
    """
    few, many = PIECE_TOKENS
    return max(1, min(many, max(few, 2 * queries)) // page) * page


def planned_cuts(count: int) -> Iterator[tuple[int, int]]:
    """[0, count) in parts: of lengths that come again, as few as possible, and the rest."""
    low = 0
    while count - low >= 2 * PLANNED_TOKENS:
        length = 1 << (count - low).bit_length() - 1
        yield low, low + length
        low += length
    if low < count:
        yield low, count


def exact_ranges(view: CacheView, first: int, count: int) -> Iterator[tuple[bool, int, int]]:
    """Where among positions [first, first + count) exact tokens can be: is it the ring, from, to.

    Rows decide on the device which of these they have. The ring comes last.
    """
    assert view.same_length is not None
    end = first + count
    sinks_end = min(end, view.sink_key.shape[1])
    if first < sinks_end:
        yield False, first, sinks_end
    ring_from = max(first, view.same_length - view.ring_key.shape[1])
    if ring_from < end:
        yield True, ring_from, end


class PlainSteps:
    """`Steps` in plain torch: any device, any config."""

    def rotate_queries(self, codec: Codec, query: Tensor) -> Tensor:
        return codec.key.rotation(query).to(query.dtype).contiguous()

    def load_prefix(
        self, codec: Codec, view: CacheView, first: int, count: int, key: Tensor, value: Tensor
    ) -> None:
        page = codec.layout.page_size
        # An open page may have no codes, and no place in the table.
        ids = view.block_table[:, first // page : -(-(first + count) // page)].long().clamp_min(0)
        coded = reference.dequantize(codec, view.pages[ids])  # [B, pages, Hkv, page, D]
        for target, x in zip((key, value), coded, strict=True):
            flat = x.transpose(1, 2).flatten(2, 3)
            target[:, :, : flat.shape[2]] = flat.to(target.dtype)
        owner = view.ring_rows.long()
        for ring, low, high in exact_ranges(view, first, count):
            at = torch.arange(low, high, device=key.device)
            chosen = _chosen(view, ring, at)[:, None, :, None]  # [B, 1, n, 1]
            sources = (view.ring_key, view.ring_value) if ring else (view.sink_key, view.sink_value)
            for target, source, side in zip((key, value), sources, ("key", "value"), strict=True):
                exact = source[owner][:, at % source.shape[1]].transpose(1, 2)
                rotated = codec.side(side).rotation(exact).to(target.dtype)
                part = target[:, :, low - first : high - first]
                part.copy_(torch.where(chosen, rotated, part))

    def join(self, old: Part, new: Part) -> Part:
        both = torch.logaddexp(old.lse, new.lse)
        out = old.out.float() * torch.exp(old.lse - both)[..., None]
        return Part(out + new.out.float() * torch.exp(new.lse - both)[..., None], both)

    def finish(self, codec: Codec | None, prefix: Part, exact: Part) -> None:
        out = prefix.out.float() if codec is None else codec.value.rotation.inverse(prefix.out)
        own = Part(out.reshape(exact.out.shape), prefix.lse.reshape(exact.lse.shape))
        both = self.join(own, exact)
        exact.out.copy_(both.out)
        exact.lse.copy_(both.lse)


def _chosen(view: CacheView, ring: bool, at: Tensor) -> Tensor:
    """bool [B, n]: which rows read positions `at` from the ring, or from the sinks."""
    starts = view.ring_starts[:, None]
    if ring:
        return at >= starts
    return at < torch.minimum(view.sink_counts[:, None], starts)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    *,
    any_length: bool = False,
) -> Part:
    """torch's fastest attention of q [B, H, L, D] over k, v [B, H / group, N, D].

    Causal attention is square: query i sees keys 0 to i. cuDNN plans every new shape anew, for
    longer than it then saves, so it gets lengths that come again, unless `any_length`.
    """
    assert not causal or q.shape[2] == k.shape[2]
    if q.device.type == "cpu":
        return _plain_attention(q, k, v, scale, causal)
    group = q.shape[1] // k.shape[1]
    refusal: RuntimeError | None = None
    for way in _ways(q, k, any_length):
        for repeats in (1, group) if group > 1 else (1,):
            keys, values = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
            try:
                return way(q, keys, values, scale, causal)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # missing, or it refuses the shape or grouped heads
                refusal = error
    raise RuntimeError(f"torch has no attention for q {list(q.shape)} {q.dtype}") from refusal


def _ways(q: Tensor, k: Tensor, any_length: bool) -> list[_Way]:
    """Which kernels to try, the fastest first: cuDNN's are, from Hopper on."""
    comes_again = q.shape[2] % PLANNED_TOKENS == 0 and k.shape[2] % PLANNED_TOKENS == 0
    if not (any_length or comes_again) or torch.cuda.get_device_capability(q.device) < (9, 0):
        return [_flash]
    return [_cudnn, _flash]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Part:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return Part(out, lse.reshape(q.shape[:3]).contiguous())


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Part:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return Part(out, lse.contiguous())


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Part:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse[..., None]) @ v
    return Part(out.to(q.dtype), lse)
