"""A cache to one file, and SavedCache: a file, read once and checked before any of it is used.

A short mark of the weights tells which model it is from.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.files.atomic import whole_file
from tightkv.files.tensor_file import checksum, read_file
from tightkv.fit import LayerFit
from tightkv.integrations.transformers.layer import TightHybridLayer, TightLayer
from tightkv.integrations.transformers.saving.header import (
    ROW_FIELDS,
    Header,
    SavedLayer,
    parse_header,
)
from tightkv.integrations.transformers.saving.states import PLAIN_KINDS, StateReader, write_state
from tightkv.integrations.transformers.steps import SharedSteps
from tightkv.math.centers import Centers
from tightkv.math.key_scale import KeyScale
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceState, SequenceTable
from tightkv.pages.layout import PageLayout

KV_TENSORS = ("pages", "ring_key", "ring_value", "sink_key", "sink_value", "ring_scales")
CENTER_TENSORS = ("center_key", "center_value")  # which the layer's tokens are relative to
SCALE_TENSOR = "key_scale"  # by which the layer's keys are divided
_NUMBERS = 8  # of a parameter, at most, in a mark of weights
_MOST = 128  # parameters of an early mark
_EVERY = "all-"  # begins a mark of all parameters; those of files before have none
_TOGETHER = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that torch.cat takes together


@dataclass(frozen=True)
class SavedCache:
    """A file's header, checked, and its tensors, which are checked when layers are made of them."""

    path: str
    header: Header
    tensors: dict[str, Tensor] = field(repr=False)
    weights: str = ""

    def check_model(self, model: PreTrainedModel | PreTrainedConfig) -> None:
        """Refuse a file whose compressed layers have another shape than the model's."""
        layouts = [layer.layout for layer in self.header.layers if layer.layout is not None]
        shapes = {(layout.num_kv_heads, layout.head_dim) for layout in layouts}
        config = model.config if isinstance(model, PreTrainedModel) else model
        possible = [
            (
                getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
                getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
            )
            for layer in config.get_text_config(decoder=True).per_layer_config
        ]
        if shapes and not shapes & set(possible):
            raise ValueError(
                f"{self.path} holds layers of (KV heads, head_dim) {sorted(shapes)}; this model "
                f"has {possible[0]}. Load it with the model it is from"
            )

    def check_weights(self, model: PreTrainedModel | PreTrainedConfig | None) -> None:
        """Refuse a file of a model with other weights, as far as both are known."""
        if not isinstance(model, PreTrainedModel):
            return
        if not self.weights:
            warnings.warn(
                f"{self.path} does not say which weights it is from (its cache was made without "
                "the model, or reset), so this model's are not compared",
                stacklevel=4,
            )
            return
        own = WeightsSample(model, like=self.weights).mark()
        if self.weights != own:
            raise ValueError(
                f"{self.path} was saved with other weights (mark {self.weights[:20]!r}) than this "
                f"model's ({own!r}). Load it with the model it is from"
            )

    def make_layers(
        self, shared: SharedSteps, kernels: str, device: torch.device, expected: list[Any]
    ) -> list[Any]:
        """Layers of a new cache with this table, which takes the rows (`append_whole_rows`).

        `expected`: the empty layers that the cache has for its model, or none.
        """
        try:
            own = self._tensors_by_layer()
            whole = _whole_rows(shared.table, self.header.rows)
            rows = [
                SequenceState(left_pad=row.left_pad) if i in whole else row
                for i, row in enumerate(self.header.rows)
            ]
            shared.table.restore(rows)
            layers = [
                self._layer(saved, own[i], shared, kernels, device)
                for i, saved in enumerate(self.header.layers)
            ]
            for _, kv in _tight(layers) if whole else ():
                held = kv.ring_key.shape[1]
                if held < self.header.length:
                    raise ValueError(f"a ring of {held} tokens, and rows of {self.header.length}")
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None
        if expected:
            self._compare(layers, expected)
        return layers

    def append_whole_rows(self, table: SequenceTable, layers: list[Any]) -> None:
        """Append the rows that `make_layers` left empty, whose rings have all tokens.

        Layers code the pages of these in their metrics, so they have them before.
        """
        rows = _whole_rows(table, self.header.rows)
        if not rows:
            return
        length = self.header.length
        plan = table.append(rows, [length] * len(rows))
        for layer, kv in _tight(layers):
            try:
                kv.append(plan, kv.ring_key[rows, :length], kv.ring_value[rows, :length])
            except ValueError as error:  # numbers that the config refuses
                raise ValueError(f"{self.path}: {error}") from None
            layer.offload()

    def _tensors_by_layer(self) -> list[dict[str, Tensor]]:
        """The tensors of each layer, without the "layers.0." that their names begin with."""
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
        known = (*KV_TENSORS, *CENTER_TENSORS, SCALE_TENSOR) if saved.cfg else ()
        pages = {name: tensors.pop(name) for name in known if name in tensors}
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
            options = {} if state is None else state.options(TightHybridLayer)
            layer = _tight_layer(saved, pages, shared, kernels, device, **options)
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


class WeightsSample:
    """The first numbers of all parameters as they are now, copied on their devices.

    The mark is computed when it is asked for, so that a cache which is never saved waits for no
    device. Parameters that are elsewhere (offloaded, spread over ranks) are left out.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, like: str = _EVERY) -> None:
        """For a mark of the kind that `like` is."""
        found = [
            (name, x)
            for name, x in model.named_parameters()
            if type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta and x.numel()
        ]
        self._prefix = _EVERY if like.startswith(_EVERY) else ""
        step = 1 if self._prefix else -(-len(found) // _MOST) or 1
        self._names = "".join(name for name, _ in found[::step])
        by_device = dict[torch.device, list[Tensor]]()
        for _, x in found[::step]:
            count, stride = (x.size(-1), x.stride(-1)) if x.dim() else (1, 1)
            first = x.as_strided((min(_NUMBERS, count),), (stride,))  # x[0, ..., 0, :_NUMBERS]
            if x.dtype not in _TOGETHER:
                first = first.bfloat16()
            by_device.setdefault(x.device, []).append(first)
        self._numbers = [torch.cat(numbers).bfloat16() for numbers in by_device.values()]

    def mark(self) -> str:
        """Numbers count as bfloat16: the same weights in float32 have this mark."""
        digest = hashlib.sha256(self._names.encode())
        for numbers in self._numbers:
            digest.update(numbers.float().cpu().numpy().tobytes())
        return self._prefix + digest.hexdigest()[:16]


def read_cache(path: str | os.PathLike[str]) -> SavedCache:
    """Read a file that TightCache.save wrote; ValueError where it is damaged or not such a file."""
    metadata, tensors = read_file(path)
    text = metadata.get("tightkv")
    if text is None:
        raise ValueError(f"{path} is a safetensors file, but not one that TightCache.save wrote")
    weights = metadata.get("weights", "")  # the mark of the model's, if it was known
    if metadata.get("checksum") != checksum(text + weights, tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    try:
        header = parse_header(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return SavedCache(os.fspath(path), header, tensors, weights)


def _tight_layer(
    saved: SavedLayer,
    tensors: dict[str, Tensor],
    shared: SharedSteps,
    kernels: str,
    device: torch.device,
    **options: int,
) -> TightLayer:
    """A compressed layer with its pages; `options` are those of a hybrid one's other half."""
    assert saved.cfg is not None
    cls = TightHybridLayer if saved.state is not None else TightLayer
    if saved.layout is None or saved.dtype is None:
        if tensors:
            raise ValueError(f"tensor {next(iter(tensors))!r} of a layer, but there are no rows")
        return cls(shared, LayerFit(saved.cfg), kernels, **options)
    centers = _per_head(saved.layout, tensors, "centers", CENTER_TENSORS)
    scale = _per_head(saved.layout, tensors, "the key scale", (SCALE_TENSOR,))
    found_scale = KeyScale(*scale) if scale else None
    fit = LayerFit(saved.cfg, None, found_scale, Centers(*centers) if centers else None)
    layer = cls(shared, fit, kernels, **options)
    kv = layer.use(saved.layout.num_kv_heads, saved.layout.head_dim, saved.dtype, device)
    if shared.buffers is not None:  # pages of one layer at a time are on the device
        kv.offload(shared.buffers)
    for name, shape in _shapes(kv.layout, kv.table, tensors).items():
        found = tensors.get(name)
        own = getattr(kv, name).dtype
        # Files of float32 models may have float32 rings and sinks.
        dtypes = (own, saved.dtype) if own == kv.layout.dtype else (own,)
        if found is None or found.dtype not in dtypes or found.shape != shape:
            there = None if found is None else (found.dtype, tuple(found.shape))
            raise ValueError(
                f"tensor {name!r} of a layer is {there}; its config and the rows give "
                f"{(dtypes[0], shape)}"
            )
        found = found.to(device)
        setattr(kv, name, kv.exact(found) if own == kv.layout.dtype else found)
    return layer


def _whole_rows(table: SequenceTable, rows: Sequence[SequenceState]) -> list[int]:
    """Rows whose ring of 16 bits has all tokens, in files of before too long for one."""
    if table.window_step != table.page_size:  # 8 bits
        return []
    return [i for i, row in enumerate(rows) if _is_whole(table, row)]


def _is_whole(table: SequenceTable, row: SequenceState) -> bool:
    elsewhere = row.pages or row.ring_valid_from or row.ring_read_from
    sinks = min(table.sinks, max(0, row.length - row.left_pad))
    return row.length > 0 and not elsewhere and row.sink_count <= sinks


def _tight(layers: Sequence[Any]) -> list[tuple[TightLayer, PagedKV]]:
    return [(x, x.kv) for x in layers if isinstance(x, TightLayer) and x.kv is not None]


def _per_head(
    layout: PageLayout, tensors: dict[str, Tensor], what: str, names: tuple[str, ...]
) -> list[Tensor]:
    """The tensors of these names, [KV heads, head_dim] each: all of them, or none."""
    found = [tensors[name] for name in names if name in tensors]
    wanted = (torch.bfloat16, (layout.num_kv_heads, layout.head_dim))
    told = [(x.dtype, tuple(x.shape)) for x in found]
    if found and told != [wanted] * len(names):
        raise ValueError(
            f"{what} of a layer is {told}; its config gives bfloat16 {wanted[1]} for each of "
            f"{', '.join(names)}"
        )
    return found


def _shapes(
    layout: PageLayout, table: SequenceTable, tensors: dict[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's tensors. Rings may be longer than the rows need."""
    rows, heads, dim = len(table), layout.num_kv_heads, layout.head_dim
    least = max([1, *(row.length - row.ring_valid_from for row in table.rows)])
    ring = tensors.get("ring_key")
    slots = least if ring is None or ring.dim() < 2 else max(least, ring.shape[1])
    sinks = layout.cfg.sinks
    if not any(row.sink_count for row in table.rows) and "sink_key" in tensors:
        sinks = sinks if tensors["sink_key"].shape[1:2] == (sinks,) else 0
    key = (rows, slots, heads, layout.ring_key_dim)
    exact = [key, *((rows, n, heads, dim) for n in (slots, sinks, sinks))]
    scales = [(rows, slots, heads, 2)] if layout.cfg.window_bits == 8 else []
    shapes = (table.num_pages, heads, layout.record_bytes), *exact, *scales
    return dict(zip(KV_TENSORS, shapes, strict=False))


# --- writing ---
def save_cache(
    path: str | os.PathLike[str],
    quant: KVQuantConfig,
    table: SequenceTable,
    layers: list[Any],
    *,
    grows: bool,
    weights: str,
) -> None:
    """Write the whole cache; the file appears complete or not at all.

    `weights`: the mark of the model's, if it is known.
    """
    used = sorted({page for row in table.rows for page in row.pages})
    place = {page: i for i, page in enumerate(used)}
    tensors: dict[str, Tensor] = {}
    header = {
        "format_version": FORMAT_VERSION,
        "quant": quant.to_dict(),
        "fingerprint": quant.fingerprint(),
        "grows": grows,
        "rows": [
            {
                **{name: getattr(row, own) for name, own in ROW_FIELDS.items()},
                "pages": [place[page] for page in row.pages],
            }
            for row in table.rows
        ],
        "layers": [_layer(layer, f"layers.{i}.", used, tensors) for i, layer in enumerate(layers)],
    }
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    text = json.dumps(header, sort_keys=True)
    _check(quant, text, tensors)
    metadata = {"tightkv": text, "checksum": checksum(text + weights, tensors)}
    if weights:
        metadata["weights"] = weights
    with whole_file(path, mode=0o600) as temporary:  # a cache tells what was asked
        save_file(tensors, temporary, metadata)


def _check(quant: KVQuantConfig, text: str, tensors: dict[str, Tensor]) -> None:
    """Raise if what would be written could not be read."""
    try:
        saved = SavedCache("it", parse_header(text), tensors)
        saved.make_layers(SharedSteps(quant), "auto", torch.device("cpu"), [])
    except ValueError as error:
        raise ValueError(f"this cache cannot be saved: {error}") from None


def _layer(layer: Any, prefix: str, used: list[int], tensors: dict[str, Tensor]) -> dict[str, Any]:
    entry: dict[str, Any] = {"kind": type(layer).__name__}
    if isinstance(layer, TightLayer):
        entry["tight"] = {"length": 0, "quant": layer.cfg.to_dict(), "layout": None}
        if layer.kv is not None and len(layer.shared.table):
            kv = layer.kv
            heads, dim = kv.layout.num_kv_heads, kv.layout.head_dim
            entry["tight"]["length"] = layer.length
            entry["tight"]["layout"] = [heads, dim, str(layer.dtype)]
            index = torch.tensor(used, dtype=torch.long, device=kv.device)
            tensors[f"{prefix}pages"] = kv.pages[index].cpu()
            layer.offload()  # before the next layer's pages come to the device
            for name in kv.exact_names:
                tensors[prefix + name] = getattr(kv, name)
            if layer.centers is not None:
                centers = layer.centers.key, layer.centers.value
                for name, center in zip(CENTER_TENSORS, centers, strict=True):
                    tensors[prefix + name] = center.bfloat16()
            if layer.scale is not None:
                tensors[prefix + SCALE_TENSOR] = layer.scale.value.bfloat16()
    if type(layer) is not TightLayer:
        entry["state"] = write_state(layer, f"{prefix}state.", tensors)
    return entry
