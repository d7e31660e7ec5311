"""SharedSteps: the sequences that all layers of a TightCache share, moved on once per pass.

Padding: what an attention mask hides on the left of each row, and whether it hides more.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.paged.offload import DeviceBuffers
from tightkv.paged.sequences import (
    AppendPlan,
    RowTensors,
    SequenceState,
    SequenceTable,
    common_length,
    row_tensors,
)

DIFFERENT_TOKENS = (
    "the layers of this TightCache have seen different tokens (an interrupted forward pass?); "
    "crop the interrupted tokens or reset the cache"
)
_NOTE = "_tightkv_padding"


class Padding(NamedTuple):
    """The first key of each row that some query sees; all keys where none is seen."""

    starts: tuple[int, ...]
    causal: bool  # nothing is hidden but keys before the start and after the query


class SharedSteps:
    """The table all layers share, moved on by the first layer of each forward pass."""

    def __init__(
        self, cfg: KVQuantConfig, *, offloading: bool = False, watch: bool = False
    ) -> None:
        """`watch`: the first keys are measured, because no weights have been."""
        # A layer's ring lives as long as its sequences, so open pages need no codes.
        self.table = SequenceTable(cfg, encode_partial_page=False)
        self.buffers = DeviceBuffers() if offloading else None
        self.watch = watch and cfg.protect_keys
        self.steps = 0
        self.before: list[SequenceState] = []
        self._plan: AppendPlan | None = None
        self._before_tensors: dict[str, RowTensors] = {}
        self._padded_step = -1  # the step whose padding the table has
        self._seen: tuple[int, weakref.ref[Tensor], Padding] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}  # a weak reference cannot be pickled

    def reset(self) -> None:
        """Forget every sequence, and the device memory that layers take turns with."""
        self.table.clear()
        if self.buffers is not None:
            self.buffers.clear()
        self.before, self._before_tensors = [], {}
        self._plan, self._seen = None, None

    def plan(self, step: int, batch: int, count: int) -> AppendPlan:
        """The plan of step number `step`, made when the first layer asks for it."""
        if step == self.steps:
            if self._padded_step != step:  # no mask came: new tokens are not padding
                self._set_starts(step, [min(row.left_pad, row.length) for row in self.table.rows])
            if not len(self.table):
                self.table.add_rows([0] * batch)
            self.before, self._before_tensors = self.table.snapshot(), {}
            self._plan = self.table.append(range(batch), [count] * batch)
            self.steps += 1
        plan = self.moved_by(step)
        if plan.counts != (count,) * batch:
            raise RuntimeError(DIFFERENT_TOKENS)
        return plan

    def moved_by(self, step: int) -> AppendPlan:
        """The plan of the newest step, for a layer whose next step is that one."""
        if self._plan is None or step != self.steps - 1:
            raise RuntimeError(DIFFERENT_TOKENS)
        return self._plan

    def follow(self, step: int, mask: Tensor | None, batch: int) -> Padding | None:
        """Give the table the left padding of a mask of step number `step`.

        Returns what the mask hides, or None if it was not looked at: nothing depends on it.
        """
        padding = noted_padding(mask, batch)
        if padding is None:
            assert mask is not None
            real = [row.left_pad < row.length for row in self.table.rows]
            if real and all(real) and not any(row.left_pad for row in self.table.rows):
                return None
            if self._seen is None or self._seen[0] != step or self._seen[1]() is not mask:
                # Waits for the device: once for a mask and step, not for every layer.
                self._seen = step, weakref.ref(mask), seen_padding(mask, batch)
            padding = self._seen[2]
        self._set_starts(step, padding.starts)
        self._padded_step = step
        return padding

    def _set_starts(self, step: int, starts: Sequence[int]) -> None:
        """Rows without a real token get a new start; others can only start earlier."""
        if not len(self.table):
            self.table.add_rows(starts)
            return
        for row, start in enumerate(starts):
            state = self.table.rows[row]
            moved = step != self.steps  # another layer has given this step its starts
            if start < state.left_pad or (state.length <= state.left_pad and not moved):
                self.table.set_left_pad(row, start)
                if moved and start < self.before[row].left_pad:
                    self.before[row].left_pad, self.before[row].sink_count = start, 0
                    self._before_tensors = {}

    def rows_at(self, step: int, device: torch.device) -> RowTensors:
        """The rows as they were before step number `step`."""
        if step == self.steps:
            return self.table.tensors(device)
        key = str(device)
        if key not in self._before_tensors:
            self._before_tensors[key] = row_tensors(self.before, device)
        return self._before_tensors[key]

    def same_length_at(self, step: int) -> int | None:
        """The length of every row before that step, if alike (`sequences.common_length`)."""
        return common_length(self.table.rows if step == self.steps else self.before)


def note_padding(mask: Tensor, padding: Padding) -> None:
    """Attach a mask's padding to it, for `noted_padding`."""
    setattr(mask, _NOTE, (padding, _version(mask)))


def noted_padding(mask: Tensor | None, batch: int) -> Padding | None:
    """What `note_padding` attached; None if the mask is another's or was changed since."""
    if mask is None:
        return Padding((0,) * batch, causal=True)
    padding, version = getattr(mask, _NOTE, (None, None))
    return padding if version == _version(mask) else None


def left_padding(visible: Tensor) -> Padding:
    """The padding of a causal mask whose keys are visible or not: bool [B, keys].

    `causal` says whether all hidden keys are on the left. Waits for the device once.
    """
    keys = visible.shape[1]
    starts = keys - visible.sum(1)
    on_the_left = visible == (torch.arange(keys, device=visible.device) >= starts[:, None])
    *counts, causal = torch.cat([starts, on_the_left.all()[None].to(starts.dtype)]).tolist()
    return Padding(tuple(counts), bool(causal))


def seen_padding(mask: Tensor, batch: int) -> Padding:
    """The padding of any mask [B|1, H|1, queries, keys], bool or added to scores."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    seen = seen.any(2).any(1).expand(batch, -1)  # [B, keys]
    starts = torch.where(seen.any(-1), seen.int().argmax(-1), seen.shape[-1])
    return Padding(tuple(starts.tolist()), causal=False)


def _version(mask: Tensor) -> int | None:
    """Counts changes in place; tensors of inference mode do not."""
    return None if mask.is_inference() else mask._version
