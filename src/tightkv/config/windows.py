"""Which sliding windows the vLLM plugin compresses; not a property of a page, so not a field."""

from typing import Any

Windows = bool | int
"""False: no window; True: windows that become smaller; N: windows of at least N tokens."""


def is_windows(given: Any) -> bool:
    return type(given) is bool or (type(given) is int and given >= 1)
