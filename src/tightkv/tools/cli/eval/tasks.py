"""The tasks of one model. Inputs are cut first: a text too short is refused at once."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

from tightkv.config import KVQuantConfig
from tightkv.tools.eval.forward import max_positions
from tightkv.tools.eval.tasks.base import Task
from tightkv.tools.eval.tasks.free_running import FreeTask, GreedyTask
from tightkv.tools.eval.tasks.gsm8k import build_gsm8k
from tightkv.tools.eval.tasks.needles import NeedleTask, build_haystack, make_needles
from tightkv.tools.eval.tasks.probes import (
    ProbeTask,
    build_lambada,
    build_passkeys,
    build_recall,
)
from tightkv.tools.eval.tasks.quality import QualityTask, Schedule, check_compresses
from tightkv.tools.eval.tasks.tools import ToolTask, build_conversation
from tightkv.tools.eval.text import Text
from tightkv.tools.eval.windows import Windows, cut_windows

FIRST_CONTEXT = 512
_WITH_CONTEXTS = ("passkey", "recall", "tools", "needles")


class TaskBuilder:
    """Makes the tasks that were asked for."""

    def __init__(
        self, args: argparse.Namespace, texts: Sequence[Text], model: Any, tokenizer: Any
    ) -> None:
        self.args, self.texts, self.tokenizer = args, texts, tokenizer
        self.limit = max_positions(model)
        self.notes: list[str] = []
        self.contexts = self._contexts() if set(_WITH_CONTEXTS) & set(args.tasks) else []

    def build(self, configs: Iterable[KVQuantConfig]) -> list[Task]:
        tasks = [getattr(self, f"_{name}")() for name in self.args.tasks]
        for task in tasks:
            for cfg in configs:
                if task.name == "gsm8k":
                    check_compresses(cfg, min(map(len, task.prompts)))
                if task.name == "lambada":
                    check_compresses(cfg, task.passages[0].context)
        return tasks

    # --- the tasks ---
    def _quality(self) -> Task:
        self._check_limit("--window", self.args.window)
        windows = cut_windows(self.tokenizer, self.texts, self.args.window, self.args.windows)
        schedule = Schedule(self.args.prefill, self.args.chunk, self.args.batch)
        return QualityTask(self.tokenizer, windows, schedule)

    def _free(self) -> Task:
        a = self.args
        return FreeTask(self._prompts(), a.new_tokens, a.temperature, a.seed, a.batch)

    def _greedy(self) -> Task:
        return GreedyTask(self._prompts(), self.args.new_tokens, batch=self.args.batch)

    def _passkey(self) -> Task:
        how = self.args.depths, self.args.seed
        text = self._text()
        passages = (build_passkeys(self.tokenizer, text, n, *how) for n in self.contexts)
        return ProbeTask("passkey", tuple(passages))

    def _recall(self) -> Task:
        how = self.args.depths, self.args.seed
        passages = (build_recall(self.tokenizer, n, *how) for n in self.contexts)
        return ProbeTask("recall", tuple(passages))

    def _tools(self) -> Task:
        a = self.args
        talks = [build_conversation(self.tokenizer, n, a.calls, a.seed) for n in self.contexts]
        return ToolTask(self.tokenizer, tuple(talks))

    def _needles(self) -> Task:
        text = self._text()
        needles = make_needles(self.args.needles, self.args.seed, text)
        hays = [build_haystack(self.tokenizer, text, n, needles) for n in self.contexts]
        return NeedleTask(self.tokenizer, tuple(hays))

    def _lambada(self) -> Task:
        a = self.args
        task = build_lambada(self.tokenizer, a.lambada, a.prompt_tokens, a.limit, a.chunk)
        self._check_limit("the longest passage of --lambada", task.passages[0].context)
        return task

    def _gsm8k(self) -> Task:
        a = self.args
        task = build_gsm8k(self.tokenizer, a.gsm8k, a.shots, a.limit, a.answer_tokens, a.batch)
        longest = max(map(len, task.prompts)) + a.answer_tokens
        self._check_limit("the longest prompt of --gsm8k + --answer-tokens", longest)
        return task

    # --- their inputs ---
    def _text(self) -> str:
        return "\n\n".join(text.content for text in self.texts)

    def _prompts(self) -> Windows:
        tokens = self.args.prompt_tokens
        self._check_limit("--prompt-tokens + --new-tokens", tokens + self.args.new_tokens)
        return cut_windows(self.tokenizer, self.texts, tokens, self.args.prompts)

    def _contexts(self) -> list[int]:
        if not self.args.contexts:
            return self._doubling_contexts()
        contexts = [n for n in self.args.contexts if self.limit is None or n <= self.limit]
        if not contexts:
            raise ValueError(
                f"--contexts {self.args.contexts[0]} is the shortest; the model was made for "
                f"{self.limit} tokens"
            )
        if len(contexts) < len(self.args.contexts):
            left_out = ", ".join(str(n) for n in self.args.contexts if n not in contexts)
            self.notes.append(
                f"contexts of {left_out} tokens are skipped: the model's limit is {self.limit}"
            )
        return contexts

    def _doubling_contexts(self) -> list[int]:
        """512, 1024 and so on, up to the model's full context or --max-context."""
        cap = self.args.max_context
        last = cap if self.limit is None else min(cap, self.limit)
        if self.limit is not None and cap < self.limit:
            self.notes.append(
                f"contexts end at {cap} tokens; --max-context {self.limit} is all that the model "
                "was made for"
            )
        contexts: list[int] = []
        while FIRST_CONTEXT << len(contexts) < last:
            contexts.append(FIRST_CONTEXT << len(contexts))
        return [*contexts, last]

    def _check_limit(self, what: str, tokens: int) -> None:
        if self.limit is not None and tokens > self.limit:
            raise ValueError(f"{what} is {tokens}; the model was made for {self.limit} tokens")


def check_lengths(args: argparse.Namespace, configs: Iterable[KVQuantConfig]) -> None:
    """Raise if some task would only read what a config keeps exact."""
    shortest = min(args.contexts or [min(FIRST_CONTEXT, args.max_context)])
    for cfg in configs:
        if "quality" in args.tasks:
            check_compresses(cfg, args.window)
        if set(_WITH_CONTEXTS) & set(args.tasks):
            check_compresses(cfg, shortest)
        if {"free", "greedy"} & set(args.tasks):
            check_compresses(cfg, args.prompt_tokens + args.new_tokens)
