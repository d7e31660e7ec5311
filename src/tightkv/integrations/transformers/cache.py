"""TightCache: transformers' Cache with compressed full-attention layers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers.layer import SharedSteps, TightHybridLayer, TightLayer
from tightkv.integrations.transformers.saving import read_cache, save_cache

_COMPRESSIBLE = (DynamicLayer, LinearAttentionAndFullAttentionLayer)


class TightCache(Cache):  # type: ignore[misc]
    """A drop-in for DynamicCache: `model.generate(**inputs, past_key_values=TightCache(...))`.

    `quant` is a KVQuantConfig, a preset name, JSON or a mapping; None reads TIGHTKV_*.
    `model` (or its config) tells which layers are sliding-window or linear attention: those
    stay transformers' own. Without it every layer is taken for full attention.
    """

    def __init__(
        self,
        quant: KVQuantConfig | str | Mapping[str, Any] | None = None,
        model: PreTrainedModel | PreTrainedConfig | None = None,
        *,
        kernels: str = "auto",
        offloading: bool = False,
    ) -> None:
        self.quant = KVQuantConfig.parse(quant)
        self.kernels = kernels
        self.shared = SharedSteps(self.quant)
        if model is None:
            if self.quant.protected_first or self.quant.protected_last:
                raise ValueError("protected layers need the model: TightCache(quant, model=model)")
            super().__init__(layer_class_to_replicate=self._new_layer, offloading=offloading)
            return
        config = model.config if isinstance(model, PreTrainedModel) else model
        super().__init__(layers=self._layers_of(config), offloading=offloading)

    def _new_layer(self, cfg: KVQuantConfig | None = None, instead_of: Any = None) -> TightLayer:
        cfg = cfg or self.quant
        if isinstance(instead_of, LinearAttentionAndFullAttentionLayer):
            states = getattr(instead_of, "number_of_states", None)
            options = {} if states is None else {"number_of_states": states}
            return TightHybridLayer(self.shared, cfg, self.kernels, **options)
        return TightLayer(self.shared, cfg, self.kernels)

    def _layers_of(self, config: PreTrainedConfig) -> list[Any]:
        text = config.get_text_config(decoder=True)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(
                f"{type(config).__name__} is an encoder-decoder model; TightCache is for decoders"
            )
        if getattr(text, "kv_lora_rank", None):
            raise ValueError(
                f"{type(text).__name__} uses multi-head latent attention, whose cache is already "
                "compressed and has no per-head keys; use DynamicCache"
            )
        layers = DynamicCache(config=config).layers
        full = [i for i, layer in enumerate(layers) if type(layer) in _COMPRESSIBLE]
        if not full:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ValueError(
                f"{type(text).__name__} has no full-attention layer to compress (its cache: "
                f"{kinds}); use DynamicCache"
            )
        for number, i in enumerate(full):
            cfg = self.quant.for_layer(number, len(full))
            if cfg.compresses:
                layers[i] = self._new_layer(cfg, layers[i])
        return layers

    # --- the compressed layers together ---
    @property
    def tight_layers(self) -> list[TightLayer]:
        return [layer for layer in self.layers if isinstance(layer, TightLayer)]

    @property
    def _other_layers(self) -> list[Any]:
        """Layers with states of transformers' own: a hybrid layer's linear part is one."""
        return [layer for layer in self.layers if type(layer) is not TightLayer]

    def _commit(self) -> None:
        for layer in self.tight_layers:
            layer.commit()

    def _select(self, rows: Sequence[int]) -> None:
        self._commit()
        if len(self.shared.table):
            self.shared.table.select(rows)
            for tight in self.tight_layers:
                if tight.kv is not None:
                    tight.kv.select(rows)
        for layer in self._other_layers:
            layer.reorder_cache(torch.tensor(rows))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i goes on from what was row beam_idx[i]. Pages are shared, not copied."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._select(torch.arange(self.batch_size)[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._select([row for row in range(self.batch_size) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Drop -tokens_to_remove newest tokens; a positive number is the length to keep."""
        self._commit()
        lengths = self.shared.table.lengths
        if lengths and tokens_to_remove:
            keep = tokens_to_remove if tokens_to_remove > 0 else lengths[0] + tokens_to_remove
            keep = max(0, min(keep, lengths[0]))
            for row in range(len(lengths)):
                self.shared.table.crop(row, keep)
            for tight in self.tight_layers:
                tight.length, tight.step = min(tight.length, keep), self.shared.steps
        for layer in self._other_layers:
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget everything; another model or batch may use the cache next."""
        self.shared.table.clear()
        super().reset()

    # --- files ---
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file that `load` reads back exactly."""
        self._commit()
        grows = self.layer_class_to_replicate is not None
        save_cache(path, self.quant, self.shared.table, self.layers, grows=grows)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: PreTrainedModel | PreTrainedConfig | None = None,
        *,
        device: torch.device | str | None = None,
        kernels: str = "auto",
    ) -> TightCache:
        """A saved cache, ready to go on. With `model`, a file of another model is refused.

        It goes to `device`: the model's unless given, else the CPU.
        """
        if device is None:
            device = model.device if isinstance(model, PreTrainedModel) else "cpu"
        saved = read_cache(path)
        quant = saved.header.quant
        if model is not None:
            saved.check_model(model)
        if model is None or saved.header.grows:
            cache = cls(quant.replace(protected_first=0, protected_last=0), kernels=kernels)
            cache.quant = quant
        else:
            cache = cls(quant, model, kernels=kernels)
        cache.layers = saved.make_layers(
            cache.shared, kernels, torch.device(device), expected=cache.layers
        )
        return cache

    # --- what it holds ---
    def bytes_used(self) -> dict[str, int]:
        """Bytes the compressed layers hold now, and what 16-bit keys and values would hold."""
        self._commit()
        held = plain = 0
        for layer in self.tight_layers:
            if layer.kv is None:
                continue
            held += layer.kv.allocated_bytes()
            layout = layer.kv.layout
            plain += 4 * layout.num_kv_heads * layout.head_dim * sum(self.shared.table.lengths)
        return {"compressed": held, "bf16": plain}
