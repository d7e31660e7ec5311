"""LayerStep: what a layer does with the new tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from tightkv.integrations.vllm.step.metadata import BatchPart
from tightkv.kernels.options import AttendOptions
from tightkv.kernels.ragged import fits_varlen
from tightkv.kernels.ragged_plan import most_bytes, workspace_tokens
from tightkv.kernels.sdpa import varlen_attention
from tightkv.kernels.view import CacheView
from tightkv.pages.codec import Codec

# Ring key and value [rows + 1, n, Hkv, D], sink key and value [at least rows + 1, n, Hkv, D].
Rings = tuple[Tensor, ...]


@dataclass(frozen=True)
class LayerStep:
    """Append to pages and rings, then attend to both; part by part."""

    kernels: ModuleType
    codec: Codec
    scale: float
    softcap: float | None
    sink_logits: Tensor | None = None
    """[Hq]: logits that take part in the softmax and have no value."""
    window: int | None = None
    """Tokens that a query sees, itself included; None: all."""

    @property
    def kernel_name(self) -> str:
        name: str = self.kernels.NAME
        return name

    @property
    def on_gpu(self) -> bool:
        return self.kernel_name in ("cuda", "triton")

    @property
    def workspace_tokens(self) -> int | None:
        """Tokens of prompts that can be attended to in one call; None where they cannot."""
        layout, plain = self.codec.layout, self.window is None and self.softcap is None
        if not plain or not self.on_gpu or not fits_varlen(layout) or varlen_attention() is None:
            return None
        return workspace_tokens(layout)

    def take_workspace(self, query: Tensor, copied: int = 0) -> None:
        """Allocate for a moment what a step of these queries [N, Hq, D] takes at most.

        `copied`: bytes of what the layer makes of its inputs before. This is done in the run that
        measures memory, of every engine: kernels are compiled once per process.
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
        centers: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """query [N, Hq, D], key and value [N, Hkv, D] -> output [N, Hq, D].

        Tokens are stored relative to `centers`. Kernels do it while decoding, where they can.
        """
        append = self.kernels.append
        if centers is not None and self._fuses_centers(parts):
            append = partial(append, centers=centers)
        elif centers is not None:
            key, value = key - centers[0], value - centers[1]
        self._append(append, parts, pages, rings, key, value, inherited, feedback)
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
        centers: tuple[Tensor, Tensor] | None = None,
        overlaps_append: bool = False,
    ) -> None:
        """Attention alone; `new_tokens` are key and value [N, Hkv, D], needed by prompts.

        They are relative to `centers`, as the tokens of the cache are.
        """
        attend, fused = self.kernels.attend, self._fuses_centers(parts)
        if centers is not None and fused:
            attend = partial(attend, value_center=centers[1])
        for part in parts:
            mine, key, value = part.tokens, None, None
            if part.is_prefill and new_tokens is not None:
                key, value = (x[mine] for x in new_tokens)
            _, lse = attend(
                self.codec,
                query[mine],
                _view(pages, rings, part, context=part.is_prefill, overlaps_append=overlaps_append),
                part.query_start_loc,
                AttendOptions(
                    max_queries=part.max_query_len,
                    scale=self.scale,
                    window=self.window,
                    softcap=self.softcap,
                    new_key=key,
                    new_value=value,
                    out=output[mine],
                ),
            )
            if self.sink_logits is not None:
                output[mine].mul_(torch.sigmoid(lse - self.sink_logits)[..., None])
        if centers is not None and not fused:
            output.unflatten(1, (centers[1].shape[0], -1)).add_(centers[1][:, None])

    def _fuses_centers(self, parts: Sequence[BatchPart]) -> bool:
        return self.kernel_name == "cuda" and not any(part.is_prefill for part in parts)

    def _append(
        self,
        append: Callable[..., None],
        parts: Sequence[BatchPart],
        pages: Tensor,
        rings: Rings,
        key: Tensor,
        value: Tensor,
        inherited: tuple[Tensor, Tensor] | None,
        feedback: Tensor | None,
    ) -> None:
        if inherited is not None:
            to, source = inherited  # a row may be both: all are read before any is written
            for sinks in rings[2:]:
                sinks[to] = sinks[source]
        # All tokens are written before any is read: sequences share blocks within a step.
        for part in parts:
            append(
                self.codec,
                _view(pages, rings, part, context=False, feedback=feedback),
                key[part.tokens],
                value[part.tokens],
                part.query_start_loc,
                part.rows.exact_starts,
                max_new=part.max_query_len,
                encode_partial_page=True,
            )


def _view(
    pages: Tensor,
    rings: Rings,
    part: BatchPart,
    context: bool,
    overlaps_append: bool = False,
    feedback: Tensor | None = None,
) -> CacheView:
    """The cache with a part's new tokens, or only what came before them."""
    rows, count = part.rows, len(rings[0])
    return CacheView(
        pages=pages,
        block_table=part.block_table,
        lengths=rows.before if context else rows.lengths,
        left_pad=part.starts,
        ring_read_from=rows.context_ring_starts if context else rows.ring_starts,
        sink_counts=rows.context_sink_counts if context else rows.sink_counts,
        ring_rows=rows.ring_rows,
        ring_key=rings[0],
        ring_value=rings[1],
        sink_key=rings[2][:count],
        sink_value=rings[3][:count],
        same_length=part.context_len if context else None,
        ragged=part.ragged if context else (),
        plans=None if context else part.plans,
        overlaps_append=overlaps_append,
        feedback=feedback,
    )
