"""Prompts with vLLM's FlashAttention 3, which has no plan to make for a length it has not seen."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from tightkv.kernels.sdpa import AttentionState, prefer
from tightkv.sequences import uniform_cu_seqlens


@cache
def prefer_flash_attention() -> None:
    """Use it from now on, where vLLM would."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    if get_flash_attn_version() == 3:
        prefer(flash_attention_3)


def flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> AttentionState:
    """Attention of q [B, H, L, D] over k, v [B, H / group, N, D]."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch, _, queries, _ = q.shape
    keys = k.shape[2]
    out, lse = flash_attn_varlen_func(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)),
        max_seqlen_q=queries,
        cu_seqlens_q=uniform_cu_seqlens(batch, queries, q.device),
        max_seqlen_k=keys,
        cu_seqlens_k=uniform_cu_seqlens(batch, keys, q.device),
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        fa_version=3,
    )  # [B * L, H, D], [H, B * L]
    lse = lse.unflatten(1, (batch, queries)).transpose(0, 1).contiguous()
    return AttentionState(out.unflatten(0, (batch, queries)).transpose(1, 2), lse)
