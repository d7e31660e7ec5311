"""A saved cache, read once and checked before any of it is used."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tightkv.cache import PagedKV
from tightkv.integrations.transformers.layer import SharedSteps, TightHybridLayer, TightLayer
from tightkv.integrations.transformers.saving.header import Header, SavedLayer, parse_header
from tightkv.integrations.transformers.saving.states import PLAIN_KINDS, StateReader
from tightkv.layout import PageLayout
from tightkv.tensor_file import checksum, read_file

KV_TENSORS = ("pages", "ring_key", "ring_value", "sink_key", "sink_value")


@dataclass(frozen=True)
class SavedCache:
    """A file's header, checked, and its tensors, which are checked when layers are made of them."""

    path: str
    header: Header
    tensors: dict[str, Tensor] = field(repr=False)

    def check_model(self, model: PreTrainedModel | PreTrainedConfig) -> None:
        """Refuse a file whose compressed layers have another shape than the model's."""
        layouts = [layer.layout for layer in self.header.layers if layer.layout is not None]
        shapes = {(layout.num_kv_heads, layout.head_dim) for layout in layouts}
        possible = _model_shapes(model)
        if shapes and not shapes & set(possible):
            raise ValueError(
                f"{self.path} holds layers of (KV heads, head_dim) {sorted(shapes)}; this model "
                f"has {possible[0]}. Load it with the model it is from"
            )

    def make_layers(
        self, shared: SharedSteps, kernels: str, device: torch.device, expected: list[Any]
    ) -> list[Any]:
        """Layers of a new cache with this table, which takes the rows.

        `expected`: the empty layers that the cache has for its model, or none.
        """
        try:
            own = self._tensors_by_layer()
            shared.table.restore(self.header.rows)
            layers = [
                self._layer(saved, own[i], shared, kernels, device)
                for i, saved in enumerate(self.header.layers)
            ]
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        if expected:
            self._compare(layers, expected)
        return layers

    def _tensors_by_layer(self) -> list[dict[str, Tensor]]:
        """Without the "layers.0." that their names begin with."""
        own: list[dict[str, Tensor]] = [{} for _ in self.header.layers]
        places = {str(i): tensors for i, tensors in enumerate(own)}
        for name, tensor in self.tensors.items():
            prefix, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            if prefix != "layers" or number not in places:
                raise ValueError(f"its tensor {name[:99]!r} is of no layer")
            places[number][rest] = tensor
        return own

    def _layer(
        self,
        saved: SavedLayer,
        tensors: dict[str, Tensor],
        shared: SharedSteps,
        kernels: str,
        device: torch.device,
    ) -> Any:
        pages = {name: tensors.pop(name) for name in KV_TENSORS if saved.cfg and name in tensors}
        state = None
        if saved.state is not None:
            if odd := [name for name in tensors if not name.startswith("state.")]:
                raise ValueError(f"its tensor {odd[0][:99]!r} is no part of {saved.state.where}")
            tensors = {name.removeprefix("state."): tensors[name] for name in tensors}
            state = StateReader(saved.state, tensors, len(shared.table), self.header.length)
        elif tensors:
            raise ValueError(f"its tensor {next(iter(tensors))[:99]!r} is no part of a TightLayer")
        if saved.cfg is None:
            assert state is not None
            kind = PLAIN_KINDS[saved.kind]
            layer = kind(**state.options(kind))
        else:
            options = state.options(TightHybridLayer) if state is not None else {}
            cls: Any = TightLayer if state is None else TightHybridLayer
            layer = cls(shared, saved.cfg, kernels, **options)
            _load_pages(layer, saved.layout, pages, device)
            layer.length = self.header.length
        if state is not None:
            state.fill(layer, device)
        return layer

    def _compare(self, layers: list[Any], expected: list[Any]) -> None:
        """A cache made for a model takes only a file of the same layers."""
        kinds, wanted = [[type(layer).__name__ for layer in x] for x in (layers, expected)]
        if kinds != wanted:
            raise ValueError(
                f"{self.path} holds {len(kinds)} layers ({', '.join(sorted(set(kinds)))}); this "
                f"model has {len(wanted)} ({', '.join(sorted(set(wanted)))}). Load it with the "
                "model it is from"
            )
        for i, (layer, other) in enumerate(zip(layers, expected, strict=True)):
            for name in ("sliding_window", "number_of_states"):
                found, right = (getattr(x, name, None) for x in (layer, other))
                if found != right:
                    raise ValueError(
                        f"{self.path}: layers[{i}].state.{name}={found}; this model has {right}. "
                        "Load it with the model it is from"
                    )


def read_cache(path: str | os.PathLike[str]) -> SavedCache:
    """Read a file that TightCache.save wrote; ValueError where it is damaged or not such a file."""
    metadata, tensors = read_file(path)
    text = metadata.get("tightkv")
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but not one that TightCache.save wrote")
    if metadata.get("checksum") != checksum(text, tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    try:
        return SavedCache(os.fspath(path), parse_header(text), tensors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _load_pages(
    layer: TightLayer, layout: PageLayout | None, tensors: dict[str, Tensor], device: torch.device
) -> None:
    table = layer.shared.table
    wanted = {}
    if layout is not None:
        heads, dim = layout.num_kv_heads, layout.head_dim
        exact = [(len(table), n, heads, dim) for n in (layout.ring_tokens, layout.cfg.sinks)]
        shapes = ((table.num_pages, heads, layout.record_bytes), exact[0], exact[0], *exact[1:] * 2)
        dtypes = (torch.uint8, *[layout.dtype] * 4)
        wanted = dict(zip(KV_TENSORS, zip(dtypes, shapes, strict=True), strict=True))
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    for name in KV_TENSORS:
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"tensor {name!r} of a layer is {found.get(name)}; its config and the rows give "
                f"{wanted.get(name)}"
            )
    if layout is None:
        return
    layer.kv = PagedKV(layout, table, device, layer.kernels)
    layer.dtype, layer.device, layer.is_initialized = layout.dtype, device, True
    for name, tensor in tensors.items():
        setattr(layer.kv, name, tensor.to(device))


def _model_shapes(model: PreTrainedModel | PreTrainedConfig) -> list[tuple[int, int]]:
    """(KV heads, head_dim) of a model's layers, those of other than full attention too."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    config = config.get_text_config(decoder=True)
    shapes = []
    for layer in getattr(config, "per_layer_config", None) or [config]:
        heads = getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads
        dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
        # Before per_layer_config, Gemma 4 told the shape of its full-attention layers so.
        own = getattr(layer, "num_global_key_value_heads", None) or heads
        shapes += [(heads, dim), (own, getattr(layer, "global_head_dim", None) or dim)]
    return shapes
