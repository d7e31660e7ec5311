"""Questions about a document, in the words and tokens the model was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightkv.tools.eval.windows import beginning, encode


def ask(tokenizer: Any, document: str, questions: Sequence[str]) -> list[list[int]]:
    """A prompt per question, up to where the answer begins."""
    texts = [f"Document:\n\n{document}\n\nQuestion: {question}" for question in questions]
    if tokenizer.chat_template is None:
        first = beginning(tokenizer)
        return [first + encode(tokenizer, f"{text}\nAnswer:") for text in texts]
    return [encode(tokenizer, as_chat(tokenizer, text)) for text in texts]


def as_chat(tokenizer: Any, text: str) -> str:
    """A user's message in the model's chat template, up to where the answer begins."""
    message = {"role": "user", "content": text}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def begin_reply(tokenizer: Any, words: str) -> list[int]:
    """The first words of a reply, after which only the answer itself can come."""
    return encode(tokenizer, words if tokenizer.chat_template is not None else f" {words}")
