"""States of transformers' own cache layers, to and from a file.

A state has the attributes that a new layer of its kind has, neither more nor fewer: plain values in
the header, tensors beside it. What each may be is said here.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

from tightkv.files.strict_json import Field, short
from tightkv.fit import LayerFit
from tightkv.integrations.transformers.fitting import KINDS
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.pages.layout import MAX_TOKENS

DTYPES = {str(d): d for d in (torch.float32, torch.float16, torch.bfloat16)}
# The layers of a DynamicCache that TightCache leaves as they are.
PLAIN_KINDS = {kind.__name__: kind for kind in KINDS}
_MAX_STATES = 64
_LATER = {"dtype", "device"}  # attention gets them with its first tokens


# --- writing ---
def write_state(layer: Any, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Attributes of a layer, or of the linear half of a hybrid one: tensors into `tensors`."""
    entries: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name in _not_state(layer):
            continue
        if isinstance(value, Tensor):
            tensors[prefix + name] = value
        elif isinstance(value, dict):
            parts = {key: item for key, item in value.items() if isinstance(item, Tensor)}
            tensors |= {f"{prefix}{name}.{key}": item for key, item in parts.items()}
            entries[name] = {str(k): None if k in parts else v for k, v in value.items()}
        elif isinstance(value, torch.dtype | torch.device):
            entries[name] = str(value) if isinstance(value, torch.dtype) else "device"
        elif value is None or isinstance(value, int | float | str):
            entries[name] = value
        else:
            raise ValueError(f"cannot save {type(layer).__name__}.{name}, a {type(value).__name__}")
    return entries


def _not_state(layer: Any) -> set[str]:
    """Attributes of a layer that are no state: those of a hybrid layer's compressed half."""
    if not isinstance(layer, TightLayer):
        return set()
    return set(vars(TightLayer(layer.shared, LayerFit(layer.cfg)))) - _LATER


# --- reading ---
class StateReader:
    """One layer's state in a header and its tensors, of `rows` sequences of `length` tokens.

    Without rows (no layer is compressed, or the cache is empty) both are what the layer says.
    """

    def __init__(self, state: Field, tensors: dict[str, Tensor], rows: int, length: int) -> None:
        self.where, self.fields = state.where, state.record_of_any()
        self.tensors = dict(tensors)  # those that were not asked for yet
        self.rows, self.length = rows, length

    def options(self, kind: type) -> dict[str, int]:
        """What a new layer of this kind is made with."""
        options = {}
        if issubclass(kind, cache_utils.LinearAttentionLayer):
            options["number_of_states"] = self._field("number_of_states").integer(1, _MAX_STATES)
        if issubclass(kind, cache_utils.DynamicSlidingWindowLayer):
            options["sliding_window"] = self._field("sliding_window").integer(1, MAX_TOKENS)
        return options

    def fill(self, layer: Any, device: torch.device) -> None:
        """Give a new layer its state. A hybrid layer has its pages already."""
        kind, own = type(layer).__name__, set(vars(layer)) - _not_state(layer)
        given = set(self.fields) | {name for name in self.tensors if "." not in name}
        if given - _LATER != own - _LATER:
            odd = sorted((given ^ own) - _LATER)
            raise ValueError(f"{self.where} has not the attributes of a {kind}: {short(odd)}")
        values = {name: self._value(name, getattr(layer, name)) for name in sorted(own - _LATER)}
        dtype = self._field("dtype").value and DTYPES[self._field("dtype").one_of(*DTYPES)]
        there = self._field("device").value and self._field("device").one_of("device")
        if self.tensors or (dtype is None) != (there is None):
            names = ["dtype without device or the reverse", *self.tensors][-1]
            raise ValueError(f"{self.where} has {short(names)}, which a {kind} does not have")
        if "keys" in values:
            self._check_attention(values, dtype)
        if "conv_states" in values:
            self._check_linear(values)
        if dtype is not None and not (isinstance(layer, TightLayer) and layer.kv is not None):
            layer.dtype, layer.device = dtype, device
        for name, value in values.items():
            setattr(layer, name, _to(value, device))

    def _field(self, name: str) -> Field:
        return self.fields.get(name, Field(None, f"{self.where}.{name}"))

    def _value(self, name: str, fresh: Any) -> Any:
        field = self._field(name)
        if name in ("is_initialized", "record_past"):
            return field.boolean()
        if name in ("number_of_states", "sliding_window"):
            return field.integer(fresh, fresh)
        if name == "cumulative_length":
            return field.integer(0, MAX_TOKENS)
        if name == "_sliding_window_tensor":
            tensor = self.tensors.pop(name, None)
            if tensor is None or tensor.dtype != fresh.dtype or not torch.equal(tensor, fresh):
                raise field.wrong(f"a tensor that is {fresh.item()}")
            return fresh
        if name in ("keys", "values"):
            return self._state(name, field, rank=4)
        if isinstance(fresh, dict):
            items = field.record(*map(str, fresh))
            return {int(i): self._value_of_one(name, items[i], i) for i in items}
        raise ValueError(f"{field.where} is an attribute that this tightkv does not know")

    def _value_of_one(self, name: str, field: Field, i: str) -> Any:
        if name == "conv_kernel_size":
            return None if field.value is None else field.integer(1, MAX_TOKENS)
        if name in ("conv_states", "recurrent_states"):
            return self._state(f"{name}.{i}", field)
        return field.boolean()  # is_conv_states_initialized and the like

    def _state(self, name: str, field: Field, rank: int | None = None) -> Tensor | None:
        """A tensor whose first dimension is rows, or None."""
        tensor = self.tensors.pop(name, None)
        if field.value is not None:
            raise field.wrong("null, or a tensor of that name")
        if tensor is not None:
            if tensor.dtype not in DTYPES.values():
                raise self._wrong(name, tensor, ", ".join(DTYPES))
            if tensor.dim() != rank if rank else tensor.dim() < 2:
                raise self._wrong(name, tensor, f"{rank or '2 or more'} dimensions")
            if 0 in (*tensor.shape[:2], tensor.shape[-1]) or (
                self.rows and tensor.shape[0] != self.rows
            ):
                raise self._wrong(name, tensor, f"first {self.rows}, the rows, and no other 0")
        return tensor

    # --- what goes together ---
    def _check_attention(self, values: dict[str, Any], dtype: torch.dtype | None) -> None:
        """Keys and values [rows, heads, tokens, dim] of all tokens, or of a window."""
        key, value, there = values["keys"], values["values"], values["is_initialized"]
        if self.rows and not there:
            raise self._field("is_initialized").wrong(f"true, for there are {self.rows} rows")
        if {there, key is not None, value is not None} != {there} or (there and dtype is None):
            raise self._field("is_initialized").wrong("whether there are keys, values and dtype")
        tokens = values.get("cumulative_length", key.shape[2]) if there else 0
        tokens = self.length if self.rows else tokens
        if values.get("cumulative_length", tokens) != tokens:
            raise self._field("cumulative_length").wrong(f"{tokens}, as rows and keys have")
        if not there:
            return
        least, most = _tokens_held(values, tokens)
        if key.dtype != dtype or not least <= key.shape[2] <= most:
            raise self._wrong("keys", key, f"{dtype}, {least} to {most} tokens")
        if value.dtype != dtype or value.shape[:3] != key.shape[:3]:
            raise self._wrong("values", value, f"{dtype}, {list(key.shape[:3])} as keys")

    def _check_linear(self, values: dict[str, Any]) -> None:
        for i, conv in values["conv_states"].items():
            kernel, recurrent = values["conv_kernel_size"][i], values["recurrent_states"][i]
            has_previous = values["has_previous_state"][i]
            for name, found, allowed in (
                ("is_conv_states_initialized", None, conv is not None),
                ("is_recurrent_states_initialized", None, recurrent is not None),
                ("has_previous_state", has_previous, has_previous and conv is not None),
                ("conv_kernel_size", kernel is not None, conv is not None),
            ):
                if (values[name][i] if found is None else found) != allowed:
                    raise ValueError(
                        f"{self.where}.{name}.{i}={values[name][i]}, but there are "
                        f"{'' if allowed else 'no '}states of that kind"
                    )
            if conv is not None and not values["record_past"] and conv.shape[-1] != kernel:
                raise self._wrong(f"conv_states.{i}", conv, f"a last dimension of {kernel}")

    def _wrong(self, name: str, tensor: Tensor, allowed: str) -> ValueError:
        return ValueError(
            f"{self.where}.{name} is {tensor.dtype} {list(tensor.shape)}; allowed: {allowed}"
        )


def _tokens_held(values: dict[str, Any], tokens: int) -> tuple[int, int]:
    """How many of its tokens attention keeps, at least and at most."""
    window = values.get("sliding_window", 1)
    if window == 1:  # transformers keeps a window of 1 whole
        return tokens, tokens
    least = min(tokens, window - 1)
    return least, tokens if values["record_past"] else least


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return {k: _to(v, device) for k, v in value.items()} if isinstance(value, dict) else value
