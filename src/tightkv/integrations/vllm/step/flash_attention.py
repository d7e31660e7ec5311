"""Prompts with vLLM's FlashAttention 3, which has no plan to make for a length it has not seen."""

from functools import cache

from torch import Tensor

from tightkv.kernels.cuda.decode_plan import processor_count
from tightkv.kernels.ragged_plan import SPLIT_ROWS, RaggedGroup, uniform_cu_seqlens
from tightkv.kernels.sdpa import AttentionState, prefer

# Rows (query, head) that keep the 132 processors of a Hopper GPU busy, 128 each. With fewer,
# FlashAttention may split the keys, for which it takes float32 memory per row and split.
_FULL_ROWS = 128 * 128
_BLOCK_ROWS = 128  # of queries that one processor takes at a time
_UNSPLIT_KEYS = 512  # that are not worth a split


@cache
def prefer_flash_attention() -> None:
    """Use FlashAttention 3 from now on, if vLLM would."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    if get_flash_attn_version() == 3:
        prefer(flash_attention_3, varlen_flash_attention_3)


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


def varlen_flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, group: RaggedGroup, scale: float, out: Tensor
) -> Tensor:
    """Causal attention of a group's queries [N, Hq, D] over its keys; see `VarlenAttention`."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    _, lse = flash_attn_varlen_func(
        q,
        k,
        v,
        max_seqlen_q=group.max_queries,
        cu_seqlens_q=group.cu_seqlens_q,
        max_seqlen_k=group.max_keys,
        cu_seqlens_k=group.cu_seqlens_k,
        softmax_scale=scale,
        causal=True,  # aligned to the last query and key
        return_softmax_lse=True,
        out=out,
        num_splits=most_splits(group, len(q), q.shape[1], k.shape[1], processor_count(q.device)),
        fa_version=3,
    )  # lse [Hq, N]
    return lse.t()


def most_splits(
    group: RaggedGroup, queries: int, heads: int, kv_heads: int, processors: int
) -> int:
    """The most splits of the keys; FlashAttention takes as many of them as each prompt needs.

    By default it allows as many as the longest prompt would need alone, and keeps an output of all
    queries for each. With few KV heads this is more than SPLIT_ROWS, which `most_bytes` counts.
    """
    rows = queries * heads
    blocks = kv_heads * -(-group.max_queries * (heads // kv_heads) // _BLOCK_ROWS)
    if rows >= _FULL_ROWS or blocks >= 0.8 * processors or group.max_keys <= _UNSPLIT_KEYS:
        return 1
    return min(-(-processors // blocks), SPLIT_ROWS // rows)
