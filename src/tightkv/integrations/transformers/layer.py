"""TightLayer: one full-attention layer of a TightCache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from tightkv.attention import attend
from tightkv.cache import PagedKV
from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers.states import StepStates
from tightkv.kernels.reference import materialize
from tightkv.layout import page_layout
from tightkv.sequences import (
    AppendPlan,
    RowTensors,
    SequenceState,
    SequenceTable,
    row_tensors,
    same_length,
)

# Up to this many new tokens are appended first and read back from the exact ring.
_DECODE_TOKENS = 16


class SharedSteps:
    """The table all layers share, moved on by the first layer of each forward pass."""

    def __init__(self, cfg: KVQuantConfig) -> None:
        # A layer's ring lives as long as its sequences, so open pages need no codes.
        self.table = SequenceTable(cfg, open_codes=False)
        self.steps = 0
        self.before: list[SequenceState] = []
        self._plan: AppendPlan | None = None
        self._before_tensors: dict[str, RowTensors] = {}

    def plan(self, step: int, batch: int, count: int, starts: Sequence[int] | None) -> AppendPlan:
        """The plan of a layer's step number `step`, made by whichever layer asks first."""
        if step == self.steps:
            if not len(self.table):
                self.table.add_rows(starts if starts is not None else [0] * batch)
            self.before, self._before_tensors = self.table.snapshot(), {}
            self._plan = self.table.append(range(batch), [count] * batch)
            self.steps += 1
        if self._plan is None or step != self.steps - 1 or self._plan.counts != (count,) * batch:
            raise RuntimeError(
                "the layers of this TightCache have seen different tokens (an interrupted forward "
                "pass?); crop the interrupted tokens or reset the cache"
            )
        return self._plan

    def rows_at(self, step: int, device: torch.device) -> RowTensors:
        """The rows as they were before step number `step`."""
        if step == self.steps:
            return self.table.tensors(device)
        key = str(device)
        if key not in self._before_tensors:
            self._before_tensors[key] = row_tensors(self.before, device)
        return self._before_tensors[key]

    def same_length_at(self, step: int) -> int | None:
        """The length of every row then, if alike; see `SequenceTable.same_length`."""
        return same_length(self.table.rows if step == self.steps else self.before)


class TightLayer(CacheLayerMixin):  # type: ignore[misc]
    """Compressed keys and values. Batch operations go through the TightCache that owns it."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, shared: SharedSteps, cfg: KVQuantConfig, kernels: str = "auto") -> None:
        super().__init__()
        self.shared, self.cfg, self.kernels = shared, cfg, kernels
        self.kv: PagedKV | None = None
        self.length, self.step = 0, 0
        self._pending: StepStates | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.dim() != 4 or key_states.shape != value_states.shape:
            raise ValueError(
                f"keys {tuple(key_states.shape)}, values {tuple(value_states.shape)}: TightCache "
                "compresses layers whose keys and values are both [batch, heads, tokens, head_dim]"
            )
        heads, d = key_states.shape[1], key_states.shape[3]
        layout = page_layout(self.cfg, heads, d, key_states.dtype)
        self.kv = PagedKV(layout, self.shared.table, key_states.device, self.kernels)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new tokens [B, Hkv, T, D]; returns all tokens as tensors that are read lazily."""
        self.commit()
        if self.kv is None:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        self._pending = StepStates(self, key_states, value_states)
        return self._pending.tensors()

    def _check(self, key_states: Tensor, value_states: Tensor) -> None:
        assert self.kv is not None
        layout, rows = self.kv.layout, len(self.shared.table)
        wanted = (rows or key_states.shape[0], layout.num_kv_heads, "T", layout.head_dim)
        for name, x in (("keys", key_states), ("values", value_states)):
            if x.dim() != 4 or (*x.shape[:2], "T", x.shape[3]) != wanted:
                raise ValueError(
                    f"{name} have shape {list(x.shape)}; this cache holds {list(wanted)}. "
                    "Use a new TightCache, or reset() this one, for another model or batch"
                )
            if x.dtype != layout.dtype or x.device != self.device:
                raise ValueError(
                    f"{name} are {x.dtype} on {x.device}; this cache is {layout.dtype} on "
                    f"{self.device}. Use a new TightCache, or reset() this one"
                )

    def commit(self, starts: Sequence[int] | None = None) -> None:
        """Write the tokens of the last update into ring and pages."""
        if self._pending is None:
            return
        assert self.kv is not None
        step, self._pending = self._pending, None
        batch, _, count, _ = step.new_key.shape
        plan = self.shared.plan(self.step, batch, count, starts)
        self.kv.append(plan, step.new_key.transpose(1, 2), step.new_value.transpose(1, 2))
        self.length, self.step = self.length + count, self.step + 1

    def materialize(self, step: StepStates) -> tuple[Tensor, Tensor]:
        """All keys and values [B, Hkv, tokens, D] as of a step, its own tokens exact."""
        assert self.kv is not None
        if self._pending is not step:
            key, value = self.kv.dequantize()
            return key.transpose(1, 2), value.transpose(1, 2)
        whole = step.new_key, step.new_value
        if step.past:
            view = self.kv.view(self.shared.rows_at(self.step, self.device))
            key, value = materialize(self.kv.codec, view)
            whole = (
                torch.cat([key.transpose(1, 2), step.new_key], 2),
                torch.cat([value.transpose(1, 2), step.new_value], 2),
            )
        self.commit()
        return whole

    def attend(self, step: StepStates, query: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Attention of query [B, Lq, Hq, D] over pages, ring and the step's new tokens."""
        assert self.kv is not None
        if self._pending is not step or query.shape[1] <= _DECODE_TOKENS:
            self.commit()
            return attend(self.kv, query, **options)
        out = attend(
            self.kv,
            query,
            view=self.kv.view(
                self.shared.rows_at(self.step, self.device),
                self.shared.same_length_at(self.step),
            ),
            new_key=step.new_key.transpose(1, 2),
            new_value=step.new_value.transpose(1, 2),
            **options,
        )
        self.commit()
        return out

    # --- what transformers asks ---
    def get_seq_length(self) -> int:
        return self.length + (0 if self._pending is None else self._pending.new_key.shape[2])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.kv, self._pending = None, None
        self.length, self.step = 0, self.shared.steps
        self.is_initialized = False

    def offload(self) -> None:
        """Move this layer's bytes to the CPU until `prefetch`."""
        if self.kv is not None:
            self.commit()
            self.kv.move("cpu")

    def prefetch(self) -> None:
        if self.kv is not None:
            self.kv.move(self.device)

    @property
    def batch_size(self) -> int:
        return len(self.shared.table)


class TightHybridLayer(LinearAttentionLayer, TightLayer):  # type: ignore[misc]
    """A layer with both linear attention, kept as transformers keeps it, and full attention."""

    is_compileable = False

    def __init__(
        self,
        shared: SharedSteps,
        cfg: KVQuantConfig,
        kernels: str = "auto",
        **options: Any,
    ) -> None:
        TightLayer.__init__(self, shared, cfg, kernels)
        LinearAttentionLayer.__init__(self, **options)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come by position, linear-attention states by keyword."""
        part = TightLayer if args else LinearAttentionLayer
        part.lazy_initialization(self, *args, **kwargs)

    def offload(self) -> None:
        TightLayer.offload(self)
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        TightLayer.prefetch(self)
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        TightLayer.reset(self)
        LinearAttentionLayer.reset(self)
