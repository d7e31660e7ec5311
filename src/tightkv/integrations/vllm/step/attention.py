"""TightAttention: what a layer of vLLM runs in place of its own attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from tightkv.fit import LayerFit
from tightkv.integrations.vllm.compat import as_pages
from tightkv.integrations.vllm.step.batch_split import SHORT_PROMPT, Limits
from tightkv.integrations.vllm.step.flash_attention import prefer_flash_attention
from tightkv.integrations.vllm.step.layer_step import LayerStep, Rings
from tightkv.integrations.vllm.step.metadata import TightMetadata
from tightkv.integrations.vllm.step.ring_table import ring_size, sink_rows
from tightkv.integrations.vllm.step.step_sealing import GroupRings
from tightkv.integrations.vllm.step.warm_up import Kinds, warm_up_once
from tightkv.kernels.backend import Backend
from tightkv.math.key_scale import KeyScale
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout


class TightAttention(AttentionImpl):  # type: ignore[misc]
    """Append to vLLM's blocks and to the rings, then attend to both."""

    packed_pages: int = 0
    """Of this layer in each block of vLLM's, where that holds the pages of all layers."""

    def __init__(
        self,
        layer: Any,
        layout: PageLayout,
        kernels: Backend,
        limits: Limits,
        device: torch.device,
        reads: TightAttention | None = None,
        is_draft: bool = False,
    ) -> None:
        """`layer` is a vLLM Attention with its own implementation, whose numbers are taken.

        `reads`: the attention whose cache this layer reads, if it has none of its own. `is_draft`:
        the layer is one of a speculator's model.
        """
        old = layer.impl
        self.num_heads, self.num_kv_heads = layer.num_heads, layer.num_kv_heads
        self.head_size, self.kv_cache_dtype = layer.head_size, layer.kv_cache_dtype
        self.scale = float(old.scale)
        self.softcap: float | None = getattr(old, "logits_soft_cap", None) or None
        self.attn_type, self.sliding_window = AttentionType.DECODER, None
        self.alibi_slopes, self.kv_sharing_target_layer_name = None, None
        self.layout, self.kernels, self.limits, self.device = layout, kernels, limits, device
        sinks: Tensor | None = getattr(old, "sinks", None)
        # The parameter itself and no copy: new weights are loaded into it.
        self.sink_logits = None if sinks is None else sinks.detach()
        self.window: int | None = layer.sliding_window
        codec = Codec(layout)
        self.step = LayerStep(
            kernels, codec, self.scale, self.softcap, self.sink_logits, self.window
        )
        self.reads, self.has_readers, self.is_draft = reads, False, is_draft
        if reads is not None:
            reads.has_readers = True
        if device.type == "cuda":
            prefer_flash_attention()
        self.rings: Rings | None = None
        self.feedback: Tensor | None = None
        """`Codec.feedback_factors` of the layer's queries, for CUDA graphs at a fixed address."""
        self.centers: tuple[Tensor, Tensor] | None = None
        self.key_scale: KeyScale | None = None
        self.group_rings: GroupRings | None = None
        """The rings of all layers with the same metadata."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold the launches: the host does not wait for the device."""
        return self.kernels.TAKES.graphs and not self.layout.cfg.check_finite

    @property
    def short_prompt(self) -> int:
        """The most new tokens of a prompt that these kernels decode."""
        return SHORT_PROMPT if self.kernels.TAKES.short_prompts else 0

    def use_fit(self, own: LayerFit) -> None:
        """Hold and code tokens as `own` says; of a layer whose cache is empty."""
        scale, dtype = own.scale, self.layout.dtype
        if scale is not None:
            for each in (dtype, self.layout.raw_dtype):
                scale.on(each, self.device)  # now, not while a CUDA graph is captured
        self.key_scale = scale
        if own.centers is not None:
            if self.softcap is not None or self.sink_logits is not None:
                raise ValueError(
                    "tightkv: the calibration has key centers, and this layer a soft cap of scores "
                    "or sink logits, which they would change; leave the calibration out"
                )
            key, value = own.centers.on(dtype, self.device)
            self.centers = (key if scale is None else key / scale.on(dtype, self.device)), value
        if own.metric is not None:
            self.feedback = self.step.codec.feedback_factors(own.metric, self.device)

    def exact_tensors(self) -> Rings:
        """Keys and values of rings and sinks [rows + 1, n, Hkv, D]; no sequence owns the last row.

        The sinks that the RingTable saves follow. With a window of 8 bits, rings are as
        `PageLayout.new_ring` says, and their scales come last. All are allocated in vLLM's first
        run of the model, which measures memory.
        """
        if self.reads is not None:
            return self.reads.exact_tensors()
        if self.rings is None:
            rows, cfg = self.limits.rows, self.layout.cfg
            shape = (sink_rows(rows), cfg.sinks, self.num_kv_heads, self.head_size)
            sinks = (torch.zeros(shape, dtype=self.layout.dtype, device=self.device) for _ in "kv")
            tokens = ring_size(cfg, self.limits.decoding - 1)
            key, value, scales = self.layout.new_ring(rows + 1, tokens, self.device)
            self.rings = (key, value, *sinks, *([] if scales is None else [scales]))
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
        """query [N, Hq, D], key and value [N, Hkv, D] -> output [N, Hq, D], in place.

        Layers that read another one's cache are given no key and value.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("tightkv: quantized attention outputs are not supported")
        if key is None and self.reads is None:  # type: ignore[unreachable]  # in vLLM's first run
            raise ValueError(
                f"tightkv: the model writes keys and values of {layer.layer_name} to vLLM's cache "
                "itself; choose --attention-backend TRITON_ATTN, with which it does not, or leave "
                "tightkv out"
            )
        rings = self.exact_tensors()
        if attn_metadata is None:
            if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
                self._warm_up(rings)
                self.step.take_workspace(query, self._copied_bytes(query))
            return output.fill_(0)
        sealing = attn_metadata.sealing
        if sealing is not None:
            sealing.begin(self)
        later = sealing is not None and attn_metadata.seals_later and self in sealing.late
        pages = as_pages(kv_cache, self.layout)
        parts = attn_metadata.parts
        scale = (self.reads or self).key_scale
        if scale is not None:
            query = scale.times(query)
        if self.key_scale is not None:
            key = key / self.key_scale.on(key.dtype, self.device)
        if self.reads is not None:
            new, centers = attn_metadata.new_tokens.get(self.reads), self.reads.centers
            self.step.attend(parts, pages, rings, query, new, output, centers)
            return output
        if self.has_readers and any(part.is_prefill for part in parts):
            attn_metadata.new_tokens[self] = self._for_readers(key, value)
        stored = attn_metadata.inherited, self.feedback, self.centers, later
        self.step.run(parts, pages, rings, query, key, value, output, *stored)
        return output

    def _copied_bytes(self, query: Tensor) -> int:
        """Bytes of scaled queries and keys, tokens relative to centers, and tokens for readers."""
        scaled = (self.reads or self).key_scale is not None
        pairs = (self.centers is not None) + (self.reads is None and self.has_readers)
        keys = 2 * pairs + (self.key_scale is not None)
        return query.nbytes * scaled + query.nbytes // self.num_heads * self.num_kv_heads * keys

    def _for_readers(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Copies: compiled models and CUDA graphs use the memory again before it is read."""
        if self.centers is None:
            return key.clone(), value.clone()
        return key - self.centers[0], value - self.centers[1]

    def _warm_up(self, rings: Rings) -> None:
        """Compile kernels while vLLM starts, once for layers that are alike."""
        limits, short = self.limits, self.short_prompt
        least_fresh = limits.most_as_decoding(limits.sequences, short) + 1
        kinds = Kinds(max(limits.decoding, short), least_fresh, limits.sequences)
        warm_up_once(self.step, rings, self.num_heads, kinds, self.feedback)
