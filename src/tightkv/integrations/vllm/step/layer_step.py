"""LayerStep: what a layer does with the new tokens of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightkv.integrations.vllm.step.metadata import BatchPart
from tightkv.kernels.backend import Backend
from tightkv.kernels.ragged import fits_varlen
from tightkv.kernels.ragged_plan import most_bytes, workspace_tokens
from tightkv.kernels.sdpa import varlen_attention
from tightkv.kernels.view import AppendOptions, AttendOptions, CacheView
from tightkv.pages.codec import Codec

# Ring key and value [rows + 1, n, Hkv, D], sink key and value [at least rows + 1, n, Hkv, D], and
# with a window of 8 bits the scales of the rings.
Rings = tuple[Tensor, ...]
Centered = tuple[Tensor, Tensor] | None  # centers of keys and values [Hkv, D]


@dataclass(frozen=True)
class LayerStep:
    """Append to pages and rings, then attend to both; part by part."""

    kernels: Backend
    codec: Codec
    scale: float
    softcap: float | None
    sink_logits: Tensor | None = None
    """[Hq]: logits that take part in the softmax and have no value."""
    window: int | None = None  # tokens that a query sees, itself included; None: all

    @property
    def workspace_tokens(self) -> int | None:
        """Tokens of prompts that one call of attention takes; None if prompts cannot share one."""
        layout, plain = self.codec.layout, self.window is None and self.softcap is None
        shares = plain and self.kernels.TAKES.ragged and fits_varlen(layout)
        return workspace_tokens(layout) if shares and varlen_attention() is not None else None

    def take_workspace(self, query: Tensor, copied: int = 0) -> None:
        """Allocate and free the memory that a step of queries [N, Hq, D] takes at most.

        Every engine does so in the run that measures memory. `copied`: bytes of copies that the
        layer makes of its inputs before.
        """
        if self.workspace_tokens is not None:
            size = most_bytes(self.codec.layout, *query.shape[:2])
            torch.empty(size + copied, dtype=torch.uint8, device=query.device)

    def run(
        self,
        parts: Sequence[BatchPart],
        pages: Tensor,
        rings: Rings,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        inherited: tuple[Tensor, Tensor] | None = None,
        feedback: Tensor | None = None,
        centers: Centered = None,
        seals_later: bool = False,
    ) -> None:
        """query [N, Hq, D], key and value [N, Hkv, D] -> output [N, Hq, D].

        Tokens are stored relative to `centers`. `inherited` and `seals_later`: `TightMetadata`.
        """
        fused = self._fused(centers, parts)
        if centers is not None and fused is None:
            key, value = key - centers[0], value - centers[1]
        if inherited is not None:
            to, source = inherited  # a row may be both: all are read before any is written
            for sinks in rings[2:4]:
                sinks[to] = sinks[source]
        # All tokens are written before any is read: sequences share blocks within a step.
        for part in parts:
            coding = {"feedback": feedback, "centers": fused, "seals_later": seals_later}
            view = _view(pages, rings, part, context=False, **coding)
            valid_from, most = part.rows.ring_valid_from, part.max_query_len
            options = AppendOptions(part.query_start_loc, valid_from, most, True)
            self.kernels.append(self.codec, view, key[part.tokens], value[part.tokens], options)
        overlaps = len(parts) == 1
        self.attend(parts, pages, rings, query, (key, value), output, centers, overlaps)

    def attend(
        self,
        parts: Sequence[BatchPart],
        pages: Tensor,
        rings: Rings,
        query: Tensor,
        new_tokens: tuple[Tensor, Tensor] | None,
        output: Tensor,
        centers: Centered = None,
        overlaps_append: bool = False,
    ) -> None:
        """Attention alone; `new_tokens` are key and value [N, Hkv, D], needed by prompts.

        They are relative to `centers`, as the tokens of the cache are.
        """
        fused = self._fused(centers, parts)
        for part in parts:
            mine, key, value = part.tokens, None, None
            if part.is_prefill and new_tokens is not None:
                key, value = (x[mine] for x in new_tokens)
            reading = {"overlaps_append": overlaps_append, "centers": fused}
            view = _view(pages, rings, part, context=part.is_prefill, **reading)
            options = AttendOptions(
                max_queries=part.max_query_len,
                scale=self.scale,
                window=self.window,
                softcap=self.softcap,
                new_key=key,
                new_value=value,
                out=output[mine],
            )
            starts = part.query_start_loc
            _, lse = self.kernels.attend(self.codec, query[mine], view, starts, options)
            if self.sink_logits is not None:
                output[mine].mul_(torch.sigmoid(lse - self.sink_logits)[..., None])
        if centers is not None and fused is None:
            output.unflatten(1, (centers[1].shape[0], -1)).add_(centers[1][:, None])

    def _fused(self, centers: Centered, parts: Sequence[BatchPart]) -> Centered:
        """The centers, if the kernels take them: not for prompts, which need the differences."""
        fuses = self.kernels.TAKES.centers and not any(part.is_prefill for part in parts)
        return centers if fuses else None


def _view(pages: Tensor, rings: Rings, part: BatchPart, context: bool, **more: Any) -> CacheView:
    """The cache with a part's new tokens, or only what came before them; `more` of its fields."""
    rows, count = part.rows, len(rings[0])
    return CacheView(
        pages=pages,
        block_table=part.block_table,
        lengths=rows.before if context else rows.lengths,
        left_pad=part.left_pad,
        ring_read_from=rows.context_ring_read_from if context else rows.ring_read_from,
        sink_counts=rows.context_sink_counts if context else rows.sink_counts,
        ring_rows=rows.ring_rows,
        ring_key=rings[0],
        ring_value=rings[1],
        sink_key=rings[2][:count],
        sink_value=rings[3][:count],
        ring_scales=rings[4] if len(rings) > 4 else None,
        same_length=part.context_len if context else None,
        ragged=part.ragged if context else (),
        plans=None if context else part.plans,
        **more,
    )
