"""A compressed cache for Hugging Face transformers.

Importing this package registers the attention implementation "tightkv" through
transformers' own interfaces; no transformers code is changed.
"""

from __future__ import annotations

from tightkv.extras import install_hint

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError(f"TightCache needs transformers: {install_hint('hf')}") from error

from tightkv.integrations.transformers.attention import register
from tightkv.integrations.transformers.cache import TightCache

register()

__all__ = ["TightCache", "register"]
