"""AppendOptions and AttendOptions: what kernels are asked for beside tokens and the cache."""

from typing import NamedTuple

from torch import Tensor


class AppendOptions(NamedTuple):
    """The options of `append`, the same for every implementation (see `reference.append`)."""

    cu_seqlens: Tensor  # int32 [B + 1], where each row's new tokens begin
    ring_valid_from: Tensor  # int32 [B], from where rings held copies before
    max_new: int  # tokens of a row
    encode_partial_page: bool
    lag: int = 0  # tokens that follow a page when it is sealed


class AttendOptions(NamedTuple):
    """The options of `attend`, the same for every implementation (see `reference.attend`)."""

    max_queries: int  # of a row
    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    causal: bool = True
    window: int | None = None  # keys with position > query position - window
    softcap: float | None = None
    mask: Tensor | None = None  # [B|1, Hq|1, max_queries, tokens]; bool (True attends) or added
    new_key: Tensor | None = None  # [N, Hkv, D], exact tokens after those of the cache
    new_value: Tensor | None = None
    out: Tensor | None = None  # where the output is written
