"""SinkCopies: the exact first tokens that a step moves, in all layers of a group at once."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tightkv.integrations.vllm.step.ring_table import BatchRings


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
        from tightkv.integrations.vllm.step import sink_kernel

        sink_kernel.copy(self._table, rows, self._nobody, self._most_words, self._most)


def copied(rows: BatchRings) -> tuple[Tensor, Tensor]:
    """Places [2 B] that sinks are copied to, and those that they are copied from."""
    own = rows.ring_rows
    return (
        torch.cat([rows.saved_at, own]).long(),
        torch.cat([own, rows.sink_sources]).long(),
    )
