"""Names that other servers' configs use for options of the cache (docs/config.md)."""

from collections.abc import Mapping
from typing import Any

SWITCH = "enabled"
WINDOW = "residual_window"
PROTECTED = "protected_layers"
ALIASES = (SWITCH, WINDOW, PROTECTED)
_FIELDS_OF_PROTECTED = ("protected_first", "protected_last")


def expand(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, checked, with protected_layers written as fields.

    residual_window stays: how many pages it is depends on page_size, which another source may set.
    """
    left = dict(options)
    if SWITCH in left and type(left[SWITCH]) is not bool:
        raise ValueError(f"{SWITCH}={left[SWITCH]!r}; it must be true or false")
    if WINDOW in left:
        _check_count(WINDOW, left[WINDOW], "of newest tokens that stay exact")
        _refuse_both(left, WINDOW, ("exact_pages",))
    if PROTECTED in left:
        _refuse_both(left, PROTECTED, _FIELDS_OF_PROTECTED)
        count = left.pop(PROTECTED)
        _check_count(
            PROTECTED, count, "of layers at each end; name single layers with layer_bits, '0=k8v8'"
        )
        left |= dict.fromkeys(_FIELDS_OF_PROTECTED, count)
    return left


def overlay(options: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` over `options`. Whoever sets anything switches a cache on that was switched off."""
    gone = {SWITCH} if given else set()
    gone |= {WINDOW} if "exact_pages" in given else set()
    gone |= {"exact_pages"} if WINDOW in given else set()
    return {name: value for name, value in options.items() if name not in gone} | dict(given)


def pages_of(window: int, page_size: int) -> int:
    """Pages that hold the `window` newest tokens however full the open one is."""
    return -(-window // page_size) + 1


def _check_count(name: str, value: object, what: str) -> None:
    if type(value) is not int or value < 0:
        raise ValueError(f"{name}={value!r}; it must be a count {what}")


def _refuse_both(options: Mapping[str, Any], alias: str, fields: tuple[str, ...]) -> None:
    for field in fields:
        if field in options:
            raise ValueError(f"{alias!r} and {field!r} set the same option; keep one of them")
