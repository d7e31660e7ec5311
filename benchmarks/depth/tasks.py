"""The task file: prompts at depth, whose contexts share texts that are stored once.

A stream is a list of texts, about 28k tokens long. The context of a prompt is the first `pieces`
texts of its stream, so prompts of different depths share a prefix, which an engine computes once.
"""

from __future__ import annotations

import json
import lzma
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
FAMILIES = ("humaneval", "mbpp", "gsm8k", "math", "repository", "ruler", "tools", "json")
_MARK = "\u0001content\u0001"


@dataclass(frozen=True)
class Prompt:
    """One question after its context, and how its answer is judged."""

    id: str
    family: str
    problem: str
    """What answers are paired by: prompts of one problem at several depths are no new problems."""
    depth: int
    """Tokens of context that were asked for."""
    stream: str
    pieces: int
    question: str
    check: dict[str, Any]
    max_tokens: int
    stop: tuple[str, ...] = ()
    chat: bool = True
    """False: the text is continued as it is."""


@dataclass
class TaskFile:
    """Texts, streams of them, and prompts."""

    texts: list[str] = field(default_factory=list)
    streams: dict[str, list[int]] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = {text: i for i, text in enumerate(self.texts)}

    def add_stream(self, name: str, texts: Sequence[str]) -> None:
        for text in texts:
            if text not in self._places:
                self._places[text] = len(self.texts)
                self.texts.append(text)
        self.streams[name] = [self._places[text] for text in texts]

    def context(self, prompt: Prompt) -> list[str]:
        return [self.texts[i] for i in self.streams[prompt.stream][: prompt.pieces]]

    def save(self, path: Path) -> None:
        data = {
            "schema": SCHEMA,
            "texts": self.texts,
            "streams": self.streams,
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }
        text = json.dumps(data, ensure_ascii=False).encode()
        path.write_bytes(lzma.compress(text) if path.suffix == ".xz" else text)

    @classmethod
    def load(cls, path: Path) -> TaskFile:
        raw = path.read_bytes()
        data = json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
        if data.get("schema") != SCHEMA:
            raise ValueError(f"{path}: schema {data.get('schema')}; supported: {SCHEMA}")
        prompts = [Prompt(**{**row, "stop": tuple(row["stop"])}) for row in data["prompts"]]
        return cls(data["texts"], data["streams"], prompts)


class Encoder:
    """Prompts as tokens: each text is tokenized once, and prompts of a stream share a prefix."""

    def __init__(self, tokenizer: Any, file: TaskFile) -> None:
        self.tokenizer, self.file = tokenizer, file
        self._known: dict[int, list[int]] = {}
        self._ends = self._chat_ends()

    def _chat_ends(self) -> tuple[str, str]:
        """What the chat template puts before and after a message of the user."""
        message = [{"role": "user", "content": _MARK}]
        text = self.tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        head, _, tail = text.partition(_MARK)
        return head, tail

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text_ids(self, place: int) -> list[int]:
        if place not in self._known:
            self._known[place] = self.ids(self.file.texts[place])
        return self._known[place]

    def encode(self, prompt: Prompt) -> list[int]:
        head, tail = self._ends if prompt.chat else ("", "")
        found = self.ids(head) if head else []
        for place in self.file.streams[prompt.stream][: prompt.pieces]:
            found += self._text_ids(place)
        return found + self.ids(prompt.question + tail)


def in_turn(prompts: Sequence[Prompt]) -> Iterator[Prompt]:
    """Stream by stream, short contexts first, one stream of each family in turn.

    A run that is cut short has then answered some of every family and length.
    """
    streams: dict[str, dict[str, list[Prompt]]] = {}
    for prompt in prompts:
        streams.setdefault(prompt.family, {}).setdefault(prompt.stream, []).append(prompt)
    waiting = {
        family: [sorted(own, key=lambda p: p.pieces) for own in of.values()]
        for family, of in streams.items()
    }
    for own in waiting.values():
        random.Random(0).shuffle(own)
    counts: Mapping[str, int] = {family: len(own) for family, own in waiting.items()}
    # a family of many short streams gives as large a share of them as one of few long ones
    order = sorted(
        ((i + 0.5) / counts[family], family, i) for family in waiting for i in range(counts[family])
    )
    for _, family, i in order:
        yield from waiting[family][i]
