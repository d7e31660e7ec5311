"""The fewest bytes whose summed KL stays below a target: bits of each layer's keys and values."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Costs
from tightkv.pages.layout import page_layout

SEARCHED_BITS = (2, 3, 4, 8)
Bits = tuple[int, int]  # of keys and of values


@dataclass(frozen=True)
class Option:
    """One choice for one layer."""

    bits: Bits
    size: float  # bytes per token
    kl: float


def options_of(
    base: KVQuantConfig, shape: tuple[int, int], costs: Costs, least: int = 0
) -> list[Option]:
    """Every choice for a layer of a shape (KV heads, head_dim), keys of `least` bits or more."""
    found = []
    for k, v in product((bits for bits in SEARCHED_BITS if bits >= least), SEARCHED_BITS):
        size = page_layout(base.replace(key_bits=k, value_bits=v), *shape).bytes_per_token
        found.append(Option((k, v), size, costs.key[k] + costs.value[v]))
    return found


def fewest_bytes(layers: Mapping[int, Sequence[Option]], target: float) -> dict[int, Option] | None:
    """An option for each layer; None if even the most accurate ones exceed the target.

    From those on, the step of one layer is taken again and again that saves most bytes per nat,
    as long as one fits into what is left of the target.
    """
    chosen = {n: min(options, key=lambda o: (o.kl, o.size)) for n, options in layers.items()}
    if _kl(chosen) > target:
        return None
    while step := _best_step(layers, chosen, target - _kl(chosen)):
        chosen[step[0]] = step[1]
    return chosen


def least_kl(layers: Mapping[int, Sequence[Option]], size: float) -> dict[int, Option] | None:
    """An option for each layer, together of at most `size` bytes; None if none are so small.

    The dual of `fewest_bytes`: that search with the roles of bytes and KL exchanged.
    """
    turned = {n: [_turned(o) for o in options] for n, options in layers.items()}
    chosen = fewest_bytes(turned, size)
    return None if chosen is None else {n: _turned(o) for n, o in chosen.items()}


def _turned(option: Option) -> Option:
    return Option(option.bits, size=option.kl, kl=option.size)


def _best_step(
    layers: Mapping[int, Sequence[Option]], chosen: Mapping[int, Option], room: float
) -> tuple[int, Option] | None:
    """The change of one layer within the room that saves most bytes per nat."""
    steps = [
        ((now.size - option.size) / max(option.kl - now.kl, 1e-300), n, option)
        for n, now in chosen.items()
        for option in layers[n]
        if option.size < now.size and option.kl - now.kl <= room
    ]
    return max(steps, key=lambda step: step[0])[1:] if steps else None


def _kl(chosen: Mapping[int, Option]) -> float:
    return sum(option.kl for option in chosen.values())


def as_config(family: KVQuantConfig, bits: Mapping[int, Bits]) -> KVQuantConfig:
    """The commonest bits as the config's own, the others as its layer_bits.

    With a calibration at least one layer is named, or its bits would be taken instead.
    """
    common = Counter(bits.values()).most_common(1)[0][0]
    other = [n for n in bits if bits[n] != common] or [n for n in bits if family.calibration][:1]
    others = ",".join(f"{n}=k{bits[n][0]}v{bits[n][1]}" for n in other)
    return family.replace(
        key_bits=common[0], value_bits=common[1], layer_bits=others, protect_keys=False
    )
