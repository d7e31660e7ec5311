"""SealQueue: which complete pages of the sequences of a `RingTable` are sealed next.

A decode step codes its tokens as they come. The pages that they complete are sealed before the
tokens of a later step are appended, in all layers by one launch (`late_sealing`). Until then
attention reads these tokens from the ring, so pages can wait, and when many sequences complete a
page at once, each step seals a share of them. All are sealed before a sequence that is new may read
them or take over their rings, and before one of them would be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.pages.layout import ring_tokens

if TYPE_CHECKING:
    from tightkv.integrations.vllm.step.ring_table import RingTable

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
