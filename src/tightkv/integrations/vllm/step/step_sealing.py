"""GroupRings: what the builders of a group of layers share.

SealQueue: which complete pages of the sequences of a `RingTable` are sealed next. StepSealing seals
them by one launch per step, SinkCopies copies the exact first tokens that a step moves.

A decode step codes its tokens as they come. The pages that they complete are sealed before the
tokens of a later step are appended, in all layers by one launch (`late_sealing`). Until then
attention reads these tokens from the ring, so pages can wait, and when many sequences complete a
page at once, each step seals a share of them. All are sealed before a sequence that is new may read
them or take over their rings, and before one of them would be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.compat import as_pages
from tightkv.kernels.backend import is_late_sealing
from tightkv.kernels.view import SealedLayer
from tightkv.pages.layout import PageLayout, ring_tokens

if TYPE_CHECKING:
    from tightkv.integrations.vllm.step.attention import TightAttention
    from tightkv.integrations.vllm.step.ring_table import BatchRings, RingTable

ALL = 1 << 30  # more pages than there are


class SealQueue:
    """What of each row of a ring table is sealed, and the pages that this step seals."""

    def __init__(
        self, cfg: KVQuantConfig, rows: int, taken_back: int, device: torch.device | str
    ) -> None:
        self.page_size, self.new = cfg.page_size, taken_back + 1
        # A page may wait until its sequence has so many tokens from the page's first one on. What a
        # step adds to these, drafts included, still leaves the page within the window.
        self.patience = (cfg.exact_pages - 1) * cfg.page_size
        self.kept = ring_tokens(cfg) // cfg.page_size + 1  # pages that a ring has tokens of
        self.sealed_to = torch.zeros(rows + 1, dtype=torch.long, device=device)
        self.pages = torch.zeros(rows + 1, self.kept, dtype=torch.long, device=device)
        """The newest pages of a row's sequence, page i at i % kept."""
        self.hurries = torch.zeros((), dtype=torch.long, device=device)
        """Whether the step before had new sequences."""
        shape = (rows * self.kept + 2, 4)
        self.chosen = torch.zeros(shape, dtype=torch.int32, device=device)
        """The number of pages at [0, 0], then of each page its ring, its first token's position,
        its number, and from where the ring has exact tokens; the last place takes no page."""

    def budget(self, sequences: int) -> int:
        """The most pages that a step seals if none is due: a quarter more than the mean.

        The same sequences complete no more in four fifths of the time that each takes for a page.
        """
        return -(-5 * sequences * self.new // (4 * self.page_size))

    def choose(
        self,
        table: RingTable,
        own: Tensor,
        matched: Tensor,
        before: Tensor,
        live: Tensor,
        all_: bool,
    ) -> None:
        """Choose the pages to seal before the step of sequences with `before` [B] tokens.

        `own` is the row of each sequence that `matched`. The table is as the last step left it.
        """
        size, rows = self.page_size, table.rows
        row = torch.arange(rows + 1, device=before.device)[:, None]
        end = table.length.index_put((own.masked_fill(~matched, rows),), before)
        end[rows:].fill_(0)
        end = end[:, None] // size * size
        sealed = torch.minimum(self.sealed_to[:, None], end)
        at = sealed + size * torch.arange(self.kept, device=before.device)
        pages = self.pages.gather(1, at // size % self.kept)
        complete = at < end
        due = complete & (table.row_of_block[pages] == row)  # of others, nobody reads it any more
        exact_from = table.ring_valid_from[:, None].expand_as(at)
        due &= exact_from < at + size
        number = due.flatten().cumsum(0).view_as(at)
        newcomers = (live & ~matched).any().long()
        late = (due & (at + self.patience <= end)).any()  # as when the batch has shrunk
        hurries = late | (self.hurries + newcomers + int(all_) > 0)
        budget = torch.where(hurries, ALL, self.budget(len(before)))
        taken = due & (number <= budget)
        passed = (complete & (taken | ~due)).long().cumprod(1).sum(1)
        self.sealed_to.copy_(sealed.squeeze(1) + size * passed)
        self.hurries.copy_(newcomers)

        entries = torch.stack([row.expand_as(at), at, pages, exact_from], 2).int()
        nowhere = len(self.chosen) - 1
        self.chosen[number.where(taken, nowhere).flatten()] = entries.flatten(0, 1)
        self.chosen[0, 0] = taken.sum()

    def note_pages(
        self, rows: Tensor, matched: Tensor, before: Tensor, lengths: Tensor, *ends: Tensor
    ) -> None:
        """Note the first and the last page that new tokens go to, which seal later."""
        index = before // self.page_size
        begun = torch.where(matched, self.sealed_to[rows], index * self.page_size)
        self.sealed_to[rows] = begun
        self.pages[rows, index % self.kept] = ends[0]
        self.pages[rows, (lengths - 1).clamp_min(0) // self.page_size % self.kept] = ends[1]
        self._clear_last()

    def note_sealed(self, rows: Tensor, lengths: Tensor) -> None:
        """Note that all complete pages of these rows are sealed by their append."""
        self.sealed_to[rows] = lengths // self.page_size * self.page_size
        self._clear_last()

    def _clear_last(self) -> None:
        """The last row is nobody's."""
        self.sealed_to[-1:].fill_(0)
        self.pages[-1:].fill_(0)


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
    return torch.cat([rows.saved_at, own]).long(), torch.cat([own, rows.sink_sources]).long()


class GroupRings:
    """The ring table of layers that run with the same metadata."""

    table: RingTable | None = None
    """Made with the first step, when vLLM has said how many blocks there are."""
    sealing: StepSealing | None = None
    """With the table, of layers that leave the sealing of pages to later steps."""
    copies: SinkCopies | None = None  # with the table; without, each layer copies its own sinks
