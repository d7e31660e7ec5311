"""Models that compute attention in their own code, whatever implementation is asked for."""

import sys
from functools import lru_cache
from typing import Any

from transformers import PreTrainedConfig

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
    # The module of PreTrainedConfig itself says nothing of a model.
    for module in [base.__module__ for base in bases if base is not PreTrainedConfig]:
        for name in (module.replace("configuration_", "modeling_"), module):
            calls = _calls_interface(name) if name in sys.modules else None
            if calls is not None:
                return not calls
    return True


@lru_cache
def _calls_interface(name: str) -> bool | None:
    """Whether models of a module that is imported do; None of one that has no models."""
    names = vars(sys.modules[name])
    if _INTERFACE in names:
        return not any(other.endswith(_TABLES) for other in names)
    return False if "modeling_" in name else None
