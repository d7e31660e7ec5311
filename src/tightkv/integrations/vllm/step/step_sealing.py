"""GroupRings: what the builders of a group of layers share.

StepSealing seals the pages that the group has completed by one launch per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from tightkv.integrations.vllm.compat import as_pages
from tightkv.integrations.vllm.step.ring_table import RingTable
from tightkv.integrations.vllm.step.seal_queue import SealQueue
from tightkv.integrations.vllm.step.sink_copies import SinkCopies
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


class GroupRings:
    """The ring table of layers that run with the same metadata."""

    table: RingTable | None = None
    """Made with the first step, when vLLM has said how many blocks there are."""
    sealing: StepSealing | None = None
    """With the table, of layers that leave the sealing of pages to later steps."""
    copies: SinkCopies | None = None  # with the table; without, each layer copies its own sinks
