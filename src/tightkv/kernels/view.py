"""What a kernel gets beside tokens: the sequences of a layer as tensors, and options."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tightkv.kernels.ragged_plan import RaggedGroup


class SealedLayer(NamedTuple):
    """What sealing reads and writes of a layer."""

    pages: Tensor  # uint8 [num_pages, Hkv, record_bytes]
    ring_key: Tensor  # [rows, ring, Hkv, D]
    ring_value: Tensor
    feedback: Tensor | None  # float32 [Hkv, D, D]
    ring_scales: Tensor | None = None  # float16 [rows, ring, Hkv, 2] with a window of 8 bits


@dataclass(frozen=True)
class CacheView:
    """Sequence b holds tokens [left_pad[b], lengths[b]), each read from one of three places.

    - sinks: positions [left_pad, left_pad + sink_counts), exact;
    - ring: positions [ring_read_from, lengths), exact or of 8 bits, p in slot p % ring size;
    - pages: everything between, compressed.

    A position that both sinks and ring hold is read from the ring.
    """

    pages: Tensor  # uint8 [num_pages, Hkv, record_bytes]
    block_table: Tensor  # int32 [B, max_pages]
    lengths: Tensor  # int32 [B]
    left_pad: Tensor  # int32 [B], left padding before it
    ring_read_from: Tensor  # int32 [B]
    sink_counts: Tensor  # int32 [B]
    ring_rows: Tensor  # int32 [B], which ring and sinks below are sequence b's
    ring_key: Tensor  # [rows, ring, Hkv, ring_key_dim] in the layout's ring_dtype
    ring_value: Tensor  # [rows, ring, Hkv, D]
    sink_key: Tensor  # [rows, sinks, Hkv, D]
    sink_value: Tensor
    same_length: int | None = None  # every row's length, where the host knows: alike, unpadded
    # Attention is launched right after an append, with nothing in between: lengths, tables, queries
    # and, of sequences with exact tokens from before, pages may be read while it still runs.
    overlaps_append: bool = False
    feedback: Tensor | None = None  # float32 [Hkv, D, D], how sealed keys are coded: math.feedback
    # Pages that an append completes are sealed by `seal_layers` of a later step: the append codes
    # their new tokens as those of an open page. For layers of which the backend `seals_later`.
    seals_later: bool = False
    # What keys and values of the cache are relative to, [Hkv, D] each: kernels that take them
    # subtract them from new tokens and add the values' to the output.
    centers: tuple[Tensor, Tensor] | None = None
    # What kernels found out about these lengths, once for all layers of a step; None: nothing is
    # kept, and sequences are treated as if all were as long as the block table is wide.
    plans: dict[object, Tensor] | None = None
    ring_scales: Tensor | None = None  # float16 [rows, ring, Hkv, 2] with a window of 8 bits
    ragged: tuple[RaggedGroup, ...] = ()  # how prompts after these tokens share a workspace

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]


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
