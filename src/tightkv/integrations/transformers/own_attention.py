"""Models that compute attention in their own code, whatever implementation is asked for."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what models look an implementation up in
_TABLES = "_SELF_ATTENTION_CLASSES"  # attention classes by implementation, without others


def has_own_attention(config: Any) -> bool:
    """Whether the model of this config does not call the implementation (CodeGen, BLOOM).

    transformers has no such property. A model that calls it has the interface in its module; of
    modules that cannot be found nothing is known, and they count as models that do not.
    """
    if config is None:
        return False
    bases = type(config.get_text_config(decoder=True)).__mro__
    return not _calls_interface(tuple(base.__module__ for base in bases))


@lru_cache
def _calls_interface(modules: tuple[str, ...]) -> bool:
    """`modules`: those of a config's class and of its bases."""
    for own in modules:
        for name in (own.replace("configuration_", "modeling_"), own):
            names = vars(sys.modules[name]) if name in sys.modules else {}
            if _INTERFACE in names:
                return not any(name.endswith(_TABLES) for name in names)
            if name != own and names:
                return False
    return False
