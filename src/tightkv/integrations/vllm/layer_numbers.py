"""Which layer of the model a layer of vLLM is, from its name."""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

_DRAFTS = ("mtp", "draft_model")  # what names of a speculator's layers begin with


def model_layers(names: Iterable[str], drafts: Collection[str] = ()) -> dict[str, int]:
    """The number of each layer in the model; -1 where it has none, as the layers of `drafts`.

    A number that came before is that of a layer of another model, a draft of the first.
    """
    numbers: dict[str, int] = {}
    for name in names:
        number = layer_number(name)
        known = name in drafts or number in numbers.values()
        numbers[name] = -1 if known else number
    return numbers


def layer_number(name: str) -> int:
    """5 of vLLM's model.layers.5.self_attn.attn; -1 of a name without a number."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def draft_layers(layers: Mapping[str, Any], vllm_config: Any) -> set[str]:
    """Layers of a speculator's model; their numbers, if they count on, come after the model's."""
    if vllm_config.speculative_config is None:
        return set()
    count = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", math.inf)
    return {
        name
        for name, layer in layers.items()
        if getattr(layer, "is_draft_layer", False)
        or name.split(".")[0] in _DRAFTS
        or layer_number(name) >= count
    }
