"""Compile what a layer launches while vLLM starts, so that no request waits for it.

Triton and NVRTC compile a kernel when it is launched for the first time, cuDNN is loaded when it
is first asked. So a layer runs here every kind of part that `split_batch` makes, on one page of its
own and on the row of the rings that is nobody's. Which binary a launch takes is decided by
dtypes, head counts, how many tokens a sequence has, whether a batch has few sequences or many, and
whether a prefix is read in one piece or in several; other numbers that differ from step to step do
not decide (`do_not_specialize` in `kernels.triton`). Without FlashAttention 3, cuDNN still plans
each new prompt length once.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from tightkv.integrations.vllm.step.layer_step import LayerStep, Rings
from tightkv.integrations.vllm.step.metadata import BatchPart
from tightkv.integrations.vllm.step.ring_table import BatchRings
from tightkv.kernels.prefill import MIN_QUERIES, chunk_tokens
from tightkv.kernels.ragged_plan import plan_groups
from tightkv.kernels.sdpa import CUDNN_MULTIPLE
from tightkv.pages.layout import PageLayout

logger = logging.getLogger("vllm.tightkv")
_WARM: set[tuple[object, ...]] = set()


def warm_up_once(
    step: LayerStep,
    rings: Rings,
    query_heads: int,
    most_decoding: int,
    least_fresh: int,
    feedback: Tensor | None = None,
    sequences: int = 1,
) -> None:
    """`warm_up` for the first of all layers that are alike. Errors of the device come out here."""
    layout, device = step.codec.layout, rings[0].device
    # of the engine; another in this process may have others
    limits = most_decoding, least_fresh, sequences
    has = feedback is not None
    scores = step.softcap, step.window
    alike = (layout, step.kernel_name, query_heads, *scores, device, *limits, has)
    if alike in _WARM:
        return
    started = time.perf_counter()
    warm_up(step, rings, query_heads, most_decoding, least_fresh, feedback, sequences)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _WARM.add(alike)
    seconds = time.perf_counter() - started
    logger.info("tightkv: %s kernels of %r ready in %.1f s", step.kernel_name, layout, seconds)


def warm_up(
    step: LayerStep,
    rings: Rings,
    query_heads: int,
    most_decoding: int,
    least_fresh: int,
    feedback: Tensor | None = None,
    sequences: int = 1,
) -> None:
    """Run parts of every kind, one after another.

    `most_decoding`: new tokens a sequence can have in a part that decodes; `least_fresh`: in one
    of prompts; `sequences`: the most of a batch.
    """
    layout, device = step.codec.layout, rings[0].device
    pages = layout.new_pages(1, device)
    limits = most_decoding, least_fresh, sequences, step.workspace_tokens
    for part in kinds_of_parts(layout, rings, *limits):
        # as a model has them: parts of one tensor
        heads = (query_heads, layout.num_kv_heads, layout.num_kv_heads)
        shape = (part.tokens.stop, sum(heads), layout.head_dim)
        qkv = torch.zeros(shape, dtype=layout.dtype, device=device)
        query, key, value = qkv.split(heads, dim=1)
        output = torch.empty_like(query)
        step.run([part], pages, rings, query, key, value, output, feedback=feedback)


def kinds_of_parts(
    layout: PageLayout,
    rings: Rings,
    most_decoding: int,
    least_fresh: int,
    sequences: int = 1,
    workspace_tokens: int | None = None,
) -> Iterator[BatchPart]:
    """A part for every kind: decodes, short prompts, long ones over one piece and over several.

    Prompts that share a workspace fill it.
    """
    page = layout.page_size
    if sequences > 1:  # many programs have other tiles than few (kernels.cuda.decode_plan)
        yield _part(layout, rings, 1, before=page, is_prefill=False, sequences=sequences)
    for count in sizes(1, most_decoding):
        yield _part(layout, rings, count, before=page, is_prefill=False)
    for count in sizes(least_fresh, MIN_QUERIES - 1):
        yield _part(layout, rings, count, before=page, is_prefill=True)
    # Several pieces, of lengths that cuDNN plans for and one that it does not.
    several = chunk_tokens(layout, 1) + 3 * CUDNN_MULTIPLE + page // 2
    for before in (page, several):
        yield _part(layout, rings, CUDNN_MULTIPLE, before, is_prefill=True, host_knows=True)
    if workspace_tokens is not None:
        yield _sharing_part(layout, rings, workspace_tokens)


def sizes(least: int, most: int) -> list[int]:
    """Numbers in [least, most]: both, and the two on each side of every step to twice as much."""
    doubled = itertools.takewhile(lambda n: n <= most, (1 << i for i in itertools.count()))
    found = {least, most, *(n + more for n in doubled for more in (0, 1))}
    return sorted(n for n in found if least <= n <= most)


def _sharing_part(layout: PageLayout, rings: Rings, workspace_tokens: int) -> BatchPart:
    """Four prompts in one workspace."""
    sequences, count = 4, 64
    before = workspace_tokens // sequences - count
    part = _part(layout, rings, count, before, is_prefill=True, sequences=sequences)
    groups = plan_groups(
        [count] * sequences,
        [before] * sequences,
        workspace_tokens,
        part.query_start_loc,
        part.rows.before,
    )
    return replace(part, ragged=groups)


def _part(
    layout: PageLayout,
    rings: Rings,
    count: int,
    before: int,
    is_prefill: bool,
    host_knows: bool = False,
    sequences: int = 1,
) -> BatchPart:
    """Sequences with `count` new tokens each after `before` others, all in page 0."""
    device = rings[0].device
    length = before + count
    exact = max(before, length - layout.ring_tokens)

    def number(n: int) -> Tensor:
        return torch.full((sequences,), n, dtype=torch.int32, device=device)

    rows = BatchRings(
        lengths=number(length),
        before=number(before),
        ring_rows=number(len(rings[0]) - 1),
        ring_valid_from=number(before),
        ring_read_from=number(exact),
        sink_counts=number(0),
        context_ring_read_from=number(before),
        context_sink_counts=number(0),
        sink_sources=number(len(rings[0]) - 1),
        saved_at=number(len(rings[0]) - 1),
    )
    pages = -(-length // layout.page_size)
    return BatchPart(
        tokens=slice(0, count * sequences),
        query_start_loc=torch.arange(sequences + 1, dtype=torch.int32, device=device) * count,
        max_query_len=count,
        is_prefill=is_prefill,
        block_table=torch.zeros(sequences, pages, dtype=torch.int32, device=device),
        left_pad=number(0),
        rows=rows,
        context_len=before if host_knows else None,
    )
