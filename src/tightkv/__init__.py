"""tightkv: a compressed KV cache for LLM inference."""

from tightkv.config import KVQuantConfig

__version__ = "0.1.0"

__all__ = ["KVQuantConfig", "__version__"]
