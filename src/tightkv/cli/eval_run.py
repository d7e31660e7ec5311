"""What tightkv eval does once its arguments are checked: load, measure, collect."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from tightkv.cli.generate import tell
from tightkv.cli.info import collect
from tightkv.cli.progress import Progress
from tightkv.config import KVQuantConfig
from tightkv.eval import results
from tightkv.eval.forward import MakeCache, max_positions
from tightkv.eval.greedy import greedy_passes, measure_greedy
from tightkv.eval.needles import Haystack, build_haystack, make_needles, measure_needles
from tightkv.eval.quality import Schedule, check_compresses, measure_quality, quality_passes
from tightkv.eval.size import bits_of, kernels_of
from tightkv.eval.text import Text, default_texts, read_text
from tightkv.eval.windows import Windows, cut_windows
from tightkv.integrations.model_source import BUNDLED_NAME
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.models import load_model, quiet

PLAIN = "uncompressed"


def evaluate(args: argparse.Namespace, configs: Mapping[str, KVQuantConfig]) -> dict[str, Any]:
    """The object that --json prints (docs/eval.md)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    start = time.monotonic()
    _check_lengths(args, configs)
    texts = [read_text(path) for path in args.text] or default_texts()
    model, tokenizer = load_model(args.model, dtype=args.dtype, device=args.device, progress=tell)
    with quiet():
        evaluation = Evaluation(args, configs, texts, model, tokenizer)
        rows, reference = evaluation.measure()
    return {
        "schema": 1,
        **results.provenance(),
        "machine": _machine(model),
        "model": results.model_facts(model, args.model or BUNDLED_NAME),
        "texts": results.text_facts(texts),
        "settings": _settings(args, evaluation.haystacks),
        "seconds": time.monotonic() - start,
        "reference": reference,
        "rows": rows,
        "notes": evaluation.notes,
    }


class Evaluation:
    """All inputs are cut from the texts first, so that a text too short is refused at once."""

    def __init__(
        self,
        args: argparse.Namespace,
        configs: Mapping[str, KVQuantConfig],
        texts: Sequence[Text],
        model: Any,
        tokenizer: Any,
    ) -> None:
        self.args, self.configs, self.texts = args, configs, texts
        self.model, self.tokenizer = model, tokenizer
        self.notes: list[str] = []
        if model.dtype == torch.float32:
            self.notes.append(
                "the model runs in float32, so its exact newest tokens take twice the bytes of bf16"
            )
        self.limit = max_positions(model)
        self.schedule = Schedule(args.prefill, args.chunk, args.batch)
        self.windows = self._windows() if "quality" in args.tasks else None
        self.haystacks = self._haystacks() if "needles" in args.tasks else []
        self.prompts = self._prompts() if "greedy" in args.tasks else None

    def measure(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """One row a config, and what the uncompressed cache gave."""
        caches: dict[str, MakeCache] = {
            name: partial(TightCache, cfg, model=self.model) for name, cfg in self.configs.items()
        }
        rows: dict[str, dict[str, Any]] = {
            name: {
                "name": name,
                "config": cfg.to_dict(),
                "kernels": kernels_of(self.model, caches[name]),
                "bits": results.bits_data(bits_of(self.model, caches[name])),
                "quality": None,
                "needles": None,
                "greedy": None,
            }
            for name, cfg in self.configs.items()
        }
        reference: dict[str, Any] = {"perplexity": None, "needles": None}
        if self.windows is not None:
            self._quality(self.windows, caches, rows, reference)
        if self.haystacks:
            self._needles(caches, rows, reference)
        if self.prompts is not None:
            self._greedy(self.prompts, caches, rows)
        return list(rows.values()), reference

    # --- the three tasks ---
    def _quality(
        self,
        windows: Windows,
        caches: Mapping[str, MakeCache],
        rows: Mapping[str, dict[str, Any]],
        reference: dict[str, Any],
    ) -> None:
        passes = quality_passes(len(windows), self.args.window, len(caches), self.schedule)
        with Progress("quality", passes) as bar:
            done = measure_quality(self.model, windows, caches, self.schedule, bar.advance)
        for name, quality in done.items():
            rows[name]["quality"] = results.quality_data(quality)
            reference["perplexity"] = quality.summary.reference_perplexity

    def _needles(
        self,
        caches: Mapping[str, MakeCache],
        rows: Mapping[str, dict[str, Any]],
        reference: dict[str, Any],
    ) -> None:
        every: dict[str, MakeCache | None] = {PLAIN: None, **caches}
        questions = sum(len(haystack.prompts) for haystack in self.haystacks) * len(every)
        with Progress("needles", questions) as bar:
            done = measure_needles(self.model, self.tokenizer, self.haystacks, every, bar.advance)
        reference["needles"] = results.needles_data(self.haystacks, done.pop(PLAIN))
        for name, retrievals in done.items():
            rows[name]["needles"] = results.needles_data(self.haystacks, retrievals)

    def _greedy(
        self,
        prompts: Windows,
        caches: Mapping[str, MakeCache],
        rows: Mapping[str, dict[str, Any]],
    ) -> None:
        with Progress("greedy", greedy_passes(len(caches), self.args.new_tokens)) as bar:
            done = measure_greedy(self.model, prompts, caches, self.args.new_tokens, bar.advance)
        for name, match in done.items():
            rows[name]["greedy"] = results.greedy_data(match)

    # --- their inputs ---
    def _windows(self) -> Windows:
        self._check_limit("--window", self.args.window)
        return cut_windows(self.tokenizer, self.texts, self.args.window, self.args.windows)

    def _haystacks(self) -> list[Haystack]:
        text = "\n\n".join(text.content for text in self.texts)
        needles = make_needles(self.args.needles, self.args.seed, text)
        contexts = [n for n in self.args.contexts if self.limit is None or n <= self.limit]
        if not contexts:
            raise ValueError(
                f"--contexts {self.args.contexts[0]} is the shortest; the model was made for "
                f"{self.limit} tokens"
            )
        if len(contexts) < len(self.args.contexts):
            left_out = ", ".join(str(n) for n in self.args.contexts if n not in contexts)
            self.notes.append(
                f"contexts of {left_out} tokens are left out: the model was made for {self.limit}"
            )
        return [build_haystack(self.tokenizer, text, context, needles) for context in contexts]

    def _prompts(self) -> Windows:
        self._check_limit("--prompt-tokens + --new-tokens", _greedy_tokens(self.args))
        tokens, count = self.args.prompt_tokens, self.args.prompts
        return cut_windows(self.tokenizer, self.texts, tokens, count)

    def _check_limit(self, what: str, tokens: int) -> None:
        if self.limit is not None and tokens > self.limit:
            raise ValueError(f"{what} is {tokens}; the model was made for {self.limit} tokens")


def _greedy_tokens(args: argparse.Namespace) -> int:
    return int(args.prompt_tokens + args.new_tokens)


def _check_lengths(args: argparse.Namespace, configs: Mapping[str, KVQuantConfig]) -> None:
    """Raise if some task would only read what a config keeps exact."""
    for cfg in configs.values():
        if "quality" in args.tasks:
            check_compresses(cfg, args.window)
        if "needles" in args.tasks:
            check_compresses(cfg, min(args.contexts))
        if "greedy" in args.tasks:
            check_compresses(cfg, _greedy_tokens(args))


def _machine(model: Any) -> dict[str, Any]:
    device = torch.device(model.device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"cpu": collect()["cpu"]["model"], "gpu": gpu, "threads": torch.get_num_threads()}


def _settings(args: argparse.Namespace, haystacks: Sequence[Haystack]) -> dict[str, Any]:
    names = (
        *("window", "windows", "prefill", "chunk", "batch", "needles"),
        *("prompts", "prompt_tokens", "new_tokens", "seed"),
    )
    settings = {name: getattr(args, name) for name in names}
    contexts = [haystack.context for haystack in haystacks]
    return {"tasks": args.tasks, **settings, "contexts": contexts}
