"""CacheRun: a model with a cache, fed token by token or in chunks. Every task runs on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.attention import use_attention
from tightkv.integrations.transformers.layer import TightLayer

TIGHT_ATTENTION = "tightkv"
# Last tokens of a prompt that go in after the rest, so that they read the cache.
TAIL_TOKENS = 64

# A cache that is empty at first; called once for each batch.
MakeCache = Callable[[], TightCache]
# Told of the work that is done.
Advance = Callable[[int], None]
# Called with a title and a number of steps; the bar is told of each step.
Bars = Callable[[str, int], AbstractContextManager[Any]]
# The next tokens [B] from logits [B, V] and the number of tokens chosen before.
Choose = Callable[[Tensor, int], Tensor]


class CacheRun:
    """Feeds tokens to a model through one cache; the uncompressed one if `cache` is None."""

    def __init__(self, model: Any, cache: TightCache | None = None) -> None:
        self.model = model
        self.attention = exact_attention(model) if cache is None else TIGHT_ATTENTION
        self.cache: Any = DynamicCache(config=model.config) if cache is None else cache

    @torch.inference_mode()
    def feed(self, ids: Tensor, last_only: bool = False) -> Tensor:
        """Append tokens [B, T]; their logits [B, T, V], or [B, 1, V] of the last one alone."""
        options = last_logits(self.model) if last_only else {}
        with use_attention(self.model, self.attention):
            out = self.model(ids.to(self.model.device), past_key_values=self.cache, **options)
        logits: Tensor = out.logits
        return logits[:, -1:] if last_only else logits

    def feed_prompt(self, ids: Tensor) -> Tensor:
        """A prompt [B, N] in two passes, so that its last tokens read the cache."""
        if ids.shape[1] > TAIL_TOKENS:
            self.feed(ids[:, :-TAIL_TOKENS], last_only=True)
            ids = ids[:, -TAIL_TOKENS:]
        return self.feed(ids, last_only=True)

    def decode(
        self, prompts: Tensor, new_tokens: int, choose: Choose, advance: Advance
    ) -> tuple[Tensor, Tensor]:
        """Tokens [B, new_tokens] after prompts [B, N], and the log-probability of each.

        They are fed back one by one; ends of text do not stop it.
        """
        tokens, scores = [], []
        logits = self.feed_prompt(prompts)
        for i in range(new_tokens):
            tokens.append(choose(logits[:, -1], i))
            log_q = logits[:, -1].float().log_softmax(-1)
            scores.append(log_q.gather(-1, tokens[-1][:, None])[:, 0])
            advance(1)
            if i + 1 < new_tokens:
                logits = self.feed(tokens[-1][:, None], last_only=True)
        return torch.stack(tokens, 1).cpu(), torch.stack(scores, 1).cpu()

    def score(self, ids: Tensor, chunk: int) -> Tensor:
        """Append tokens [B, T], `chunk` a pass: the log-probabilities [B, T - 1] after the first.

        The last token is scored, but not appended.
        """
        scores = []
        for at in range(0, ids.shape[1] - 1, chunk):
            wanted = ids[:, at + 1 : at + chunk + 1]
            log_p = self.feed(ids[:, at : at + wanted.shape[1]]).float().log_softmax(-1)
            scores.append(log_p.gather(-1, wanted.to(log_p.device)[..., None])[..., 0].cpu())
        return torch.cat(scores, 1)

    @torch.inference_mode()
    def write_line(self, tokenizer: Any, prompt: Sequence[int], most: int) -> str:
        """The greedy line after a prompt; what the cache holds of it already is not read again."""
        ids = torch.tensor([list(prompt)], device=self.model.device)

        def text(tokens: Tensor) -> str:
            new = tokens[0, len(prompt) :]
            return str(tokenizer.decode(new, skip_special_tokens=True)).lstrip()

        def finished(tokens: Tensor, scores: Any, **_: Any) -> Tensor:
            return torch.tensor(["\n" in text(tokens)], device=tokens.device)

        ends = end_tokens(self.model)
        with use_attention(self.model, self.attention):
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self.cache,
                stopping_criteria=[finished],
                max_new_tokens=most,
                do_sample=False,
                num_beams=1,
                repetition_penalty=1.0,
                pad_token_id=ends[0] if ends else 0,
            )
        return text(out).split("\n")[0].strip()

    @property
    def can_rewind(self) -> bool:
        """Whether tokens can be taken out of every layer; sliding windows forget too much."""
        return all(
            isinstance(layer, TightLayer) or type(layer) is DynamicLayer
            for layer in self.cache.layers
        )


def after_prefix(
    model: Any, make: MakeCache | None, prefix: Sequence[int], count: int
) -> Iterator[CacheRun]:
    """`count` times a run that holds the prefix alone; None makes the uncompressed cache.

    The prefix goes in once, and what was fed after it is taken out again; a cache with layers
    that cannot be cropped is filled anew.
    """
    run: CacheRun | None = None
    for _ in range(count):
        if run is None or not run.can_rewind:
            run = CacheRun(model, None if make is None else make())
            if prefix:
                run.feed(torch.tensor([list(prefix)], device="cpu"), last_only=True)
        elif newer := run.cache.get_seq_length() - len(prefix):
            run.cache.crop(-newer)
        yield run


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, less those that are read again over the cache."""
    alike = takewhile(lambda row: len(set(row)) == 1, zip(*prompts, strict=False))
    return max(0, min(len(list(alike)), min(map(len, prompts)) - 1) - TAIL_TOKENS)


def write_lines(
    model: Any,
    make: MakeCache | None,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    most: int,
    advance: Advance,
) -> list[str]:
    """A line after each prompt; what they begin with goes into the cache once."""
    lines, prefix = [], prompts[0][: shared_tokens(prompts)]
    runs = after_prefix(model, make, prefix, len(prompts))
    for prompt, run in zip(prompts, runs, strict=True):
        lines.append(run.write_line(tokenizer, prompt, most))
        advance(1)
    return lines


def exact_attention(model: Any) -> str:
    """What the uncompressed cache is read with: sdpa, or eager where a model has no sdpa."""
    return "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"


def max_positions(model: Any) -> int | None:
    """The longest sequence the model was made for, where its config says so."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None


def last_logits(model: Any, count: int = 1) -> dict[str, int]:
    """Options of a pass that needs the logits of its last tokens alone, if the model takes them."""
    takes = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"logits_to_keep": count} if takes else {}


def end_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a text."""
    ends = model.generation_config.eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def ignore(steps: int = 1) -> None:
    """An `Advance` for those who do not want to know."""


def no_bars(title: str, steps: int) -> AbstractContextManager[Any]:
    """`Bars` that show nothing."""
    return nullcontext(SimpleNamespace(advance=ignore))


def likeliest(logits: Tensor, step: int) -> Tensor:
    """Greedy choice."""
    return logits.argmax(-1)
