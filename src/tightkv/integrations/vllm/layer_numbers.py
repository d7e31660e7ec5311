"""Which layer of the model a layer of vLLM is, from its name."""

from __future__ import annotations

from collections.abc import Iterable


def model_layers(names: Iterable[str]) -> dict[str, int]:
    """The number of each layer in the model; -1 where it has none.

    A number that came before is that of a layer of another model, a draft of the first.
    """
    numbers: dict[str, int] = {}
    for name in names:
        number = layer_number(name)
        numbers[name] = -1 if number in numbers.values() else number
    return numbers


def layer_number(name: str) -> int:
    """5 of vLLM's model.layers.5.self_attn.attn; -1 of a name without a number."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)
