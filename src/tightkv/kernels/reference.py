"""append and attend in plain torch: the oracle of every kernel, and the fallback.

Runs on any device, for every config. Memory beyond inputs and outputs is bounded: long
inputs are worked through in steps of pages.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from tightkv.kernels.backend import Takes
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView, SealedLayer
from tightkv.pages.codec import Codec
from tightkv.pages.layout import SIDES, PageLayout
from tightkv.pages.window import RingTokens, ring_tokens, rotated

NAME = "reference"
TAKES = Takes(late_sealing=True)
_STEP_BYTES = 32 << 20  # float32 temporaries of one step


def unavailable(device_type: str | None, asked: bool = False) -> None:
    """Every device can run these."""


def unsupported(layout: PageLayout) -> None:
    """Every config can be run."""


def append(
    codec: Codec, view: CacheView, key: Tensor, value: Tensor, options: AppendOptions
) -> None:
    """Write new tokens: seal the pages they complete, then fill open page, ring and sinks.

    Row b's tokens are key[cu_seqlens[b] : cu_seqlens[b + 1]] of key and value [N, Hkv, D], at most
    `max_new`; they are the last of view.lengths[b]. Before them the ring holds copies from
    position ring_valid_from[b] on. Without `encode_partial_page` a page gets no codes before it is
    sealed, which is when `lag` tokens follow it; until then rings have its tokens. A row shorter
    than its new tokens (an engine's dry run) is left alone.

    With a window of 8 bits a token is first rounded to what its ring stores, and pages are coded
    from that, however its tokens came. Sinks are exact.
    """
    cu_seqlens, ring_valid_from, max_new, encode_partial_page, lag = options
    layout, device = codec.layout, key.device
    size, ring = layout.page_size, view.ring_key.shape[1]
    lengths, left_pad = view.lengths.long(), view.left_pad.long()
    cu_seqlens = cu_seqlens.long()
    before = lengths - cu_seqlens.diff()
    real = before >= 0
    new = ring_tokens(codec, key, value)
    rings = RingTokens(view.ring_key, view.ring_value, view.ring_scales)

    step = torch.arange((max_new + size - 1) // size, device=device)
    index = (before - lag).clamp_min(0)[:, None] // size + step  # [B, pages a row may complete]
    complete = ((index + 1) * size <= lengths[:, None] - lag) & (not view.seals_later)
    row, j = (complete & real[:, None]).nonzero(as_tuple=True)
    if len(row):
        index = index[row, j]
        at = index[:, None] * size + torch.arange(size, device=device)  # [n, page_size]
        fresh = at >= before[row, None]
        source = (cu_seqlens[row, None] + at - before[row, None]).clamp_min(0)
        tokens = new.at(source)
        old = rings.at((view.ring_rows[row, None].long(), at % ring))
        tokens.write(~fresh, old.at(~fresh))
        keep = (ring_valid_from[row] - index * size).clamp(0, size)
        pad = (left_pad[row] - index * size).clamp(0, size)
        page = view.block_table[row, index]
        seal(codec, view.pages, page, tokens, keep, pad, view.feedback)

    token = torch.arange(len(key), device=device)
    row = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    owned = row < view.batch
    owned &= real[row.clamp_max(max(view.batch - 1, 0))]
    token, row = token[owned], row[owned]
    at = before[row] + token - cu_seqlens[row]
    if encode_partial_page:
        coded_from = 0 if view.seals_later else lengths[row] // size * size
        pick = (at >= coded_from).nonzero().squeeze(-1)
        page = view.block_table[row[pick], at[pick] // size].long()
        store(codec, view.pages, new.at(token[pick]), page, at[pick] % size)
    for targets, tokens, place_in_row, wanted in (
        (rings, new, at % ring, at >= lengths[row] - ring),
        (
            RingTokens(view.sink_key, view.sink_value, None),
            RingTokens(key, value, None),
            at - left_pad[row],
            (at >= left_pad[row]) & (at < left_pad[row] + view.sink_key.shape[1]),
        ),
    ):
        pick = wanted.nonzero().squeeze(-1)
        place = view.ring_rows[row[pick]].long(), place_in_row[pick]
        targets.write(place, tokens.at(token[pick]))


def seals_later(layout: PageLayout, feedback: bool) -> bool:
    """Whether `append` can leave the sealing of pages to `seal_layers`."""
    return feedback or layout.cfg.centered


def sealed_layers(layers: Sequence[SealedLayer]) -> Sequence[SealedLayer]:
    """What `seal_layers` takes of layers of one layout."""
    return layers


def seal_layers(codec: Codec, layers: Sequence[SealedLayer], chosen: Tensor) -> None:
    """Seal pages of all layers from their rings.

    `chosen` int32 [n + 1, 4]: the number of pages, at [0, 0], then of each page its ring, its first
    token's position, its number, and from where the ring has exact tokens.
    """
    size, entries = codec.layout.page_size, chosen[1 : 1 + int(chosen[0, 0])].long()
    row, first, page, exact_from = entries.unbind(1)
    at = first[:, None] + torch.arange(size, device=chosen.device)
    keep = (exact_from - first).clamp(0, size)
    for layer in layers:
        slot = row[:, None], at % layer.ring_key.shape[1]
        rings = RingTokens(layer.ring_key, layer.ring_value, layer.ring_scales)
        pad = torch.zeros_like(keep)
        seal(codec, layer.pages, page, rings.at(slot), keep, pad, layer.feedback)


def store(codec: Codec, pages: Tensor, tokens: RingTokens, page: Tensor, offset: Tensor) -> None:
    """Write tokens [T, Hkv, D] uncentered at (page[t], offset[t]); no other token's bits change."""
    for side, y in zip(SIDES, rotated(codec, *tokens), strict=True):
        codec.layout.write_tokens(pages, page, offset, side, codec.encode_rotated(side, y))


def seal(
    codec: Codec,
    pages: Tensor,
    page_ids: Tensor,
    tokens: RingTokens,
    keep: Tensor,
    pad: Tensor,
    feedback: Tensor | None = None,
) -> None:
    """Encode whole pages [n, page_size, Hkv, D], keys centered on the page's own mean.

    The first keep[n] tokens of a page have no exact copy: their codes and the page's mean
    stay, and the others are centered on that mean. The first pad[n] tokens are left padding
    and stay out of the mean. `feedback`: see `Codec.encode_keys`.
    """
    layout = codec.layout
    per_page = tokens.key[0].numel() * 4 if tokens.key.numel() else 1
    step = max(1, _STEP_BYTES // per_page)
    for i in range(0, len(page_ids), step):
        part = slice(i, i + step)
        records = pages[page_ids[part].long()]  # [n, Hkv, record]
        old = {side: layout.read(records, side) for side in SIDES}
        kept = _before(keep[part], layout.page_size)  # [n, 1, page_size, 1]
        y, v = (x.transpose(1, 2) for x in rotated(codec, *tokens.at(part)))  # [n, Hkv, page, D]
        if codec.cfg.centered:
            real = ~_before(pad[part], layout.page_size)
            count = real.sum(2).clamp_min(1)
            mean = torch.where(real, y, 0.0).sum(2) / count
            fresh = records.clone()
            layout.write_mean(fresh, mean)
            records = torch.where((keep[part] > 0)[:, None, None], records, fresh)
            mean = layout.read_mean(records).unsqueeze(2)
            new_key = codec.encode_centered(y, mean, feedback)
        else:
            new_key = codec.encode_keys(y, feedback)
        new_value = codec.encode_rotated("value", v)
        for side, new in zip(SIDES, (new_key, new_value), strict=True):
            fields = {name: torch.where(kept, old[side][name], new[name]) for name in new}
            layout.write(records, side, fields)
        pages[page_ids[part].long()] = records


def _before(count: Tensor, page_size: int) -> Tensor:
    """[n] -> bool [n, 1, page_size, 1]: token offset < count."""
    offsets = torch.arange(page_size, device=count.device)
    return (offsets < count[:, None])[:, None, :, None]


def dequantize(codec: Codec, records: Tensor) -> tuple[Tensor, Tensor]:
    """Records [..., Hkv, record_bytes] -> rotated keys and values [..., Hkv, page_size, D]."""
    layout = codec.layout
    mean = layout.read_mean(records).unsqueeze(-2) if codec.cfg.centered else None
    key = codec.decode_keys(layout.read(records, "key"), mean)
    return key, codec.value.decode_rotated(layout.read(records, "value"))


@dataclass
class Segment:
    """Some tokens of every sequence. Rotated ones are in the frame of the pages."""

    key: Tensor  # float32 [B, Hkv, n, D]
    value: Tensor
    position: Tensor  # int64 [B, n]
    valid: Tensor  # bool [B, n]
    rotated: bool


class _Softmax:
    """Softmax-weighted sums over segments seen one after another; two frames, one softmax."""

    def __init__(self, like: Tensor) -> None:  # [B, Hkv, G, Lq, D]
        self.peak = like.new_full(like.shape[:-1], -math.inf)
        self.weight = torch.zeros_like(self.peak)
        self.sums = {False: torch.zeros_like(like), True: torch.zeros_like(like)}

    def add(self, scores: Tensor, seg: Segment) -> None:
        """scores [B, Hkv, G, Lq, n], -inf where masked."""
        peak = torch.maximum(self.peak, scores.amax(-1))
        base = torch.where(peak == -math.inf, 0.0, peak)
        p = torch.exp(scores - base[..., None])
        shrink = torch.exp(self.peak - base)
        self.peak, self.weight = peak, self.weight * shrink + p.sum(-1)
        # Slots of no token may hold NaN: their weight is 0, their value must be too.
        value = torch.where(seg.valid[:, None, :, None], seg.value, 0.0)
        for frame in self.sums:
            self.sums[frame] = self.sums[frame] * shrink[..., None]
        self.sums[seg.rotated] = self.sums[seg.rotated] + p @ value.unsqueeze(2)

    def output(self, codec: Codec) -> tuple[Tensor, Tensor]:
        out = self.sums[False] + codec.value.rotation.inverse(self.sums[True])
        weight = self.weight[..., None]
        return torch.where(weight == 0, 0.0, out / weight), self.peak + self.weight.log()


def attend(
    codec: Codec, query: Tensor, view: CacheView, cu_seqlens: Tensor, options: AttendOptions
) -> tuple[Tensor, Tensor]:
    """Attention over the cache: output like query, and its LSE [N, Hq] in float32.

    Row b's queries are query[cu_seqlens[b] : cu_seqlens[b + 1]] of query [N, Hq, D], at most
    `max_queries`; they are the last tokens of the cache, or exact tokens `new_key` and
    `new_value` [N, Hkv, D] that follow it without being in it. `window` keeps keys with
    position > query position - window. `mask` [B|1, Hq|1, max_queries, tokens] further masks
    (bool, True attends) or is added to the scores (float). Queries that attend to nothing
    give zeros and an LSE of -inf. The output is written to `out` where that is given.
    """
    max_queries, scale, causal, window, softcap, mask, new_key, new_value, out = options
    _, hq, d = query.shape
    hkv = view.ring_key.shape[2]
    cu_seqlens = cu_seqlens.long()
    counts = cu_seqlens.diff()
    offset = torch.arange(max_queries, device=query.device)
    live = offset < counts[:, None]  # [B, Lq]
    index = torch.where(live, cu_seqlens[:-1, None] + offset, 0)
    total = view.lengths.long() + (0 if new_key is None else counts)
    first_at = (total - counts)[:, None]
    positions = torch.where(live, first_at + offset, -1)
    scale = 1 / math.sqrt(d) if scale is None else scale

    padded = query.new_zeros(0, max_queries, hq, d) if not view.batch else query[index]
    q = padded.float().unflatten(2, (hkv, hq // hkv)).permute(0, 2, 3, 1, 4)  # [B, Hkv, G, Lq, D]
    frames = {False: q, True: codec.key.rotation(q)}
    softmax = _Softmax(q)
    segments = token_segments(codec, view, None if window is None else first_at - window + 1)
    if new_key is not None and new_value is not None:
        segments = chain(segments, [_exact(new_key[index], new_value[index], positions, live)])
    for seg in segments:
        scores = frames[seg.rotated] @ seg.key.unsqueeze(2).transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = _visible(seg, positions, causal, window)[:, None, None]  # [B, 1, 1, Lq, n]
        if mask is not None and mask.shape[-1]:
            part = _mask_at(mask, seg.position, hkv)
            if part.dtype == torch.bool:
                seen = seen & part
            else:
                scores = scores + part.float()
        softmax.add(torch.where(seen, scores, -math.inf), seg)

    padded_out, padded_lse = softmax.output(codec)
    out = torch.zeros_like(query) if out is None else out.zero_()
    lse = query.new_full(query.shape[:2], -math.inf).float()
    out[index[live]] = padded_out.permute(0, 3, 1, 2, 4).flatten(2, 3)[live].to(query.dtype)
    lse[index[live]] = padded_lse.permute(0, 3, 1, 2).flatten(2, 3)[live]
    return out, lse


def _visible(seg: Segment, positions: Tensor, causal: bool, window: int | None) -> Tensor:
    """bool [B, Lq, n]: which keys each query may see."""
    key_at, query_at = seg.position[:, None, :], positions[:, :, None]
    seen = seg.valid[:, None, :] & (query_at >= 0)
    if causal:
        seen = seen & (key_at <= query_at)
    if window is not None:
        seen = seen & (key_at > query_at - window)
    return seen


def materialize(codec: Codec, view: CacheView) -> tuple[Tensor, Tensor]:
    """Every token as attention sees it: keys and values [B, tokens, Hkv, D], zeros elsewhere."""
    b, (_, _, heads, d) = view.batch, view.sink_key.shape
    tokens = int(view.lengths.max()) if b else 0
    shape = (b, tokens, heads, d)
    out = [torch.zeros(shape, dtype=view.sink_key.dtype, device=view.lengths.device) for _ in "kv"]
    for seg in token_segments(codec, view):
        row, n = seg.valid.nonzero(as_tuple=True)
        at = seg.position[row, n]
        for target, x, quantizer in zip(
            out, (seg.key, seg.value), (codec.key, codec.value), strict=True
        ):
            picked = x.transpose(1, 2)[row, n]
            if seg.rotated:
                picked = quantizer.rotation.inverse(picked)
            target[row, at] = picked.to(target.dtype)
    return out[0], out[1]


def token_segments(codec: Codec, view: CacheView, low: Tensor | None = None) -> Iterator[Segment]:
    """Tokens before low [B, 1] are seen by no query: what holds them may be another's by now."""
    device, owner = view.lengths.device, view.ring_rows.long()
    lengths, left_pad, ring_read_from = (
        t.long()[:, None] for t in (view.lengths, view.left_pad, view.ring_read_from)
    )
    low = left_pad if low is None else torch.maximum(low, left_pad)
    sinks_end = torch.minimum(left_pad + view.sink_counts.long()[:, None], ring_read_from)

    if view.sink_key.shape[1]:
        at = left_pad + torch.arange(view.sink_key.shape[1], device=device)
        yield _exact(
            view.sink_key[owner], view.sink_value[owner], at, (at >= low) & (at < sinks_end)
        )

    size = codec.layout.page_size
    pages_end = int(ring_read_from.max()) if view.batch else 0
    row_bytes = 4 * view.batch * view.ring_key.shape[2] * view.ring_key.shape[3] * size
    step = max(1, _STEP_BYTES // max(1, row_bytes))
    for first in range(0, -(-pages_end // size), step):
        ids = view.block_table[:, first : first + step].long()  # [B, n]
        at = first * size + torch.arange(ids.shape[1] * size, device=device)
        at = at.expand(view.batch, -1)
        valid = (at >= sinks_end) & (at < ring_read_from) & (at >= low)
        ids = torch.where(valid.unflatten(1, (-1, size)).any(-1), ids, 0)  # others may be anything
        key, value = dequantize(codec, view.pages[ids])  # [B, n, Hkv, page, D]
        flat = [x.transpose(1, 2).flatten(2, 3) for x in (key, value)]
        yield Segment(flat[0], flat[1], at, valid, rotated=True)

    ring = view.ring_key.shape[1]
    slot = torch.arange(ring, device=device)
    # The one position in [length - ring, length) that a slot can hold.
    at = lengths - 1 - (lengths - 1 - slot) % ring
    valid = (at >= ring_read_from) & (at >= low)
    if view.ring_scales is None:
        yield _exact(view.ring_key[owner], view.ring_value[owner], at, valid)
        return
    both = rotated(codec, view.ring_key[owner], view.ring_value[owner], view.ring_scales[owner])
    rounded = [x.transpose(1, 2) for x in both]
    yield Segment(rounded[0], rounded[1], at, valid & (at >= 0), rotated=True)


def _exact(key: Tensor, value: Tensor, at: Tensor, valid: Tensor) -> Segment:
    key, value = key.transpose(1, 2).float(), value.transpose(1, 2).float()
    return Segment(key, value, at, valid & (at >= 0), rotated=False)


def _mask_at(mask: Tensor, position: Tensor, hkv: int) -> Tensor:
    """mask [B|1, Hq|1, Lq, tokens] at positions [B, n] -> [B, Hkv|1, G|1, Lq, n]."""
    b = position.shape[0]
    index = position.clamp(0, mask.shape[-1] - 1)[:, None, None, :]
    part = mask.expand(b, -1, -1, -1).gather(-1, index.expand(b, mask.shape[1], mask.shape[2], -1))
    heads = mask.shape[1]
    return part.unsqueeze(1) if heads == 1 else part.unflatten(1, (hkv, heads // hkv))
