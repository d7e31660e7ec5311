"""TightMetadata: one step's batch as the layers see it, made once for all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from tightkv.integrations.vllm.step.batch_split import PartRange
from tightkv.integrations.vllm.step.ring_table import BatchRings
from tightkv.integrations.vllm.step.step_sealing import StepSealing
from tightkv.kernels.ragged_plan import RaggedGroup, plan_groups


@dataclass(frozen=True)
class BatchPart:
    """Neighboring sequences of a batch that are treated alike."""

    tokens: slice  # of the batch
    query_start_loc: Tensor  # int32 [B + 1], where each sequence's tokens begin among these
    max_query_len: int  # new tokens of one sequence
    is_prefill: bool  # the new tokens are read from the batch, not from the cache (prefill)
    block_table: Tensor  # int32 [B, max_pages]
    left_pad: Tensor  # int32 [B], zeros
    rows: BatchRings
    context_len: int | None = None  # tokens before the new ones, of a single sequence
    ragged: tuple[RaggedGroup, ...] = ()  # of prompts that share a workspace
    plans: dict[object, Tensor] = field(default_factory=dict)  # of decode kernels, by layer shapes


@dataclass(frozen=True)
class TightMetadata:
    parts: tuple[BatchPart, ...]
    num_actual_tokens: int
    # Places of sinks [2 B], copied to and from, where each layer copies its own.
    inherited: tuple[Tensor, Tensor] | None = None
    sealing: StepSealing | None = None  # of pages that steps before have completed
    seals_later: bool = False  # what this step completes is sealed by a later one
    built_from: tuple[Tensor, ...] = ()  # vLLM's block table, lengths, query_start_loc and slots
    new_tokens: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of a step with a prompt, by the attention whose cache other layers read."""


def make_part(
    part: PartRange,
    query_start_loc_cpu: Sequence[int],
    query_start_loc: Tensor,
    pages: Tensor,
    rows: BatchRings,
    zeros: Tensor,
    workspace_tokens: int | None = None,
) -> BatchPart:
    """The sequences of `part`; the host knows too where the tokens of each begin.

    For a part of all sequences it is enough to know where the first and the last token are.
    """
    begin, end = part.begin, part.end
    whole = end - begin == len(query_start_loc) - 1
    starts = query_start_loc_cpu if whole else query_start_loc_cpu[begin : end + 1]
    mine = query_start_loc[begin : end + 1]
    mine = mine - starts[0] if starts[0] else mine
    groups: tuple[RaggedGroup, ...] = ()
    if part.most_before is not None and workspace_tokens is not None:
        counts = [high - low for low, high in pairwise(starts)]
        before = rows.before[begin:end]
        groups = plan_groups(counts, part.most_before, workspace_tokens, mine, before)
    return BatchPart(
        tokens=slice(starts[0], starts[-1]),
        query_start_loc=mine,
        max_query_len=part.max_query_len,
        is_prefill=part.is_prefill,
        block_table=pages[begin:end],
        left_pad=zeros[: end - begin],
        rows=rows if whole else BatchRings(*(column[begin:end] for column in rows)),
        context_len=part.context_len,
        ragged=groups,
    )
