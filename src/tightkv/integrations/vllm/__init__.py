"""tightkv inside an unmodified vLLM: `register` is its plugin, found through an entry point."""

from __future__ import annotations

from tightkv.integrations.vllm.start.plugin import register

__all__ = ["register"]
