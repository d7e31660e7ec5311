"""Compile what a layer launches while vLLM starts, so that no request waits for it.

Triton and NVRTC compile a kernel at its first launch, and cuDNN is loaded at its first call. So a
layer runs here every kind of part that `split_batch` makes, on one page of its own and on the last
row of the rings, which no sequence owns. The binary of a launch depends on dtypes, head counts, the
new tokens of a sequence, whether a batch has few sequences or many, and whether a prefix is read in
one piece or in several. It does not depend on other numbers that differ from step to step
(`do_not_specialize` in `kernels.triton`). Without FlashAttention 3, cuDNN still plans each new
prompt length once.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tightkv.integrations.vllm.step.batch_split import PartRange
from tightkv.integrations.vllm.step.layer_step import LayerStep, Rings
from tightkv.integrations.vllm.step.metadata import BatchPart, make_part
from tightkv.integrations.vllm.step.ring_table import BatchRings
from tightkv.kernels.prefill import MIN_QUERIES, chunk_tokens
from tightkv.kernels.sdpa import CUDNN_MULTIPLE
from tightkv.pages.layout import PageLayout

logger = logging.getLogger("vllm.tightkv")
_WARM: set[tuple[object, ...]] = set()


class Kinds(NamedTuple):
    """The sizes of the parts that an engine's batches have."""

    most_decoding: int  # new tokens of a sequence in a part that decodes
    least_fresh: int  # new tokens of a sequence in a part of prompts
    sequences: int = 1  # the most of a batch


def once(
    alike: tuple[object, ...], device: torch.device, kernels: str, launch: Callable[[], None]
) -> None:
    """Launch kernels, unless that was done for layers that are alike; raise the device's errors."""
    if alike in _WARM:
        return
    started = time.perf_counter()
    launch()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    _WARM.add(alike)
    logger.info("tightkv: %s ready in %.1f s", kernels, time.perf_counter() - started)


def warm_up_once(
    step: LayerStep, rings: Rings, query_heads: int, kinds: Kinds, feedback: Tensor | None = None
) -> None:
    """`warm_up` for the first of layers that are alike, in an engine with these kinds of parts."""
    layout, device = step.codec.layout, rings[0].device
    of_step = layout, step.kernels.NAME, query_heads, step.softcap, step.window
    alike = *of_step, device, kinds, feedback is not None
    launch = partial(warm_up, step, rings, query_heads, kinds, feedback)
    once(alike, device, f"{step.kernels.NAME} kernels of {layout!r}", launch)


def warm_up(
    step: LayerStep, rings: Rings, query_heads: int, kinds: Kinds, feedback: Tensor | None = None
) -> None:
    """Run parts of every kind, one after another."""
    layout, device = step.codec.layout, rings[0].device
    pages = layout.new_pages(1, device)
    for part in kinds_of_parts(layout, rings, kinds, step.workspace_tokens):
        # as a model has them: parts of one tensor
        heads = (query_heads, layout.num_kv_heads, layout.num_kv_heads)
        shape = (part.tokens.stop, sum(heads), layout.head_dim)
        qkv = torch.zeros(shape, dtype=layout.dtype, device=device)
        query, key, value = qkv.split(heads, dim=1)
        output = torch.empty_like(query)
        step.run([part], pages, rings, query, key, value, output, feedback=feedback)


def kinds_of_parts(
    layout: PageLayout, rings: Rings, kinds: Kinds, workspace_tokens: int | None = None
) -> Iterator[BatchPart]:
    """A part for every kind: decodes, short prompts, long ones over one piece and over several.

    Four prompts that share a workspace fill it.
    """
    page = layout.page_size
    most_decoding, least_fresh, sequences = kinds
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
        before = workspace_tokens // 4 - 64
        yield _part(layout, rings, 64, before, True, False, 4, workspace_tokens)


def sizes(least: int, most: int) -> list[int]:
    """Both bounds, and the powers of two between them, each with the number after it."""
    doubled = itertools.takewhile(lambda n: n <= most, (1 << i for i in itertools.count()))
    found = {least, most, *(n + more for n in doubled for more in (0, 1))}
    return sorted(n for n in found if least <= n <= most)


def _part(
    layout: PageLayout,
    rings: Rings,
    count: int,
    before: int,
    is_prefill: bool,
    host_knows: bool = False,
    sequences: int = 1,
    workspace_tokens: int | None = None,
) -> BatchPart:
    """Sequences with `count` new tokens each after `before` others, all in page 0."""
    device, length = rings[0].device, before + count

    def number(n: int) -> Tensor:
        return torch.full((sequences,), n, dtype=torch.int32, device=device)

    rows = BatchRings(
        lengths=number(length),
        before=number(before),
        ring_rows=number(len(rings[0]) - 1),
        ring_valid_from=number(before),
        ring_read_from=number(max(before, length - rings[0].shape[1])),
        sink_counts=number(0),
        context_ring_read_from=number(before),
        context_sink_counts=number(0),
        sink_sources=number(len(rings[0]) - 1),
        saved_at=number(len(rings[0]) - 1),
    )
    starts = [count * i for i in range(sequences + 1)]
    shared = None if workspace_tokens is None else (before,) * sequences
    cut = PartRange(0, sequences, is_prefill, count, before if host_knows else None, shared)
    blocks = number(0)[:, None].expand(sequences, -(-length // layout.page_size)).contiguous()
    first = torch.tensor(starts, dtype=torch.int32, device=device)
    return make_part(cut, starts, first, blocks, rows, number(0), workspace_tokens)
