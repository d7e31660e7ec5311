"""TightLayer: one full-attention layer of a TightCache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from tightkv.fit import LayerFit
from tightkv.integrations.transformers.other_layers import forget_states
from tightkv.integrations.transformers.states import StepStates
from tightkv.integrations.transformers.steps import SharedSteps
from tightkv.kernels.reference import materialize
from tightkv.math.feedback import QueryMetric
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.pages.layout import exact_dtype, page_layout

# Up to this many new tokens are appended first and read back from the ring.
_DECODE_TOKENS = 16


def _with_pages(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads or writes pages, and gives back the device memory of offloaded ones.

    It runs without autocast, in the dtypes that the code names.
    """

    @functools.wraps(method)
    def run(self: TightLayer, *args: Any, **kwargs: Any) -> Any:
        try:
            if not torch.is_autocast_enabled(self.device.type):
                return method(self, *args, **kwargs)
            with torch.autocast(self.device.type, enabled=False):
                return method(self, *args, **kwargs)
        finally:
            self.offload()

    return run


class TightLayer(CacheLayerMixin):  # type: ignore[misc]
    """Compressed keys and values. Batch operations go through the TightCache that owns it."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, shared: SharedSteps, fit: LayerFit, kernels: str = "auto") -> None:
        super().__init__()
        self.shared, self.cfg, self.kernels = shared, fit.cfg, kernels
        self.metric, self.scale, self.centers = fit.metric, fit.scale, fit.centers
        self.kv: PagedKV | None = None
        self.length, self.step = 0, 0
        self._pending: StepStates | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.dim() != 4 or key_states.shape != value_states.shape:
            raise ValueError(
                f"keys {tuple(key_states.shape)}, values {tuple(value_states.shape)}: TightCache "
                "compresses layers whose keys and values are both [batch, heads, tokens, head_dim]"
            )
        self.use(key_states.shape[1], key_states.shape[3], key_states.dtype, key_states.device)

    def use(self, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> PagedKV:
        """Make the empty cache of a model that computes in `dtype`; exact tokens have 16 bits."""
        for name, own in (
            ("centers, of a calibration,", None if self.centers is None else self.centers.key),
            ("scales", None if self.scale is None else self.scale.value),
        ):
            if own is not None and own.shape != (heads, head_dim):
                raise ValueError(
                    f"keys have {heads} heads of {head_dim}; this layer's {name} "
                    f"{list(own.shape)}. Use a new TightCache for another model"
                )
        layout = page_layout(self.cfg, heads, head_dim, exact_dtype(dtype))
        self.kv = PagedKV(layout, self.shared.table, device, self.kernels)
        self.use_metric(self.metric)
        self.dtype, self.device, self.is_initialized = dtype, device, True
        return self.kv

    def use_metric(self, metric: QueryMetric | None) -> None:
        """Code keys of pages to come in the metric of the layer's queries, its scale in it."""
        self.metric = metric
        if self.kv is not None:
            self.kv.use_metric(metric)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new tokens [B, Hkv, T, D]; returns all tokens as tensors that are read lazily."""
        self.commit()
        if self.kv is None:
            self.lazy_initialization(key_states, value_states)
        if torch.is_autocast_enabled(key_states.device.type):  # it leaves rotated keys in float32
            value_states = value_states.to(key_states.dtype)
        self._check(key_states, value_states)
        given = key_states, value_states
        if self.centers is not None:
            key, value = self.centers.on(self.dtype, self.device)
            key_states, value_states = key_states - key[:, None], value_states - value[:, None]
        if self.scale is not None:
            key_states = key_states / self.scale.on(self.dtype, self.device)[:, None]
        if self.shared.buffers is not None and self.kv is not None:
            self.kv.offload(self.shared.buffers)
        self._pending = StepStates(self, key_states, value_states)
        return self._pending.tensors(*given)

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
            if x.dtype != self.dtype or x.device != self.device:
                raise ValueError(
                    f"{name} are {x.dtype} on {x.device}; this cache is {self.dtype} on "
                    f"{self.device}. Use a new TightCache, or reset() this one"
                )

    def commit(self) -> None:
        """Write the tokens of the last update into ring and pages."""
        if self._pending is not None:
            self._write_pending()

    @_with_pages
    def _write_pending(self) -> None:
        self._write()

    def _write(self) -> None:
        if self._pending is None:
            return
        assert self.kv is not None
        step, self._pending = self._pending, None
        batch, _, count, _ = step.new_key.shape
        plan = self.shared.plan(self.step, batch, count)
        self.kv.append(plan, step.new_key.transpose(1, 2), step.new_value.transpose(1, 2))
        self.length, self.step = self.length + count, self.step + 1

    def drop_pending(self) -> None:
        """Forget the tokens of the last update, if they are not written yet."""
        self._pending = None

    @_with_pages
    def catch_up(self) -> None:
        """Follow the table through a pass that was interrupted before this layer.

        Other layers may have sealed a page and overwritten their rings, and the table counts
        those tokens for all layers. This layer writes its newest token in their place.
        """
        assert self.kv is not None
        self._pending = None
        plan = self.shared.moved_by(self.step)
        newest = self.kv.newest([row.length for row in self.shared.before])
        key, value = (x.expand(-1, plan.counts[0], -1, -1) for x in newest)
        self.kv.append(plan, key, value)
        self.step += 1

    @_with_pages
    def materialize(self, step: StepStates) -> tuple[Tensor, Tensor]:
        """All keys and values [B, Hkv, tokens, D] as of a step, its own tokens exact.

        They are contiguous, as DynamicCache's are: some models view them.
        """
        assert self.kv is not None
        key, value = step.new_key, step.new_value
        if self._pending is not step:
            key, value = (x.transpose(1, 2).to(self.dtype) for x in self.kv.dequantize())
        elif step.past:
            view = self.kv.view(self.shared.rows_at(self.step, self.device))
            key, value = (
                torch.cat([past.transpose(1, 2).to(self.dtype), new], 2)
                for past, new in zip(materialize(self.kv.codec, view), (key, value), strict=True)
            )
        if self._pending is step:
            self._write()
        if self.scale is not None:
            key = key * self.scale.on(self.dtype, self.device)[:, None]
        if self.centers is not None:
            key_center, value_center = self.centers.on(self.dtype, self.device)
            key, value = key + key_center[:, None], value + value_center[:, None]
        return key.contiguous(), value.contiguous()

    def follow(self, step: StepStates, mask: Tensor | None) -> bool:
        """Take the left padding of a mask; True if the mask hides nothing that `attend` shows.

        Then causal attention without the mask is the same. `attend` hides the padding that is in
        the cache, not what a long chunk brings itself.
        """
        number = self.step if self._pending is step else self.step - 1
        padding = self.shared.follow(number, mask, step.new_key.shape[0])
        if padding is None or not padding.causal:
            return False
        if step.new_key.shape[2] > _DECODE_TOKENS and max(padding.starts, default=0) > step.past:
            return False
        return [row.left_pad for row in self.shared.table.rows] == list(padding.starts)

    @_with_pages
    def attend(self, step: StepStates, query: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Attention of query [B, Lq, Hq, D] over pages, ring and the step's new tokens.

        The query is in the scale of the keys (`scaled`). With centers, the logsumexp is that of
        scores with keys relative to their center.
        """
        assert self.kv is not None
        if self._pending is not step or query.shape[1] <= _DECODE_TOKENS:
            self._write()
            out, lse = attend(self.kv, query, **options)
        else:
            options |= {
                "rows": self.shared.rows_at(self.step, self.device),
                "same_length": self.shared.same_length_at(self.step),
                "new_key": step.new_key.transpose(1, 2),
                "new_value": step.new_value.transpose(1, 2),
            }
            out, lse = attend(self.kv, query, **options)
            self._write()
        return self.add_center(out), lse

    def scaled(self, query: Tensor) -> Tensor:
        """The model's queries [B, Hq, Lq, D], multiplied by the scale of this layer's keys."""
        if self.scale is None:
            return query
        return self.scale.times(query.transpose(1, 2)).transpose(1, 2)

    def add_center(self, out: Tensor) -> Tensor:
        """Attention's output [B, Lq, Hq, D] with the center of the values added."""
        if self.centers is None:
            return out
        _, value = self.centers.on(out.dtype, out.device)
        return (out.unflatten(2, (len(value), -1)) + value[:, None]).flatten(2, 3)

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
        """Give the device memory of offloaded pages to the next layer."""
        if self.kv is not None:
            self.kv.release()

    def prefetch(self) -> None:
        """Begin to bring offloaded pages to the device."""
        if self.kv is not None:
            self.kv.fetch()


class TightHybridLayer(LinearAttentionLayer, TightLayer):  # type: ignore[misc]
    """A layer with both linear attention, kept as transformers keeps it, and full attention."""

    is_compileable = False
    # Pages move; states of linear attention, which have a fixed size, stay.
    offload, prefetch = TightLayer.offload, TightLayer.prefetch

    def __init__(
        self, shared: SharedSteps, fit: LayerFit, kernels: str = "auto", **options: Any
    ) -> None:
        TightLayer.__init__(self, shared, fit, kernels)
        LinearAttentionLayer.__init__(self, **options)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the part that is meant: keys come by position, linear states by keyword."""
        part = TightLayer if args else LinearAttentionLayer
        part.lazy_initialization(self, *args, **kwargs)

    def reset(self) -> None:
        TightLayer.reset(self)
        forget_states(self)
