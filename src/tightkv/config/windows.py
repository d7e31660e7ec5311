"""Which sliding windows the vLLM plugin compresses; not a property of a page, so not a field."""

from __future__ import annotations

from typing import Any

Windows = bool | int
"""None of them, those that become smaller, or those of at least so many tokens."""


def is_windows(given: Any) -> bool:
    return type(given) is bool or (type(given) is int and given >= 1)
