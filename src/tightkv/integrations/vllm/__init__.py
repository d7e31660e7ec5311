"""tightkv inside an unmodified vLLM: `register` is its plugin, found through an entry point."""

from tightkv.integrations.vllm.start.plugin import register

__all__ = ["register"]
