"""TightCache: transformers' Cache with compressed full-attention layers."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from tightkv.config import KVQuantConfig
from tightkv.fit import LayerFit, fit, refit
from tightkv.fit.calibration import Calibration
from tightkv.integrations.transformers import other_layers
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.integrations.transformers.fitting import plain_layers, source_of, warn_once
from tightkv.integrations.transformers.layer import TightHybridLayer, TightLayer
from tightkv.integrations.transformers.saving.file import WeightsSample, read_cache, save_cache
from tightkv.integrations.transformers.steps import DIFFERENT_TOKENS, SharedSteps
from tightkv.paged.offload import lasting


def known_model(model: Any) -> PreTrainedModel | PreTrainedConfig | None:
    """A model as transformers made it, also of one that torch.compile or a wrapper holds."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, torch.nn.Module):  # torch.compile and DataParallel hold one
            break
        model = inner
    if model is None or isinstance(model, PreTrainedModel | PreTrainedConfig):
        return model
    raise TypeError(
        f"model is a {type(model).__name__}; TightCache takes a model of transformers or its "
        "config (model.config)"
    )


class TightCache(Cache):  # type: ignore[misc]
    """A drop-in for DynamicCache: `model.generate(**inputs, past_key_values=TightCache(...))`.

    `quant` is a KVQuantConfig, a preset name, JSON or a mapping; None reads TIGHTKV_*.
    `model` (or its config) tells which layers are sliding-window or linear attention: those
    stay transformers' own. Without it every layer is taken for full attention. A model's weights
    also tell which layers' keys need more bits; `quant` has them as `layer_bits` then. So it has
    those of its `calibration`, which needs the model too.
    `offloading` keeps the pages in host memory and brings those of one layer at a time to the
    device, a layer ahead; rings, sinks and layers of transformers' own stay on the device.
    """

    def __init__(
        self,
        quant: KVQuantConfig | str | Mapping[str, Any] | None = None,
        model: PreTrainedModel | PreTrainedConfig | None = None,
        *,
        kernels: str = "auto",
        offloading: bool = False,
    ) -> None:
        model = known_model(model)
        self.quant, self.kernels = KVQuantConfig.parse(quant), kernels
        self.calibration: Calibration | None = None
        source = source_of(self.quant, model)
        if model is None:
            if self.quant.protected_first or self.quant.protected_last:
                raise ValueError("protected layers need the model: TightCache(quant, model=model)")
            self.shared = SharedSteps(self.quant, offloading=offloading, watch=True)
            # Not a method of this cache, which would then live until garbage is collected.
            new_layer = partial(TightLayer, self.shared, LayerFit(self.quant), self.kernels)
            super().__init__(layer_class_to_replicate=new_layer)
        else:
            config = model.config if isinstance(model, PreTrainedModel) else model
            layers, compressible = plain_layers(config)
            found = fit(source, self.quant, compressible)
            warn_once(source, found)
            self.quant, self.calibration = found.cfg, found.calibration
            watch = not found.checked
            self.shared = SharedSteps(self.quant, offloading=offloading, watch=watch)
            for number, own in found.layers.items():
                if own.cfg.compresses:
                    layers[number] = self._new_layer(own, layers[number])
            super().__init__(layers=layers)
        self.offloading = offloading  # not transformers' kind, which moves layers too early
        self._weights: WeightsSample | str = ""
        if isinstance(model, PreTrainedModel):
            self._weights = WeightsSample(model)

    @property
    def weights(self) -> str:
        """The mark of the weights that the model had when this cache was made, if it is known."""
        if isinstance(self._weights, WeightsSample):
            self._weights = self._weights.mark()
        return self._weights

    def _new_layer(self, own: LayerFit, instead_of: Any = None) -> TightLayer:
        if isinstance(instead_of, LinearAttentionAndFullAttentionLayer):
            states = instead_of.number_of_states
            return TightHybridLayer(self.shared, own, self.kernels, number_of_states=states)
        return TightLayer(self.shared, own, self.kernels)

    # --- a forward pass ---
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new tokens; see `Cache.update`."""
        if self.layer_class_to_replicate is not None:
            while len(self.layers) <= layer_idx:
                number = len(self.layers)
                own = LayerFit(self.quant.for_layer(number, number + 1))
                self.layers.append(self._new_layer(own) if own.cfg.compresses else DynamicLayer())
        self._check_update(key_states, layer_idx)
        if self.offloading:
            self.prefetch(layer_idx + 1)
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def _check_update(self, key_states: Tensor, layer_idx: int) -> None:
        """Refuse tokens that do not go with those of the compressed layers."""
        layer = self.layers[layer_idx]
        if isinstance(layer, TightLayer):
            if layer.step == self.shared.steps and layer.kv is not None:
                # Before the table moves on, every layer must have written what came before.
                lengths = {x.get_seq_length() for x in self._used}
                if layer.get_seq_length() != min(lengths):
                    raise RuntimeError(DIFFERENT_TOKENS)
                if len(lengths) == 1:
                    self._commit()
            return
        used = [i for i, x in enumerate(self.layers) if isinstance(x, TightLayer) and x.kv]
        if not used:
            return
        tight, rows = self.layers[used[0]], len(self.shared.table)
        if key_states.shape[0] != rows or key_states.dtype != tight.dtype:
            raise ValueError(
                f"layer {layer_idx} gets {key_states.shape[0]} rows of {key_states.dtype}; this "
                f"cache holds {rows} of {tight.dtype}. Use a new TightCache, or "
                "reset() this one, for another model or batch"
            )
        ahead = key_states.shape[2] if layer_idx > used[0] else 0
        if layer.get_seq_length() + ahead != tight.get_seq_length():
            raise RuntimeError(DIFFERENT_TOKENS)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Begin to bring the pages of the next compressed layer from `layer_idx` on."""
        for layer in (*self.layers[layer_idx:], *self.layers[: max(layer_idx - 1, 0)]):
            if isinstance(layer, TightLayer):
                layer.prefetch()
                return

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Give the device memory of a layer's pages to the next layer."""
        if isinstance(self.layers[layer_idx], TightLayer):
            self.layers[layer_idx].offload()

    # --- the layers together: each change is made in all of them or in none ---
    @property
    def tight_layers(self) -> list[TightLayer]:
        return [layer for layer in self.layers if isinstance(layer, TightLayer)]

    @property
    def _used(self) -> list[TightLayer]:
        """Compressed layers that hold tokens, or had some."""
        return [layer for layer in self.tight_layers if layer.kv is not None]

    @property
    def _rows(self) -> int:
        """Sequences in the batch; those of other layers where none is compressed."""
        plain = (getattr(layer, "keys", None) for layer in self.layers)
        return len(self.shared.table) or max((len(x) for x in plain if x is not None), default=0)

    @property
    def _other_layers(self) -> list[Any]:
        """Layers with states that transformers keeps, the linear part of hybrid layers included."""
        return [layer for layer in self.layers if type(layer) is not TightLayer]

    def _commit(self) -> None:
        """Write what is pending, and refuse to go on if a forward pass was interrupted."""
        for layer in self.tight_layers:
            layer.commit()
        if len({layer.length for layer in self._used}) > 1:
            raise RuntimeError(DIFFERENT_TOKENS)

    def _select(self, rows: Sequence[int]) -> None:
        self._commit()
        if bad := [row for row in rows if not 0 <= row < self._rows]:
            raise ValueError(
                f"rows {bad} of {list(rows)}; this cache has rows 0 to {self._rows - 1}"
            )
        if not rows and self._rows:  # without a sequence no layer has a length
            self.reset()
            return
        with other_layers.all_or_none(self._other_layers):
            for layer in self._other_layers:
                layer.reorder_cache(torch.tensor(rows, dtype=torch.long, device="cpu"))
        if len(self.shared.table):
            self.shared.table.select(rows)
        for tight in self._used:
            assert tight.kv is not None
            tight.kv.select(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was. Pages are shared, not copied."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._select(torch.arange(self._rows, device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if repeats < 1:
            raise ValueError(f"repeats={repeats}; it must be at least 1")
        self._select([row for row in range(self._rows) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop -tokens_to_remove newest tokens; a positive number is the length to keep."""
        table, used = self.shared.table, self._used
        # Layers of linear attention alone do not know how many tokens they have seen.
        counting = used or [layer for layer in self.layers if hasattr(layer, "keys")]
        lengths = [layer.get_seq_length() for layer in counting]
        total, shortest = max(lengths, default=0), min(lengths, default=0)
        # some versions of transformers give a tensor
        tokens_to_remove = operator.index(tokens_to_remove)
        keep = tokens_to_remove if tokens_to_remove > 0 else total + tokens_to_remove
        keep = max(0, min(keep, total))
        if keep > shortest:
            raise RuntimeError(f"{DIFFERENT_TOKENS}: every layer holds {shortest} tokens")
        for tight in used:
            if keep > tight.length:
                tight.commit()
            elif keep and tight.step < self.shared.steps:
                tight.catch_up()
        with other_layers.all_or_none(self._other_layers):
            for i, layer in enumerate(self.layers):
                if type(layer) is not TightLayer:
                    other_layers.crop(layer, i, keep, total - keep)
        for row in range(len(table)):
            table.crop(row, keep)
        for tight in self.tight_layers:
            tight.drop_pending()
            # A layer that has never been used has no tokens to go on from.
            if tight.kv is not None or not keep:
                tight.length, tight.step = keep, self.shared.steps

    def reset(self) -> None:
        """Forget all tokens; another text or batch may follow.

        The bits of each layer and the scales of its keys stay, so another model should have a new
        cache: a warning tells if its keys need more bits.
        """
        self.shared.reset()
        self.shared.watch = bool(self.quant.protect_keys)
        self._weights = ""
        for layer in self.layers:
            layer.reset()
            if isinstance(layer, LinearAttentionLayer):
                other_layers.forget_states(layer)

    # --- files ---
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file that `load` reads back exactly."""
        self._commit()
        grows = self.layer_class_to_replicate is not None
        quant = self.quant.replace(calibration="")  # pages are read without it
        save_cache(path, quant, self.shared.table, self.layers, grows=grows, weights=self.weights)

    @classmethod
    @lasting
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | PreTrainedConfig | None = None,
        *,
        device: torch.device | str | None = None,
        kernels: str = "auto",
        offloading: bool = False,
        calibration: str = "",
    ) -> TightCache:
        """A saved cache, ready to go on. With `model`, a file of another model is refused.

        It goes to `device`: the model's unless given, else the CPU; with `offloading` its pages
        stay in host memory. Keys of tokens to come are coded in the metrics of a `calibration`;
        files do not name one.
        """
        model = known_model(model)
        if device is None:
            device = model.device if isinstance(model, PreTrainedModel) else "cpu"
        saved = read_cache(path)
        quant = saved.header.quant
        if model is not None:
            saved.check_model(model)
        if model is None or saved.header.grows:
            plain = quant.replace(protected_first=0, protected_last=0)
            cache = cls(plain, kernels=kernels, offloading=offloading)
            cache.quant = quant
        else:  # its layers have the bits they were written with
            config = model.config if isinstance(model, PreTrainedModel) else model
            cache = cls(quant, config, kernels=kernels, offloading=offloading)
        cache.layers = saved.make_layers(
            cache.shared, kernels, torch.device(device), expected=cache.layers
        )
        saved.check_weights(model)
        cache._weights = saved.weights
        asked = quant.replace(calibration=calibration)
        if (source := source_of(asked, model)) is not None:
            tight = {n: x for n, x in enumerate(cache.layers) if isinstance(x, TightLayer)}
            held = {n: LayerFit(layer.cfg, scale=layer.scale) for n, layer in tight.items()}
            found = refit(source, asked, held)
            warn_once(source, found)
            cache.calibration = found.calibration
            for n, own in found.layers.items():
                tight[n].use_metric(own.metric)
        saved.append_whole_rows(cache.shared.table, cache.layers)
        return cache

    # --- what it holds ---
    def bytes_used(self) -> dict[str, int]:
        """Bytes the compressed layers hold now, and what 16-bit keys and values would hold."""
        self._commit()
        size = cache_size(self.tight_layers)
        return {"compressed": size.bytes, "bf16": size.bf16_bytes}
