"""GroupRings: what the builders of a group of layers share.

StepSealing seals the pages that the group has completed by one launch per step, SinkCopies copies
the exact first tokens that a step moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightkv.integrations.vllm.compat import as_pages
from tightkv.integrations.vllm.step.ring_table import BatchRings, RingTable
from tightkv.integrations.vllm.step.seal_queue import SealQueue
from tightkv.kernels.backend import is_late_sealing
from tightkv.kernels.view import SealedLayer
from tightkv.pages.layout import PageLayout

if TYPE_CHECKING:
    from tightkv.integrations.vllm.step.attention import TightAttention


def seals_later(impl: TightAttention) -> bool:
    """Whether a layer's appends can leave sealing to a later step."""
    kernels, layout, drafts = impl.kernels, impl.layout, impl.limits.decoding - 1
    # With one exact page, passes of a draft after the model's step read the codes of a page that it
    # has completed.
    return (
        is_late_sealing(kernels)
        and layout.cfg.exact_pages > bool(drafts)
        and impl.reads is None
        and kernels.seals_later(layout, impl.feedback is not None)
    )


class StepSealing:
    """Launches for the layers of a group that seal later, before the first layer's append."""

    def __init__(
        self, impls: Sequence[TightAttention], caches: Sequence[Tensor], queue: SealQueue
    ) -> None:
        """`caches`: each layer's part of vLLM's cache."""
        self.queue, self.late = queue, frozenset(filter(seals_later, impls))
        self._drafts = all(impl.is_draft for impl in impls)
        self._first: TightAttention | None = None
        alike: dict[tuple[PageLayout, bool], dict[TightAttention, Tensor]] = {}
        for impl, cache in zip(impls, caches, strict=True):
            if impl in self.late:
                kind = impl.layout, impl.feedback is not None
                alike.setdefault(kind, {})[impl] = as_pages(cache, impl.layout)
        self._launches = [_launch(same, queue.chosen) for same in alike.values()]

    def begin(self, impl: TightAttention) -> None:
        """Seal what the step before has left, when the first layer of a step begins.

        That is one of the model's, if a draft has layers in the group.
        """
        if self._first is None and impl.is_draft == self._drafts:
            self._first = impl
        if impl is self._first:
            for launch in self._launches:
                launch()


def _launch(pages: Mapping[TightAttention, Tensor], chosen: Tensor) -> Callable[[], None]:
    """The launch for layers that are alike, and have the same kernels."""
    layers, kernels = [], next(iter(pages)).kernels
    assert is_late_sealing(kernels)
    for impl, own in pages.items():
        ring_key, ring_value, _, _, *scales = impl.exact_tensors()
        layers.append(SealedLayer(own, ring_key, ring_value, impl.feedback, *scales))
    return partial(kernels.seal_layers, impl.step.codec, kernels.sealed_layers(layers), chosen)


class SinkCopies:
    """Sinks of layers, copied as a step of their `RingTable` says."""

    def __init__(self, sinks: Iterable[Tensor], nobody: int, most_sequences: int) -> None:
        """`sinks`: keys and values of each layer, [places, n, Hkv, D]; `nobody`: a place."""
        self._sinks = [each for each in sinks if each.numel()]
        self._nobody, self._most = nobody, most_sequences
        self._table: Tensor | None = None
        if self._sinks and self._sinks[0].is_cuda:
            rows = [[x.data_ptr(), x[0].nbytes // 4] for x in self._sinks]
            self._table = torch.tensor(rows, device="cpu").to(self._sinks[0].device)
            self._most_words = max(words for _, words in rows)

    def copy(self, rows: BatchRings) -> None:
        """Save the sinks of rows that get a new sequence, and copy those that it takes over.

        A place may be read and written: all are read before any is written.
        """
        if self._table is None:
            to, source = copied(rows)
            for sinks in self._sinks:
                sinks[to] = sinks[source]
            return
        from tightkv.integrations.vllm.step import ring_kernel

        ring_kernel.copy_sinks(self._table, rows, self._nobody, self._most_words, self._most)


def copied(rows: BatchRings) -> tuple[Tensor, Tensor]:
    """Places [2 B] that sinks are copied to, and those that they are copied from."""
    own = rows.ring_rows
    return (
        torch.cat([rows.saved_at, own]).long(),
        torch.cat([own, rows.sink_sources]).long(),
    )


class GroupRings:
    """The ring table of layers that run with the same metadata."""

    table: RingTable | None = None
    """Made with the first step, when vLLM has said how many blocks there are."""
    sealing: StepSealing | None = None
    """With the table, of layers that leave the sealing of pages to later steps."""
    copies: SinkCopies | None = None  # with the table; without, each layer copies its own sinks
