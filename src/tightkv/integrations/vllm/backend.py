"""TightBackend and its metadata builder: how vLLM addresses our attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from tightkv.config import PAGE_SIZES
from tightkv.integrations.vllm.attention import TightAttention
from tightkv.integrations.vllm.compat import cache_shape
from tightkv.integrations.vllm.metadata import Sequences, TightMetadata
from tightkv.integrations.vllm.rows import BatchRows, RowTable


class TightBuilder(AttentionMetadataBuilder[TightMetadata]):  # type: ignore[misc]
    """Finds each sequence's ring once a step for all layers of a group."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.layers: list[Any] = list(layers.values())
        self.impls: list[TightAttention] = [layer.impl for layer in self.layers]
        self.block_pages: int = kv_cache_spec.block_size // self.impls[0].layout.page_size
        self.starts = torch.zeros(self._max_batch, dtype=torch.int32, device=device)
        columns = len(BatchRows._fields)
        self.out = torch.zeros(columns, self._max_batch, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        return AttentionCGSupport.NEVER

    @property
    def _max_batch(self) -> int:
        size: int = self.vllm_config.scheduler_config.max_num_seqs
        return size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TightMetadata:
        common = common_attn_metadata
        pages = self._page_table(common.block_table_tensor)
        rows = self._rows().step(
            pages,
            common.seq_lens,
            common.query_start_loc,
            common.slot_mapping[: common.num_actual_tokens],
            self.out,
        )
        decodes, _, decode_tokens, _ = split_decodes_and_prefills(
            common, decode_threshold=self.reorder_batch_threshold or 1
        )
        cuts = (
            (0, decodes, 0, decode_tokens, False),
            (decodes, common.num_reqs, decode_tokens, common.num_actual_tokens, True),
        )
        parts = [self._part(common, pages, rows, *cut) for cut in cuts if cut[0] < cut[1]]
        return TightMetadata(tuple(parts), common.num_actual_tokens)

    def _part(
        self,
        common: Any,
        pages: Tensor,
        rows: BatchRows,
        begin: int,
        end: int,
        first_token: int,
        last_token: int,
        fresh: bool,
    ) -> Sequences:
        first: Tensor = common.query_start_loc[begin : end + 1]
        here = common.query_start_loc_cpu[begin : end + 1]
        return Sequences(
            tokens=slice(first_token, last_token),
            first=first - first_token if first_token else first,
            most=int(here.diff().max()),
            fresh=fresh,
            block_table=pages[begin:end],
            starts=self.starts[: end - begin],
            rows=BatchRows(*(column[begin:end] for column in rows)),
        )

    def _page_table(self, block_table: Tensor) -> Tensor:
        """[B, blocks] -> [B, pages]: the pages of each block have neighbouring numbers."""
        count = self.block_pages
        if count == 1:
            return block_table
        inside = torch.arange(count, dtype=block_table.dtype, device=block_table.device)
        return (block_table[:, :, None] * count + inside).flatten(1)

    def _rows(self) -> RowTable:
        """Tags of the group's rings, made when vLLM has said how many blocks there are."""
        impl, layer = self.impls[0], self.layers[0]
        blocks = len(layer.kv_cache) * self.block_pages
        if impl.row_table is None or len(impl.row_table.row_of_block) != blocks:
            speculative = self.vllm_config.speculative_config
            tokens = 0 if speculative is None else speculative.num_speculative_tokens or 0
            impl.row_table = RowTable(impl.layout.cfg, impl.rows, blocks, tokens, self.device)
        return impl.row_table


class TightBackend(AttentionBackend):  # type: ignore[misc]
    """Our pages in vLLM's blocks. Layers are given it; nobody selects it by name."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TightAttention]:
        return TightAttention

    @staticmethod
    def get_builder_cls() -> type[TightBuilder]:
        return TightBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(min(PAGE_SIZES))]  # whole blocks

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return cache_shape(num_blocks, block_size, num_kv_heads, head_size)
