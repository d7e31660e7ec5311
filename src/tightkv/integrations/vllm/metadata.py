"""TightMetadata: one step's batch as the layers see it, made once for all of them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tightkv.integrations.vllm.rows import BatchRows


@dataclass(frozen=True)
class Sequences:
    """Neighbouring sequences of a batch that are treated alike."""

    tokens: slice  # of the batch
    first: Tensor  # int32 [B + 1], where each sequence's tokens begin among these
    most: int  # tokens of one sequence
    fresh: bool  # the new tokens attend to each other exactly (prefill)
    block_table: Tensor  # int32 [B, max_pages]
    starts: Tensor  # int32 [B], zeros
    rows: BatchRows
    length: int | None = None  # tokens before the new ones, of a single sequence


@dataclass(frozen=True)
class TightMetadata:
    parts: tuple[Sequences, ...]
    num_actual_tokens: int
