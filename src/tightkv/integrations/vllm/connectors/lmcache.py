"""TightLMCacheConnector: LMCache's connector to a server (multi-process mode), for our pages.

LMCache's own finds chunks by token ids and the model's name, so that it would read the pages of any
preset. It also looks up whole prompts; what it finds has to be loaded, or stays locked.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from tightkv.integrations.extras import installed_version
from tightkv.integrations.vllm.connectors.connector_checks import check_use
from tightkv.integrations.vllm.prefix.cache_format import ENGINE_FORMAT, CacheFormat, engine_format

VERSION = "0.5.6"  # of LMCache: parts of its connector are used that are not public
if (_found := installed_version("lmcache")) != VERSION:
    raise ImportError(f"TightLMCacheConnector needs LMCache {VERSION}; installed: {_found}")

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector  # noqa: E402

_MODE = "lmcache.mp.mp_transfer_mode"


class TightLMCacheConnector(LMCacheMPConnector):  # type: ignore[misc]
    """Set kv_connector to its name and kv_connector_module_path to this module's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_engine(vllm_config, kv_cache_config)
        # On a CPU too; the other mode takes a page for one token.
        vllm_config.kv_transfer_config.kv_connector_extra_config.setdefault(_MODE, "lmcache_driven")
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._looked_up = 0
            self._look_up = self.scheduler_adapter.maybe_submit_lookup_request
            self.scheduler_adapter.maybe_submit_lookup_request = self._look_up_to_end
            _separate(self.scheduler_adapter, getattr(vllm_config, ENGINE_FORMAT))

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _separate(self.worker_adapter, engine_format(self._vllm_config))
        super().register_kv_caches(kv_caches)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._looked_up = request.num_tokens - 1  # the request may seem to end at its window
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return found

    def _look_up_to_end(self, request_id: str, token_ids: list[int], **more: Any) -> None:
        self._look_up(request_id, token_ids=token_ids[: self._looked_up], **more)

    def _get_or_create_request_tracker(self, request: Any) -> Any:
        tracker = super()._get_or_create_request_tracker(request)
        tracker.num_prompt_tokens = vars(request)["num_prompt_tokens"]  # all of them are stored
        return tracker


def _separate(adapter: Any, found: CacheFormat | None) -> None:
    """Give an engine keys of its format.

    All keys have the model's name, and the server keeps a layout for each. A salt would not do:
    engines of one model that differ in salts share a layout, which is that of the last one.
    """
    assert found is not None
    adapter.model_name = f"{adapter.model_name}##tightkv-{found.fingerprint}"


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse engines whose pages would be read wrongly."""
    check_use("TightLMCacheConnector", "LMCacheMPConnector", vllm_config, kv_cache_config)
    given = vllm_config.kv_transfer_config.kv_connector_extra_config
    refused = {
        f"{_MODE}={given.get(_MODE)!r}": (
            given.get(_MODE, "lmcache_driven") != "lmcache_driven",
            "a page is moved as a whole, and that mode takes its block for one token",
        ),
        "lmcache.mp.eager_prefetch": (
            given.get("lmcache.mp.eager_prefetch", False),
            "it looks up prompts past the beginning of their exact window",
        ),
        "LoRA": (vllm_config.lora_config is not None, "LMCache's keys have no adapter"),
        "prompt embeddings": (
            vllm_config.model_config.enable_prompt_embeds,
            "LMCache's keys have token ids alone",
        ),
    }
    for what, (is_set, why) in refused.items():
        if is_set:
            raise ValueError(f"TightLMCacheConnector with {what}: {why}; leave one of them out")
