"""TightBackend and its metadata builder: how vLLM addresses our attention."""

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    MultipleOf,
)

from tightkv.config import PAGE_SIZES
from tightkv.integrations.vllm.compat import added_by_draft, drafts_share_metadata, host_lengths
from tightkv.integrations.vllm.step.attention import TightAttention
from tightkv.integrations.vllm.step.batch_split import PartRange, split_batch
from tightkv.integrations.vllm.step.metadata import TightMetadata, make_part
from tightkv.integrations.vllm.step.ring_table import BatchRings, RingTable
from tightkv.integrations.vllm.step.step_sealing import (
    GroupRings,
    SinkCopies,
    StepSealing,
    copied,
    seals_later,
)


class TightBuilder(AttentionMetadataBuilder[TightMetadata]):  # type: ignore[misc]
    """Finds each sequence's ring once per step for all layers of a group."""

    supports_draft_decode_metadata_update: bool = True
    added: int = 0  # tokens that a sequence may have beyond those that the host counts

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        self.layers: list[Any] = list(layers.values())
        self.impls: list[TightAttention] = [layer.impl for layer in self.layers]
        self.group_rings = _group_rings(self.impls, drafts_share_metadata(vllm_config))
        self.added = _added(self.impls, vllm_config)
        self.pages_per_block: int = kv_cache_spec.block_size // self.impls[0].layout.page_size
        self.inside = torch.arange(self.pages_per_block, dtype=torch.int32, device=device)
        self.pages: Tensor | None = None  # of each sequence, where a block has several
        # What the layers read keeps its address, so that vLLM's CUDA graphs can hold it.
        self.left_pad = torch.zeros(self._max_batch, dtype=torch.int32, device=device)
        columns = len(BatchRings._fields)
        self.out = torch.zeros(columns, self._max_batch, dtype=torch.int32, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        impls = [
            layer.impl for layer in get_layers_from_vllm_config(vllm_config, Attention).values()
        ]
        ours = [impl for impl in impls if isinstance(impl, TightAttention)]
        capturable = all(impl.capturable for impl in ours)
        return AttentionCGSupport.UNIFORM_BATCH if capturable else AttentionCGSupport.NEVER

    @property
    def _max_batch(self) -> int:
        size: int = self.vllm_config.scheduler_config.max_num_seqs
        return size

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> TightMetadata:
        common = common_attn_metadata
        begins: Tensor = common.query_start_loc_cpu
        sequences = len(begins) - 1
        most_new = int(begins.diff().max()) if sequences else 0
        starts, workspace = [0, int(begins[-1])], None
        ranges = [PartRange(0, sequences, False, most_new)] if sequences else []
        # Sequences with up to so many new tokens are treated like those that decode.
        short_prompt = min(impl.short_prompt for impl in self.impls)
        limits = self.impls[0].limits._replace(decoding=self.reorder_batch_threshold or 1)
        most_decoding = limits.most_as_decoding(sequences, short_prompt)
        if most_new > most_decoding:  # lists of all sequences, of which decodes need none
            starts, workspace = begins.tolist(), self._workspace_tokens()
            lengths = host_lengths(common, self.added)
            ranges = split_batch(starts, lengths, most_decoding, workspace, exact=not self.added)
        slots = common.slot_mapping[: common.num_actual_tokens]
        given = (common.seq_lens, common.query_start_loc, slots)
        pages = self._page_table(common.block_table_tensor)
        table, inherited = self._ring_table(), None
        decodes = all(part.max_query_len <= table.taken_back + 1 for part in ranges)
        rows = table.step(pages, *given, self.out, copies=not decodes)
        if not decodes and self.group_rings.copies is not None:
            self.group_rings.copies.copy(rows)
        elif not decodes:
            inherited = copied(rows)
        parts = [
            make_part(part, starts, common.query_start_loc, pages, rows, self.left_pad, workspace)
            for part in ranges
        ]
        built_from = (common.block_table_tensor, *given)
        return TightMetadata(
            tuple(parts),
            common.num_actual_tokens,
            inherited,
            self.group_rings.sealing,
            decodes,
            built_from,
        )

    def update_draft_decode_metadata(self, metadata: TightMetadata) -> None:
        """Metadata of the next step, in place: a draft's next token of each sequence.

        vLLM has changed the tensors that `metadata` was built from. A CUDA graph can hold this.
        """
        block_table, lengths, starts, slots = metadata.built_from
        given = self._page_table(block_table), lengths, starts, slots
        self._ring_table().step(*given, self.out, drafting=True)

    def _workspace_tokens(self) -> int | None:
        """The tokens that fit the workspace of each layer that has one; see `LayerStep`.

        Other layers of the group get the same parts, in which long prompts lie side by side: none
        where one's kernels hold all scores at once, as the reference does.
        """
        steps = [impl.step for impl in self.impls]
        if not all(step.kernels.TAKES.ragged for step in steps):
            return None
        found = [step.workspace_tokens for step in steps]
        return min((tokens for tokens in found if tokens is not None), default=None)

    def _page_table(self, block_table: Tensor) -> Tensor:
        """[B, blocks] -> [B, pages]: the pages of each block have neighbouring numbers."""
        count, (batch, blocks) = self.pages_per_block, block_table.shape
        if count == 1:
            return block_table
        if self.pages is None or self.pages.shape[1] != blocks * count:
            shape = (self._max_batch, blocks * count)
            self.pages = torch.zeros(shape, dtype=torch.int32, device=block_table.device)
        pages = self.pages[:batch]
        by_block = pages.unflatten(1, (blocks, count))
        torch.add(block_table[:, :, None] * count, self.inside, out=by_block)
        return pages

    def _ring_table(self) -> RingTable:
        """The group's table, made when vLLM has said how many blocks there are."""
        impl, layer, rings = self.impls[0], self.layers[0], self.group_rings
        if rings.table is None:
            # vLLM keeps the blocks of the shortest window, and all if a layer needs them.
            windows = [impl.window for impl in self.impls if impl.window is not None]
            rings.table = RingTable(
                impl.layout.cfg,
                impl.limits.rows,
                len(layer.kv_cache) * self.pages_per_block,
                taken_back=impl.limits.decoding - 1,
                device=self.device,
                pages_per_block=self.pages_per_block,
                window=min(windows) if len(windows) == len(self.impls) else None,
                seals_later=self._seals_later(),
            )
            # Layers of a draft may be in the group, and go by another table.
            own = [layer for layer in self.layers if layer.impl.group_rings is rings]
            impls, caches = [layer.impl for layer in own], [layer.kv_cache for layer in own]
            queue = rings.table.queue
            rings.sealing = StepSealing(impls, caches, queue) if queue is not None else None
            rings.copies = self._sink_copies(impls)
            # Steps without sequences compile the kernels, so that no request waits for them.
            zeros = self.left_pad.new_zeros(2)
            given = zeros[:1], zeros, zeros[:1].long()
            for copies in (False, True):
                rows = rings.table.step(zeros[:1, None], *given, self.out, copies)
            if rings.copies is not None:
                rings.copies.copy(rows)
        return rings.table

    def _seals_later(self) -> bool:
        """Whether a step leaves the pages that it completes to a later one, in some layers.

        A connector may store a page right after the step that completes it. Where vLLM has several
        groups of layers, a block that is freed while its page waits may go to another group, whose
        writes the table does not see.
        """
        config = self.vllm_config
        if not self.impls[0].limits.rows or not any(seals_later(impl) for impl in self.impls):
            return False
        if config.kv_transfer_config is not None or self._runs_halves:
            return False
        found = get_layers_from_vllm_config(config, AttentionLayerBase).values()
        return len({_blocks_of(layer) for layer in found}) == 1

    @property
    def _runs_halves(self) -> bool:
        """Whether vLLM may run the halves of a batch in turn, both planned before either is run."""
        return bool(getattr(self.vllm_config.parallel_config, "use_ubatching", False))

    def _sink_copies(self, impls: list[TightAttention]) -> SinkCopies | None:
        """Copies of sinks before the first layer runs.

        One half of a batch may take over what the other is to write in the same step: then each
        layer copies its own.
        """
        if self._runs_halves:
            return None
        own = [impl.exact_tensors()[2:4] for impl in impls if impl.reads is None]
        sinks = [each for pair in own for each in pair]
        return SinkCopies(sinks, self.impls[0].limits.rows, self._max_batch)


def _group_rings(impls: list[TightAttention], drafts_share: bool) -> GroupRings:
    """The rings of a group of layers, which all its builders share.

    A draft whose first pass is a step of its own needs a table of its own: for the model's table,
    that pass would be the same step again. A draft that takes the metadata of the model's step
    goes on in the model's table. A table from before is that of a cache that vLLM has given up,
    such as the one in which it profiles CUDA graphs.
    """
    known = impls[0].group_rings
    own = all(impl.is_draft for impl in impls) and not drafts_share
    if known is None or known.table is not None or own:
        known = GroupRings()
        for impl in impls:
            impl.group_rings = known
    return known


def _added(impls: list[TightAttention], vllm_config: Any) -> int:
    """`added_by_draft` for the layers of a draft, whose passes are steps of their own."""
    return added_by_draft(vllm_config) if all(impl.is_draft for impl in impls) else 0


def _blocks_of(layer: Any) -> object:
    """What vLLM's groups of layers differ by: full attention, a length of window, other caches."""
    impl = getattr(layer, "impl", None)
    return (impl.window,) if isinstance(impl, TightAttention) else type(layer)


class PageBlocks:
    """What all our backends say of blocks. Layers are given them; none is selected by name."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(min(PAGE_SIZES))]  # whole blocks

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)


class TightBackend(PageBlocks, AttentionBackend):  # type: ignore[misc]
    """The backend of attention with keys and values."""

    accept_output_buffer: bool = True
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_impl_cls() -> type[TightAttention]:
        return TightAttention

    @staticmethod
    def get_builder_cls() -> type[TightBuilder]:
        return TightBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        return num_blocks, block_size * num_kv_heads * head_size  # bytes: see `compat.page_spec`


class PackedBackend(TightBackend):
    """Where a block of vLLM's holds the pages of all compressed layers."""

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.BLHNC, KVCacheLayout.BLNHC)
