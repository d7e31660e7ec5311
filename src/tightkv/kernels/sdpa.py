"""torch's attention kernels (SDPA backends), or those of an engine, with the LSE they compute."""

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tightkv.kernels.ragged_plan import RaggedGroup

CUDNN_MULTIPLE = 512  # cuDNN gets lengths that are multiples of this


class AttentionState(NamedTuple):
    """Attention over some of the tokens: `out` [B, H, L, D] and its LSE [B, H, L] in float32."""

    out: Tensor
    lse: Tensor


SDPABackend = Callable[[Tensor, Tensor, Tensor, float, bool], AttentionState]
_PREFERRED: list[SDPABackend] = []

# q [N, Hq, D], k and v [tokens, Hkv, D] of a group's sequences, scale, where the output goes -> LSE
# [N, Hq]. Causal: the last query of a sequence sees all of its keys.
VarlenAttention = Callable[[Tensor, Tensor, Tensor, RaggedGroup, float, Tensor], Tensor]
_VARLEN: list[VarlenAttention] = []


def prefer(backend: SDPABackend, varlen: VarlenAttention | None = None) -> None:
    """Try an engine's own attention first. It needs no plan for a length it has not seen.

    `varlen`: the same for sequences of different lengths, which torch does not have.
    """
    if backend not in _PREFERRED:
        _PREFERRED.append(backend)
    if varlen is not None and varlen not in _VARLEN:
        _VARLEN.append(varlen)


def varlen_attention() -> VarlenAttention | None:
    """Attention of sequences of different lengths in one call, where an engine has it."""
    return _VARLEN[0] if _VARLEN else None


def give_up_varlen(attention: VarlenAttention, error: RuntimeError) -> None:
    """Use an attention that has refused a call no more in this process."""
    if attention in _VARLEN:
        _VARLEN.remove(attention)
        warnings.warn(
            "tightkv: prompts after a cached prefix are read out of the pages, which is slower, "
            f"since the engine's attention refused: {error}",
            stacklevel=2,
        )


def length_multiple() -> int:
    """The number whose multiples are lengths without a plan of their own."""
    return 1 if _PREFERRED else CUDNN_MULTIPLE


def sdpa_with_lse(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False, *, any_length: bool = False
) -> AttentionState:
    """The fastest attention of q [B, H, L, D] over k, v [B, H / group, N, D].

    Causal attention is square: query i sees keys 0 to i. To plan a new shape takes cuDNN longer
    than it saves, so it gets lengths that come again, unless `any_length`.
    """
    assert not causal or q.shape[2] == k.shape[2]
    if q.device.type == "cpu":
        return _plain_attention(q, k, v, scale, causal)
    group = q.shape[1] // k.shape[1]
    refusal: RuntimeError | None = None
    for backend in _backends(q, k, any_length):
        for repeats in (1, group) if group > 1 else (1,):
            keys, values = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
            try:
                return backend(q, keys, values, scale, causal)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # missing, or it refuses the shape or grouped heads
                refusal = error
    raise RuntimeError(f"torch has no attention for q {list(q.shape)} {q.dtype}") from refusal


def _backends(q: Tensor, k: Tensor, any_length: bool) -> list[SDPABackend]:
    """The kernels to try, fastest first: from Hopper on, cuDNN's are torch's fastest."""
    comes_again = q.shape[2] % CUDNN_MULTIPLE == 0 and k.shape[2] % CUDNN_MULTIPLE == 0
    if not (any_length or comes_again) or torch.cuda.get_device_capability(q.device) < (9, 0):
        return [*_PREFERRED, _flash]
    return [*_PREFERRED, _cudnn, _flash]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionState:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return AttentionState(out, lse.reshape(q.shape[:3]).contiguous())


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionState:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return AttentionState(out, lse.contiguous())


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionState:
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ k.transpose(-1, -2) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - lse[..., None]) @ v
    return AttentionState(out.to(q.dtype), lse)
