"""TightAttention: what a layer of vLLM runs in place of its own attention."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from tightkv.codec import Codec
from tightkv.integrations.vllm.compat import as_pages
from tightkv.integrations.vllm.metadata import Sequences, TightMetadata
from tightkv.integrations.vllm.replay import Replay
from tightkv.integrations.vllm.rows import BatchRows
from tightkv.kernels.view import CacheView
from tightkv.layout import PageLayout


class TightAttention(AttentionImpl):  # type: ignore[misc]
    """Append to vLLM's blocks and to the exact rings, then attend to both."""

    def __init__(
        self, layer: Any, layout: PageLayout, kernels: ModuleType, rows: int, device: torch.device
    ) -> None:
        """`layer` is a vLLM Attention with its own implementation, whose numbers are taken."""
        old = layer.impl
        self.num_heads, self.num_kv_heads = layer.num_heads, layer.num_kv_heads
        self.head_size, self.kv_cache_dtype = layer.head_size, layer.kv_cache_dtype
        self.scale = float(old.scale)
        self.softcap: float | None = getattr(old, "logits_soft_cap", None) or None
        self.attn_type, self.sliding_window = AttentionType.DECODER, None
        self.alibi_slopes, self.kv_sharing_target_layer_name = None, None
        self.layout, self.codec, self.kernels = layout, Codec(layout), kernels
        self.rows, self.device = rows, device
        self.rings: tuple[Tensor, ...] | None = None
        # Number of pages and steps of the RowTable, of all layers with the same metadata.
        self.row_steps: tuple[int, Replay[BatchRows]] | None = None

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold what is launched here: nothing waits for the device."""
        name = self.kernels.__name__.rpartition(".")[2]
        return name in ("cuda", "triton") and not self.layout.cfg.check_finite

    def exact_tensors(self) -> tuple[Tensor, ...]:
        """Ring and sink keys and values [rows + 1, n, Hkv, D]; the last row is a waste bin.

        Made in vLLM's first run of the model, the one that measures memory.
        """
        if self.rings is None:
            shape, dtype = (self.num_kv_heads, self.head_size), self.layout.dtype
            counts = (self.layout.ring_tokens,) * 2 + (self.layout.cfg.sinks,) * 2
            self.rings = tuple(
                torch.zeros(self.rows + 1, count, *shape, dtype=dtype, device=self.device)
                for count in counts
            )
        return self.rings

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TightMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query [N, Hq, D], key and value [N, Hkv, D] -> output [N, Hq, D], in place."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tightkv: quantized attention outputs are not supported")
        rings = self.exact_tensors()
        if attn_metadata is None:
            return output.fill_(0)
        pages = as_pages(kv_cache, self.layout)
        # All tokens are written before any is read: sequences share blocks within a step.
        for part in attn_metadata.parts:
            self.kernels.append(
                self.codec,
                self._view(pages, rings, part, context=False),
                key[part.tokens],
                value[part.tokens],
                part.first,
                part.rows.exact_starts,
                max_new=part.most,
                open_codes=True,
            )
        for part in attn_metadata.parts:
            mine = part.tokens
            answer, _ = self.kernels.attend(
                self.codec,
                query[mine],
                self._view(pages, rings, part, context=part.fresh),
                part.first,
                max_queries=part.most,
                scale=self.scale,
                causal=True,
                window=None,
                softcap=self.softcap,
                mask=None,
                new_key=key[mine] if part.fresh else None,
                new_value=value[mine] if part.fresh else None,
            )
            output[mine].copy_(answer)
        return output

    def _view(
        self, pages: Tensor, rings: tuple[Tensor, ...], part: Sequences, context: bool
    ) -> CacheView:
        """The cache with a part's new tokens, or only what came before them."""
        rows = part.rows
        return CacheView(
            pages=pages,
            block_table=part.block_table,
            lengths=rows.before if context else rows.lengths,
            starts=part.starts,
            ring_starts=rows.context_ring_starts if context else rows.ring_starts,
            sink_counts=rows.context_sink_counts if context else rows.sink_counts,
            ring_rows=rows.ring_rows,
            ring_key=rings[0],
            ring_value=rings[1],
            sink_key=rings[2],
            sink_value=rings[3],
            same_length=part.length if context else None,
        )
