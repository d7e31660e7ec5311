"""What differs between vLLM 0.26 and 0.33."""

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from tightkv.pages.latent import LatentLayout
from tightkv.pages.layout import PageLayout


def page_spec(spec: Any, layout: PageLayout | LatentLayout, pages: int = 1) -> Any:
    """vLLM's spec of full, sliding or latent attention, its blocks being `pages` of our pages each.

    A sliding window may come padded to the blocks of windows that are not compressed.
    """
    names = {field.name for field in fields(spec)}
    spec = replace(spec, page_size_padded=None)
    if "tokens_per_state" in names:  # a block is [head slots, states, bytes]: one state per page
        return replace(
            spec,
            block_size=pages * layout.page_size,
            dtype=torch.uint8,
            num_head_slots=1,
            tokens_per_state=layout.page_size,
            state_content_bytes=layout.page_bytes,
        )
    assert isinstance(layout, PageLayout)  # latents are not compressed there
    # Before 0.29 a block is block_size * heads * (head_size + head_size_v) numbers.
    return replace(
        spec,
        block_size=pages * layout.page_size,
        num_kv_heads=1,
        head_size=slot_bytes(layout),
        head_size_v=0,
        dtype=torch.uint8,
    )


def slot_bytes(layout: PageLayout) -> int:
    """Bytes a token of a page, rounded up."""
    return -(-layout.page_bytes // layout.page_size)


def as_pages(kv_cache: Tensor, layout: PageLayout) -> Tensor:
    """A layer's part of vLLM's cache -> uint8 [pages, Hkv, record_bytes]; nothing is copied."""
    heads, record = layout.num_kv_heads, layout.record_bytes
    if kv_cache.dim() == 4:  # [blocks, 1, pages per block, page_bytes]
        blocks, _, count, size = kv_cache.shape
        block = kv_cache.stride(0)
        if block > count * size:  # packed: a block holds each page of all layers side by side
            shape, strides = (blocks * count, heads, record), (block // count, record, 1)
            return kv_cache.as_strided(shape, strides, kv_cache.storage_offset() // count)
        pages = kv_cache.squeeze(1).flatten(1)
    else:  # [blocks, bytes]
        pages, size = kv_cache, layout.page_size * slot_bytes(layout)
    if pages.shape[1] > size:
        pages = pages.view(-1, size)
    return pages[:, : layout.page_bytes].unflatten(1, (heads, record))


def drafts_share_metadata(vllm_config: Any) -> bool:
    """Whether the first pass of a draft runs with the attention metadata of the model's own step.

    vLLM's second model runner does that for heads on the model's hidden states.
    """
    speculative = vllm_config.speculative_config
    if speculative is None or not getattr(vllm_config, "use_v2_model_runner", False):
        return False
    several = getattr(speculative, "use_multi_module_mtp", bool)()
    return speculative.method in ("eagle", "eagle3", "mtp") and not several


def added_by_draft(vllm_config: Any) -> int:
    """Tokens at most that the first pass of a draft has beyond those of the model's step.

    Drafts that are no heads on the model's hidden states begin with the token sampled last, and
    parallel ones with all they draft. vLLM adds these to the lengths of the device alone.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return 0
    is_head = speculative.method in ("eagle", "eagle3", "mtp")
    if is_head and not getattr(speculative, "parallel_drafting", False):
        return 0
    return speculative.num_speculative_tokens or 1


def host_lengths(common: Any, added: int = 0) -> list[int] | None:
    """Sequences' lengths with the new tokens, where the host knows them without asking the device.

    They are exact for prompts; with speculation, a decoding sequence may be shorter. With `added`
    (`added_by_draft`) all are upper bounds.
    """
    lengths = getattr(common, "seq_lens_cpu_upper_bound", None)
    return None if lengths is None else (lengths + added).tolist()
