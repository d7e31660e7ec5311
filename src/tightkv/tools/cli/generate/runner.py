"""What tightkv generate does once everything is loaded: the runs, and their report."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import TextStreamer

from tightkv import __version__
from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.tools.cli.generate import report
from tightkv.tools.cli.generate.compare import (
    TAIL_TOKENS,
    SharedPrompt,
    can_share,
    find_divergence,
    mean_kl,
)
from tightkv.tools.cli.generate.generation import Generation, generate
from tightkv.tools.cli.generate.live import LiveAnswer
from tightkv.tools.cli.generate.needle import NEEDLE_TOKENS, AskedNeedle
from tightkv.tools.cli.shared.output import print_status
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.eval.prompts import common_prefix

PLAIN = "uncompressed"
PLAIN_ATTENTION = "sdpa"
_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_SIZES = (
    *("tokens", "bytes", "bf16_bytes", "ratio", "bytes_per_token", "bf16_bytes_per_token"),
    *("long_ratio", "compressed_layers"),
)


class Runner:
    """One model, one batch of prompts, one config."""

    def __init__(
        self,
        args: argparse.Namespace,
        config: KVQuantConfig,
        model: Any,
        tokenizer: Any,
        inputs: Any,
        needle: AskedNeedle | None = None,
    ) -> None:
        """`needle` is for `compare`: a fact in the prompt, and its question, if that is another."""
        self.args, self.config, self.model = args, config, model
        self.tokenizer, self.inputs, self.needle = tokenizer, inputs, needle
        self.label = config.name
        self.options: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "do_sample": args.temperature > 0,
            "pad_token_id": tokenizer.pad_token_id,
        }
        if args.temperature > 0:
            # The model's own top_p and top_k apply where none is given.
            given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
            self.options |= {name: value for name, value in given.items() if value is not None}

    def single(self) -> tuple[dict[str, Any], str]:
        done = self._run(self.label, partial(TightCache, self.config, model=self.model))
        data = self._head() | {"runs": [self._row(self.label, self.args.attn, done)]}
        data |= {"compare": None, "needle": None}
        return data, report.single_text(data, streamed=self._streams)

    def compare(self) -> tuple[dict[str, Any], str]:
        """Both caches, greedy, and the distributions along the uncompressed text."""
        self.model.set_attn_implementation(PLAIN_ATTENTION)
        prompt = self._read_prompt()
        plain = self._run(PLAIN, prompt.uncompressed, prompt.seconds, keep_logits=True)
        found = [self._ask_needle(PLAIN, prompt.uncompressed, plain)]
        self.model.set_attn_implementation(self.args.attn)
        make = partial(prompt.compressed, self.config)
        tight = self._run(self.label, make, prompt.seconds)
        found.append(self._ask_needle(self.label, make, tight))
        first, second = plain.tokens[0], tight.tokens[0]
        assert plain.logits is not None
        with Working("comparing the distributions along the uncompressed text"):
            tail = self.inputs["input_ids"][:, prompt.tokens :]
            kl = mean_kl(self.model, tail, first, plain.logits, make())
        divergence = find_divergence(self.tokenizer, first, second)
        data = self._head() | {
            "runs": [
                self._row(PLAIN, PLAIN_ATTENTION, plain),
                self._row(self.label, self.args.attn, tight),
            ],
            "compare": {
                "shared_tokens": prompt.tokens,
                "equal": divergence.token is None,
                "divergence_token": divergence.token,
                "before": divergence.before,
                "uncompressed": divergence.first,
                "compressed": divergence.second,
                "mean_kl": kl,
                "scored_tokens": len(first) - 1,
            },
            "needle": None if self.needle is None else self.needle.as_json(found),
        }
        return data, report.compare_text(data)

    def _read_prompt(self) -> SharedPrompt:
        """All but the last tokens, and what the needle's question does not share."""
        ids = self.inputs["input_ids"]
        prompts = [ids[0].tolist()]
        if self.needle is not None and self.needle.inputs is not None:
            prompts.append(self.needle.inputs["input_ids"][0].tolist())
        count = max(0, common_prefix(prompts) - TAIL_TOKENS) if can_share(self.model) else 0
        if count:
            print_status(f"prompt of {ids.shape[1]} tokens, {count} of them read once")
        return SharedPrompt(self.model, ids[:, :count])

    def _ask_needle(self, label: str, make: Callable[[], Any], done: Generation) -> str:
        """What a cache answers when it is asked for the needle, which the prompt may have done."""
        if self.needle is None:
            return ""
        if self.needle.inputs is not None:
            with Working(f"{label}: looking for the needle"):
                done = generate(
                    self.model,
                    self.needle.inputs,
                    make(),
                    options={**self.options, "max_new_tokens": NEEDLE_TOKENS},
                )
        return str(self.tokenizer.decode(done.tokens[0], skip_special_tokens=True)).strip()

    # --- one run ---
    @property
    def _streams(self) -> bool:
        return len(self.inputs["input_ids"]) == 1 and not self.args.json

    def _run(
        self, label: str, make: Callable[[], Any], before: float = 0.0, keep_logits: bool = False
    ) -> Generation:
        """An answer with the cache that `make` fills, after `before` seconds of reading."""
        torch.manual_seed(self.args.seed)
        start = time.perf_counter()
        cache = make()
        before += time.perf_counter() - start
        rows, length = self.inputs["input_ids"].shape
        left = length - cache.get_seq_length()
        print_status(
            f"{label}: {'' if left == length else f'last {left} of a '}prompt of {length} tokens"
            + (f" x {rows}" if rows > 1 else "")
        )
        text = None
        if self._streams:
            text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        live = LiveAnswer(self.model, cache, label, self.args.max_new_tokens, text)
        try:
            done = generate(
                self.model,
                self.inputs,
                cache,
                options=self.options,
                listener=live,
                keep_logits=keep_logits,
            )
        finally:
            live.close()
        timing = replace(done.timing, prefill_seconds=done.timing.prefill_seconds + before)
        return replace(done, timing=timing)

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
            "sampling": {name: getattr(self.args, name) for name in _SAMPLING},
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
                **{name: getattr(size, name) for name in _SIZES},
                "break_even_tokens": size.break_even,
                "exact_layers": size.counted_layers - size.compressed_layers,
                "other_layers": len(done.cache.layers) - size.counted_layers,
            },
        }

    def _prompt_tokens(self) -> list[int]:
        mask: Tensor = self.inputs["attention_mask"]
        return [int(count) for count in mask.sum(-1)]
