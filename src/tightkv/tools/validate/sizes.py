"""Claim 6: the compression ratio, with every byte counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.pages.layout import RING_SLACK, PageLayout
from tightkv.tools.validate.inputs import filled, normal
from tightkv.tools.validate.report import Claim, Options

SECTION = "6 bytes"
HEADS = 8
CONTEXTS = {"1k": 1024, "8k": 8192, "128k": 131072}


def check(options: Options) -> Iterator[Claim]:
    """Allocated bytes against computed ones, and the ratio to bf16, for every preset."""
    rows, differences = list[Claim](), dict[str, float]()
    many = options.samples(1000, 130)
    for dim in (64, 128):
        for name in PRESETS:
            layout = PageLayout(KVQuantConfig.preset(name), HEADS, dim)
            for tokens in (1, many):
                allocated = allocated_bytes(layout, tokens, options.stream("bytes"))
                difference = allocated - layout.total_bytes(tokens)
                differences[f"{name} d{dim} {tokens} tokens"] = difference
            rows.append(_ratio_row(layout, name))
    worst = max(differences.values(), key=abs)
    setting = f"largest of {len(differences)} caches with 1 and {many} tokens"
    claim = "bytes allocated - bytes computed"
    yield Claim(SECTION, claim, setting, float(worst), 0.0, 0.0, detail=differences)
    yield from rows


def allocated_bytes(layout: PageLayout, tokens: int, seed: int, **options: Any) -> int:
    """Bytes a real cache holds once `tokens` tokens joined its sequence.

    `options` are those of the table.
    """
    shape = tokens, layout.num_kv_heads, layout.head_dim
    key, value = (normal(seed, stream, *shape).to(torch.bfloat16) for stream in range(2))
    return filled(layout, (key, value), **options).allocated_bytes()


def ratio(layout: PageLayout, tokens: int) -> float:
    """bf16 bytes of one sequence over its bytes here: pages, tables, ring and sinks."""
    return tokens * HEADS * layout.head_dim * 4 / layout.total_bytes(tokens)


def _ratio_row(layout: PageLayout, name: str) -> Claim:
    """The layout's ratio against a count from first principles."""
    ratios = {f"ratio_{label}": ratio(layout, tokens) for label, tokens in CONTEXTS.items()}
    want = 16 / _bits_per_element(layout, CONTEXTS["128k"])
    others = f"{ratios['ratio_1k']:.2f}x at 1k, {ratios['ratio_8k']:.2f}x at 8k"
    setting = f"{name}, head_dim {layout.head_dim}; {others}"
    claim = "ratio to bf16 at 128k, as counted by hand"
    bounds = want * (1 - 1e-9), want * (1 + 1e-9)
    return Claim(SECTION, claim, setting, ratios["ratio_128k"], *bounds, detail=ratios)


def _bits_per_element(layout: PageLayout, tokens: int) -> float:
    """Codes, a 16-bit scale per vector, a mean key per page, exact tokens, tables."""
    cfg, dim = layout.cfg, layout.head_dim
    codes = (cfg.key_bits + cfg.value_bits) / 2
    mean_bytes = 2 * dim if cfg.mean_bits == 16 else dim + 16  # int8: a scale, padded to 16 bytes
    scales, means = 16 / dim, 8 * mean_bytes / (2 * dim * cfg.page_size)
    exact = 16 * (cfg.exact_pages * cfg.page_size + RING_SLACK + cfg.sinks) / tokens
    tables = 32 * (tokens / cfg.page_size + 5) / (tokens * HEADS * 2 * dim)
    return codes + scales + means + exact + tables
