"""One run of model.generate with a cache: the tokens, the seconds and the bytes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer
from transformers.generation.streamers import BaseStreamer

from tightkv.cache import PagedKV
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.layout import MAX_TOKENS


@dataclass(frozen=True)
class Timing:
    """Seconds of the prompt and of each new token after the first."""

    prompt_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_rate(self) -> float | None:
        return _rate(self.prompt_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float | None:
        return _rate(self.decode_tokens, self.decode_seconds)


@dataclass(frozen=True)
class CacheSize:
    """Bytes of full-attention layers, against 16-bit keys and values of the same tokens."""

    tokens: int
    bytes: int
    bf16_bytes: int
    bytes_per_token: float
    bf16_bytes_per_token: float
    break_even: int | None = None
    """Tokens of a sequence from which on there are pages, which take less; None: never."""
    compressed_layers: int = 0
    counted_layers: int = 1

    @property
    def ratio(self) -> float:
        return self.bf16_bytes / self.bytes

    @property
    def long_ratio(self) -> float:
        return self.bf16_bytes_per_token / self.bytes_per_token


@dataclass(frozen=True)
class Generation:
    """What one run gave."""

    tokens: list[list[int]]  # new tokens of each prompt, up to its end-of-text token
    timing: Timing
    cache: Any
    logits: Tensor | None  # [new tokens, vocabulary] of the only prompt, where asked for


class TokenClock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token comes, and passes it on."""

    def __init__(self, listener: Any = None) -> None:
        self.listener, self.times = listener, list[float]()

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if self.listener is not None:
            self.listener.put(value)

    def end(self) -> None:
        if self.listener is not None:
            self.listener.end()


def generate(
    model: Any,
    inputs: Mapping[str, Tensor],
    cache: Any,
    *,
    options: Mapping[str, Any],
    listener: Any = None,
    keep_logits: bool = False,
) -> Generation:
    """Run the model on encoded prompts [B, tokens], left-padded."""
    clock = TokenClock(listener)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        streamer=clock,
        return_dict_in_generate=True,
        output_logits=keep_logits,
        **options,
    )
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    tokens = [_until_end(row, _end_tokens(model)) for row in new.tolist()]
    logits = torch.cat(out.logits) if keep_logits else None  # [new, vocabulary]
    prompt_tokens = int(inputs["attention_mask"].sum())
    return Generation(tokens, _timing(clock.times, prompt_tokens, tokens), cache, logits)


def cache_size(cache: Any) -> CacheSize:
    """What a cache's full-attention layers hold, and what a token adds in the long run.

    Compressed layers count as allocated; those left at 16 bits or more, as the tensors they are.
    """
    layers = [size for layer in cache.layers if (size := _layer_size(layer)) is not None]
    return CacheSize(
        tokens=max((size.tokens for size in layers), default=0),
        bytes=sum(size.bytes for size in layers),
        bf16_bytes=sum(size.bf16_bytes for size in layers),
        bytes_per_token=sum(size.bytes_per_token for size in layers),
        bf16_bytes_per_token=sum(size.bf16_bytes_per_token for size in layers),
        break_even=max((size.break_even for size in layers if size.break_even), default=None),
        compressed_layers=sum(isinstance(layer, TightLayer) for layer in cache.layers),
        counted_layers=len(layers),
    )


def _layer_size(layer: Any) -> CacheSize | None:
    """None where nothing grows with the context, or nothing is held."""
    if isinstance(layer, TightLayer):
        return None if layer.kv is None else _tight_size(layer.kv)
    if not isinstance(layer, DynamicLayer) or layer.is_sliding or layer.keys is None:
        return None
    rows, _, length, _ = layer.keys.shape  # [B, Hkv, tokens, D]
    tokens, numbers = rows * length, layer.keys.numel() + layer.values.numel()
    held = numbers * layer.keys.element_size()
    return CacheSize(tokens, held, 2 * numbers, held / tokens, 2 * numbers / tokens)


def _tight_size(kv: PagedKV) -> CacheSize:
    tokens, layout = sum(kv.table.lengths), kv.layout
    bf16 = 4.0 * layout.num_kv_heads * layout.head_dim
    begins = kv.table.exact_limit + 1
    return CacheSize(
        tokens,
        kv.allocated_bytes(),
        int(bf16) * tokens,
        layout.bytes_per_token,
        bf16,
        begins if begins <= MAX_TOKENS else None,
    )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _end_tokens(model: Any) -> Sequence[int]:
    ends = model.generation_config.eos_token_id
    return [] if ends is None else [ends] if isinstance(ends, int) else ends


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    last = next((i for i, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: last + 1]


def _timing(times: Sequence[float], prompt_tokens: int, tokens: Sequence[list[int]]) -> Timing:
    """`times` are those of the prompt's arrival and of every step.

    The first step after the prompt may compile kernels, so it is left out where others follow.
    """
    skip = 2 if len(times) > 3 else 1
    decoded = sum(max(0, len(row) - skip) for row in tokens)
    return Timing(prompt_tokens, times[1] - times[0], decoded, times[-1] - times[skip])
