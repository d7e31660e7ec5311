"""What tightkv generate does once everything is loaded: the runs, and their report."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from transformers import TextStreamer

from tightkv import __version__
from tightkv.config import KVQuantConfig
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.cache_size import cache_size
from tightkv.tools.cli.generate import compare, report
from tightkv.tools.cli.generate.live import Generation, LiveAnswer, generate
from tightkv.tools.cli.shared.progress import Working
from tightkv.tools.eval.tasks.needles import Needle

PLAIN, PLAIN_ATTENTION = "uncompressed", "sdpa"
_SAMPLING = ("temperature", "top_p", "top_k", "seed")
_SIZES = (
    *("tokens", "bytes", "bf16_bytes", "ratio", "bytes_per_token", "bf16_bytes_per_token"),
    *("long_ratio", "compressed_layers"),
)


@dataclass
class Runner:
    """One model, one batch of encoded prompts, which may ask for a needle, and one config."""

    args: argparse.Namespace
    config: KVQuantConfig
    model: Any
    tokenizer: Any
    inputs: Any
    needle: Needle | None = None

    def single(self) -> tuple[dict[str, Any], str]:
        name = self.config.name
        done = self._run(name, partial(TightCache, self.config, model=self.model))
        data = self._report({name: (self.args.attn, done)})
        return data, report.single_text(data, streamed=self._streams)

    def compare(self) -> tuple[dict[str, Any], str]:
        """Both caches, greedy, and the distributions along the uncompressed text."""
        self.model.set_attn_implementation(PLAIN_ATTENTION)
        ids = self.inputs["input_ids"]
        prompt = compare.read_shared(self.model, ids)
        plain = self._run(PLAIN, prompt.uncompressed, prompt.seconds, keep_logits=True)
        self.model.set_attn_implementation(self.args.attn)
        name, make = self.config.name, partial(prompt.compressed, self.config)
        tight = self._run(name, make, prompt.seconds)
        first, second = plain.tokens[0], tight.tokens[0]
        assert plain.logits is not None
        with Working("comparing the distributions along the uncompressed text"):
            kl = compare.mean_kl(self.model, ids[:, prompt.tokens :], first, plain.logits, make())
        data = self._report({PLAIN: (PLAIN_ATTENTION, plain), name: (self.args.attn, tight)})
        data["compare"] = {
            "shared_tokens": prompt.tokens,
            **compare.find_divergence(self.tokenizer, first, second),
            "mean_kl": kl,
            "scored_tokens": len(first) - 1,
        }
        if self.needle is not None:
            answers = [run["answers"][0]["text"].strip() for run in data["runs"]]
            data["needle"] = compare.judged(self.needle, answers)
        return data, report.compare_text(data)

    # --- one run ---
    @property
    def _options(self) -> dict[str, Any]:
        args = self.args
        options: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens,
            "do_sample": args.temperature > 0,
            "pad_token_id": self.tokenizer.pad_token_id,
        }
        if args.temperature > 0:
            # The model's own top_p and top_k apply where none is given.
            given = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
            options |= {name: value for name, value in given.items() if value is not None}
        return options

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
        part = "" if left == length else f"last {left} of a "
        about = f"{label}: {part}prompt of {length} tokens" + (f" x {rows}" if rows > 1 else "")
        text = None
        if self._streams:
            text = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        live = LiveAnswer(about, f"{label}: tokens", self.args.max_new_tokens, text)
        try:
            return generate(
                self.model, self.inputs, cache, self._options, live, before, keep_logits
            )
        finally:
            live.close()

    # --- the report ---
    def _report(self, runs: dict[str, tuple[str, Generation]]) -> dict[str, Any]:
        """What --json prints; `runs` are an attention and what came of it, by the cache's name."""
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
            "runs": [self._row(name, *run) for name, run in runs.items()],
            "compare": None,
            "needle": None,
        }

    def _row(self, label: str, attention: str, done: Generation) -> dict[str, Any]:
        size = cache_size(done.cache.layers)
        counts, answers = self.inputs["attention_mask"].sum(-1).tolist(), []
        for tokens, count in zip(done.tokens, counts, strict=True):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            answers.append({"text": text, "new_tokens": len(tokens), "prompt_tokens": count})
        return {
            "cache": label,
            "attention": attention,
            "answers": answers,
            "timing": done.timing,
            "kv": {
                **{name: getattr(size, name) for name in _SIZES},
                "break_even_tokens": size.break_even,
                "exact_layers": size.counted_layers - size.compressed_layers,
                "other_layers": len(done.cache.layers) - size.counted_layers,
            },
        }
