"""A compressed cache for Hugging Face transformers.

Importing this package registers the attention implementation "tightkv" through
transformers' own interfaces; no transformers code is changed.
"""

import warnings as _warnings

from tightkv.integrations.extras import install_hint, untested

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(f"TightCache needs transformers: {install_hint('hf')}") from error

from tightkv.integrations.transformers.attention import register
from tightkv.integrations.transformers.cache import TightCache

register()
if (_line := untested("transformers", _transformers.__version__)) is not None:
    _warnings.warn(_line, stacklevel=2)

__all__ = ["TightCache", "register"]
