"""A server's loop over batches: requests join while others are answered, and leave when done.

python examples/batch_server.py
python examples/batch_server.py --places 4 --max-new-tokens 32 "Name a color." "What is a prime?"

Requests that wait are read together, padded on the left, and form a group with a TightCache of its
own. Each round decodes one token of every group. Answers that have ended are taken out of their
group at once (`batch_select_indices`), which frees their pages and makes room for those that wait.
For many users at once, use vLLM (`tightkv serve`), which decodes all requests in one batch.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tightkv import TightCache
from tightkv.tools.model_loading.load import load_model

QUESTIONS = (
    "Why is the sky blue?",
    "Name three fruits.",
    "Write one sentence about a dog that lives on a farm near a river.",
    "What is 2 + 2?",
    "What does a compiler do? Answer for somebody who has never written a program.",
)


@dataclass
class Request:
    number: int
    question: str
    tokens: list[int] = field(default_factory=list)


class Group:
    """Requests that were read together: a row of the cache for each that is not answered yet."""

    def __init__(self, server: Server, requests: list[Request]) -> None:
        self.server, self.requests = server, requests
        self.cache = TightCache(server.preset, model=server.model)
        prompts = [server.encode(request.question) for request in requests]
        batch = server.tokenizer.pad(
            {"input_ids": prompts}, padding_side="left", return_tensors="pt"
        )
        self.mask = batch["attention_mask"].to(server.model.device)
        self.next = self._step(batch["input_ids"].to(server.model.device))

    def _step(self, ids: Tensor) -> Tensor:
        """The best next token of each row: [rows, 1]."""
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            logits = self.server.model(
                ids,
                attention_mask=self.mask,
                position_ids=positions,
                past_key_values=self.cache,
                logits_to_keep=1,
            ).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def decode(self) -> list[Request]:
        """One token for each request; returns those whose answers have ended."""
        for request, token in zip(self.requests, self.next[:, 0].tolist(), strict=True):
            request.tokens.append(token)
        ended = [request for request in self.requests if self.server.has_ended(request)]
        stay = [n for n, request in enumerate(self.requests) if request not in ended]
        if stay and ended:
            rows = torch.tensor(stay, device=self.mask.device)
            self.cache.batch_select_indices(rows)
            self.mask, self.next = self.mask[rows], self.next[rows]
        self.requests = [self.requests[n] for n in stay]
        if stay:
            self.mask = torch.cat([self.mask, torch.ones_like(self.next)], dim=1)
            self.next = self._step(self.next)
        return ended


class Server:
    def __init__(self, source: str | None, preset: str, places: int, max_new_tokens: int) -> None:
        self.model, self.tokenizer = load_model(source)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.preset, self.places, self.max_new_tokens = preset, places, max_new_tokens
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def encode(self, question: str) -> list[int]:
        message = [{"role": "user", "content": question}]
        encoded: Any = self.tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def has_ended(self, request: Request) -> bool:
        return request.tokens[-1] in self.ends or len(request.tokens) == self.max_new_tokens

    def run(self, waiting: deque[Request]) -> Iterator[tuple[Request, int]]:
        """Requests as they end, with the number of those that were decoded at the same time."""
        groups: list[Group] = []
        while waiting or groups:
            running = sum(len(group.requests) for group in groups)
            if free := min(self.places - running, len(waiting)):
                groups.append(Group(self, [waiting.popleft() for _ in range(free)]))
                running += free
            for group in groups:
                yield from ((request, running) for request in group.decode())
            groups = [group for group in groups if group.requests]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS))
    parser.add_argument("--model", help="a folder or a hub id; the bundled model by default")
    parser.add_argument("--preset", default="k4v4")
    parser.add_argument("--places", type=int, default=3, help="requests at a time (3)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args(arguments)
    if min(args.places, args.max_new_tokens) < 1:
        parser.error("--places and --max-new-tokens must be at least 1")
    server = Server(args.model, args.preset, args.places, args.max_new_tokens)
    waiting = deque(Request(n, question) for n, question in enumerate(args.questions))
    for request, running in server.run(waiting):
        answer = server.tokenizer.decode(request.tokens, skip_special_tokens=True).strip()
        print(f"[{request.number}, one of {running} at a time] {request.question}\n{answer}\n")


if __name__ == "__main__":
    main()
