"""TightLatentAttention: what a layer with dense latent attention (MLA) runs over our pages.

vLLM's layer keeps the projections. It gives new tokens to `do_kv_cache_update`, absorbed queries to
`forward_mqa`, and prompts to `forward_mha`, which is vLLM's own: new tokens attend to each other
exactly, and to the tokens before them through `_compute_prefill_context`.
"""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
    accumulate_mla_context_chunk,
    init_mla_context_partial,
)
from vllm.v1.attention.backend import AttentionCGSupport

from tightkv.integrations.vllm.step.backend import PageBlocks
from tightkv.integrations.vllm.step.warm_up import once
from tightkv.kernels.backend import LatentBackend
from tightkv.pages.latent import LatentCodec, LatentLayout


class TightLatentAttention(MLACommonImpl):  # type: ignore[misc]
    """Append to vLLM's blocks, and attend to them."""

    can_return_lse_for_decode: bool = True

    def __init__(self, layer: Any, layout: LatentLayout, kernels: LatentBackend) -> None:
        """`layer` is a vLLM MLAAttention with its own implementation, whose numbers are taken."""
        self.__dict__.update(vars(layer.impl))
        self.supports_quant_query_input = False
        self.layout, self.codec, self.kernels = layout, LatentCodec(layout), kernels

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Store kv_c_normed [N, rank] and k_pe [N, 1, rope_dim]; padding has no slot."""
        if not kv_cache.numel():
            return
        slots = slot_mapping.flatten()
        count = len(slots)
        rope = k_pe.flatten(1)
        self.kernels.append(
            self.codec, as_pages(kv_cache), kv_c_normed[:count], rope[:count], slots
        )

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[Tensor, Tensor]:
        """Absorbed queries, latent [N, H, rank] and RoPE part -> latents [N, H, rank], LSE."""
        rank, decode = self.layout.rank, attn_metadata.decode
        pages, sequences = as_pages(kv_c_and_k_pe_cache), (decode.block_table, decode.seq_lens)
        latent, rope = q if isinstance(q, tuple) else (q[..., :rank], q[..., rank:])
        return self.kernels.decode(self.codec, latent, rope, pages, *sequences, self.scale)

    def _compute_prefill_context(
        self,
        q: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Attend to stored tokens, a workspace of them at a time; -> output and LSE [H, N]."""
        prefill, rank = attn_metadata.prefill, self.layout.rank
        context, pages = prefill.chunked_context, as_pages(kv_c_and_k_pe_cache)
        dtype = mla_attention._get_kv_b_proj_input_dtype(self.kv_b_proj, False)
        states: tuple[Tensor, Tensor] | None = None
        for chunk in context.chunks:
            tokens = context.workspace[: chunk.num_context_tokens]
            table = prefill.block_table[chunk.request_slice]
            places = chunk.cu_seq_lens, chunk.starts, chunk.token_to_seq
            self.kernels.gather(self.codec, pages, table, *places, tokens)
            latent = tokens[:, :rank]
            projected = self.kv_b_proj(latent if dtype is None else latent.to(dtype))[0]
            heads = projected.unflatten(-1, (self.num_heads, -1))
            key, value = heads.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
            key = self._concat_k_nope_k_pe(key, tokens[:, None, rank:])
            found, lse = prefill.prefill_backend.run_prefill_context_chunk(
                chunk=chunk, q=q[chunk.token_slice], k=key, v=value
            )
            if states is None:
                states = init_mla_context_partial(context, found, lse, len(q))
            accumulate_mla_context_chunk(chunk, found, lse, *states)
        assert states is not None  # there is a chunk
        return states


def as_pages(kv_cache: Tensor) -> Tensor:
    """A layer's part of vLLM's cache [blocks, 1, page_bytes] -> [pages, page_bytes]."""
    return kv_cache.squeeze(1)


class TightLatentBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """vLLM's metadata; a step of decoding may have several tokens of each sequence."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.UNIFORM

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        impl = vllm_config.compilation_config.static_forward_context[layer_names[0]].impl
        if device.type == "cuda":
            warm_up_once(impl, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        layers = vllm_config.compilation_config.static_forward_context.values()
        ours = [
            x.impl for x in layers if isinstance(getattr(x, "impl", None), TightLatentAttention)
        ]
        if any(impl.layout.cfg.check_finite for impl in ours):  # every append waits for the device
            return AttentionCGSupport.NEVER
        return cls._cudagraph_support


def warm_up_once(impl: TightLatentAttention, device: torch.device) -> None:
    """Compile what the layers launch, so that no request waits for it."""
    alike = impl.layout, impl.num_heads, device
    once(alike, device, "kernels of latent attention", partial(_warm_up, impl, device))


def _warm_up(impl: TightLatentAttention, device: torch.device) -> None:
    layout, codec = impl.layout, impl.codec
    pages = torch.zeros(1, layout.page_bytes, dtype=torch.uint8, device=device)
    for count in (1, 4096):  # one token per program, and several
        x = torch.zeros(count, layout.rank + layout.rope_dim, dtype=layout.dtype, device=device)
        slots = torch.full((count,), -1, dtype=torch.int64, device=device)
        impl.kernels.append(codec, pages, x[:, : layout.rank], x[:, layout.rank :], slots)
    zero = torch.zeros(1, 1, dtype=torch.int32, device=device)
    impl.kernels.gather(codec, pages, zero, zero[0], zero[0], zero[0], x[:1])
    q = x.new_zeros(1, impl.num_heads, layout.rank + layout.rope_dim)
    latent, rope = q[..., : layout.rank].contiguous(), q[..., layout.rank :]
    impl.kernels.decode(codec, latent, rope, pages, zero, zero[0] + 1, impl.scale)


class TightLatentBackend(PageBlocks, MLACommonBackend):  # type: ignore[misc]
    """The backend of latent attention."""

    @staticmethod
    def get_impl_cls() -> type[TightLatentAttention]:
        return TightLatentAttention

    @staticmethod
    def get_builder_cls() -> type[TightLatentBuilder]:
        return TightLatentBuilder
