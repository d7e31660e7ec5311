"""TightNixlConnector: vLLM's NIXL connector, which reads blocks of another engine, for our pages.

vLLM's own would read pages of any preset: its handshake compares models, dtypes and backends. It
also takes the whole prompt, with a page that is not full, and refuses blocks of several tokens
that do not share their memory with other layers' blocks.
"""

from typing import Any

from vllm.platforms import current_platform

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
        NixlBaseConnector,
        NixlPullConnector,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
        NixlPullConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
except ImportError as error:
    raise ImportError("TightNixlConnector needs vLLM 0.32 or later") from error

from tightkv.integrations.vllm.connectors.connector_checks import check_use
from tightkv.integrations.vllm.prefix.cache_format import format_of


class TightNixlScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Takes whole pages from the beginning of a prompt."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        count, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        end = min(num_computed_tokens + count, request.num_tokens - 1)
        size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        count = max(0, end // size * size - num_computed_tokens)
        return count, count > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        if num_external_tokens and params and params.get("remote_block_ids"):
            # The worker reads the last of them, as many as it has room for.
            taken = len(blocks.blocks[0])
            params["remote_block_ids"] = [ids[:taken] for ids in params["remote_block_ids"]]
        super().update_state_after_alloc(request, blocks, num_external_tokens)


class TightNixlWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Shakes hands with workers whose pages have the same format."""

    def _sync_block_size_with_kernel(self) -> None:
        self._logical_num_blocks = self.num_blocks  # kernels take whole blocks

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        found = format_of(self.vllm_config)
        assert found is not None
        backend = self.attn_backends[0].get_name()
        self.backend_name = f"{backend} tightkv {found.fingerprint}"  # handshakes compare it
        super().register_kv_caches(kv_caches)


class TightNixlConnector(NixlPullConnector):  # type: ignore[misc]
    """Set kv_connector to its name and kv_connector_module_path to this module's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        check_engine(vllm_config, kv_cache_config)
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        given = vllm_config, self.engine_id, kv_cache_config
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = TightNixlScheduler(*given)
        else:
            self.connector_worker = TightNixlWorker(*given)


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse engines whose pages would be read wrongly."""
    transfer = vllm_config.kv_transfer_config
    check_use("TightNixlConnector", "NixlConnector", vllm_config, kv_cache_config)
    if not transfer.get_from_extra_config("enforce_handshake_compat", True):
        raise ValueError(
            "TightNixlConnector with enforce_handshake_compat=false: pages of another format could "
            "be read; leave it out"
        )
    if transfer.kv_buffer_device != current_platform.device_type:
        raise ValueError(
            f"TightNixlConnector with kv_buffer_device={transfer.kv_buffer_device!r}: pages are "
            f"read from the cache itself; set it to {current_platform.device_type!r}"
        )
