"""What tightkv generate does once everything is loaded: the runs, and their report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, TextStreamer
from transformers.generation.streamers import BaseStreamer

from tightkv import __version__
from tightkv.cli.generate import report
from tightkv.cli.generate.compare import find_divergence, mean_kl
from tightkv.cli.generate.generation import Generation, generate
from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.cache_size import cache_size

PLAIN = "uncompressed"
PLAIN_ATTENTION = "sdpa"


class Runner:
    """One model, one batch of prompts, one config."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: KVQuantConfig,
        model: Any,
        tokenizer: Any,
        inputs: Any,
        print_status: Callable[[str], None],
    ) -> None:
        self.args, self.config, self.model = args, config, model
        self.tokenizer, self.inputs, self.print_status = tokenizer, inputs, print_status
        self.label = config.name
        self.options: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "do_sample": args.temperature > 0,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if args.temperature > 0:
            # The model's own top_p and top_k apply where none is given.
            given = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
            self.options |= {name: value for name, value in given.items() if value is not None}

    def single(self) -> tuple[dict[str, Any], str]:
        done = self._run(self.label, TightCache(self.config, model=self.model))
        data = self._head() | {"runs": [self._row(self.label, self.args.attn, done)]}
        data["compare"] = None
        return data, report.single_text(data, streamed=self._streams)

    def compare(self) -> tuple[dict[str, Any], str]:
        """Both caches, greedy, and the distributions along the uncompressed text."""
        self.model.set_attn_implementation(PLAIN_ATTENTION)
        plain = self._run(PLAIN, DynamicCache(config=self.model.config), keep_logits=True)
        self.model.set_attn_implementation(self.args.attn)
        tight = self._run(self.label, TightCache(self.config, model=self.model))
        first, second = plain.tokens[0], tight.tokens[0]
        self.print_status("comparing the distributions along the uncompressed text")
        fresh = TightCache(self.config, model=self.model)
        assert plain.logits is not None
        kl = mean_kl(self.model, self.inputs["input_ids"], first, plain.logits, fresh)
        divergence = find_divergence(self.tokenizer, first, second)
        data = self._head() | {
            "runs": [
                self._row(PLAIN, PLAIN_ATTENTION, plain),
                self._row(self.label, self.args.attn, tight),
            ],
            "compare": {
                "equal": divergence.token is None,
                "divergence_token": divergence.token,
                "before": divergence.before,
                "uncompressed": divergence.first,
                "compressed": divergence.second,
                "mean_kl": kl,
                "scored_tokens": len(first) - 1,
            },
        }
        return data, report.compare_text(data)

    # --- one run ---
    @property
    def _streams(self) -> bool:
        return len(self.inputs["input_ids"]) == 1 and not self.args.json

    def _run(self, label: str, cache: Any, keep_logits: bool = False) -> Generation:
        torch.manual_seed(self.args.seed)
        rows, length = self.inputs["input_ids"].shape
        self.print_status(
            f"{label}: prompt of {length} tokens" + (f" x {rows}" if rows > 1 else "")
        )
        listener: BaseStreamer = (
            TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
            if self._streams
            else TokenCounter(self.args.max_new_tokens)
        )
        return generate(
            self.model,
            self.inputs,
            cache,
            options=self.options,
            listener=listener,
            keep_logits=keep_logits,
        )

    # --- the report ---
    def _head(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "tightkv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "model": {
                "name": self.args.model or "bundled",
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "device": str(self.model.device),
            },
            "config": self.config.to_dict(),
            "sampling": {
                "temperature": self.args.temperature,
                "top_p": self.args.top_p,
                "top_k": self.args.top_k,
                "seed": self.args.seed,
            },
        }

    def _row(self, label: str, attention: str, done: Generation) -> dict[str, Any]:
        size, timing = cache_size(done.cache.layers), done.timing
        return {
            "cache": label,
            "attention": attention,
            "answers": [
                {
                    "text": self.tokenizer.decode(tokens, skip_special_tokens=True),
                    "new_tokens": len(tokens),
                    "prompt_tokens": prompt_tokens,
                }
                for tokens, prompt_tokens in zip(done.tokens, self._prompt_tokens(), strict=True)
            ],
            "timing": {
                "prefill_seconds": timing.prefill_seconds,
                "prefill_tokens_per_second": timing.prefill_rate,
                "decode_seconds": timing.decode_seconds,
                "decode_tokens_per_second": timing.decode_rate,
            },
            "kv": {
                "tokens": size.tokens,
                "bytes": size.bytes,
                "bf16_bytes": size.bf16_bytes,
                "ratio": size.ratio,
                "bytes_per_token": size.bytes_per_token,
                "bf16_bytes_per_token": size.bf16_bytes_per_token,
                "long_ratio": size.long_ratio,
                "break_even_tokens": size.break_even,
                "compressed_layers": size.compressed_layers,
                "exact_layers": size.counted_layers - size.compressed_layers,
                "other_layers": len(done.cache.layers) - size.counted_layers,
            },
        }

    def _prompt_tokens(self) -> list[int]:
        mask: Tensor = self.inputs["attention_mask"]
        return [int(count) for count in mask.sum(-1)]


class TokenCounter(BaseStreamer):  # type: ignore[misc]
    """A line on a terminal's standard error that counts tokens."""

    def __init__(self, most: int) -> None:
        self.most, self.count = most, -1  # the prompt comes first
        self.shown = sys.stderr.isatty()

    def put(self, value: Tensor) -> None:
        self.count += 1
        if self.shown and self.count:
            print(f"\r{self.count} of {self.most} tokens", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
