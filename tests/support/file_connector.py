"""A KV connector that works on a CPU: one file per block, named by vLLM's block hash.

Blocks are written when they are full and read, before the model runs, by whoever has their tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Transfers(KVConnectorMetadata):
    """Names and numbers of blocks."""

    loads: list[tuple[str, int]] = field(default_factory=list)
    stores: list[tuple[str, int]] = field(default_factory=list)


class FileConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.folder, self.block_size = Path(extra["folder"]), vllm_config.cache_config.block_size
        self.requests: dict[str, Any] = {}
        self.blocks: dict[str, list[int]] = {}
        self.local: dict[str, int] = {}  # blocks of each that vLLM's own cache has
        self.loads: list[tuple[str, int]] = []
        self.caches: dict[str, torch.Tensor] = {}

    def place(self, name: str) -> Path:
        return self.folder / f"{name}.pt"

    # --- in the scheduler ---
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        begin, end = num_computed_tokens // self.block_size, request.num_tokens - 1
        self.local[request.request_id], found = begin, 0
        for block_hash in request.block_hashes[begin : end // self.block_size]:
            if not self.place(block_hash.hex()).exists():
                break
            found += 1
        return found * self.block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.requests[request.request_id] = request
        first, count = self.local[request.request_id], num_external_tokens // self.block_size
        names = [block_hash.hex() for block_hash in request.block_hashes]
        ids = blocks.get_block_ids()[0]
        self.loads += list(zip(names, ids, strict=False))[first : first + count]

    def reset_cache(self) -> bool:
        for file in self.folder.glob("*.pt"):
            file.unlink()
        return True

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        loads, self.loads = self.loads, []
        stores = [
            store
            for name, done in self._scheduled(scheduler_output)
            for store in self._full_blocks(name, done, scheduler_output.num_scheduled_tokens[name])
        ]
        return Transfers(loads, stores)

    def _scheduled(self, scheduler_output: Any) -> Iterator[tuple[str, int]]:
        for new in scheduler_output.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            yield new.req_id, new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            added = [] if cached.new_block_ids[i] is None else list(cached.new_block_ids[i][0])
            kept = [] if name in cached.resumed_req_ids else self.blocks[name]
            self.blocks[name] = kept + added
            yield name, cached.num_computed_tokens[i]

    def _full_blocks(self, name: str, done: int, count: int) -> Iterator[tuple[str, int]]:
        hashes = self.requests[name].block_hashes
        last = min((done + count) // self.block_size, len(hashes))
        for i in range(done // self.block_size, last):
            yield hashes[i].hex(), self.blocks[name][i]

    # --- in the worker ---
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, block in self._get_connector_metadata().loads:
            for layer, data in torch.load(self.place(name)).items():
                self.caches[layer][block] = data

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for name, block in self._get_connector_metadata().stores:
            data = {layer: cache[block].clone() for layer, cache in self.caches.items()}
            torch.save(data, self.place(name))
