"""Texts as tokens, and questions about a document in the words the model was made for."""

from collections.abc import Sequence
from typing import Any


def encode(tokenizer: Any, content: str) -> list[int]:
    """Token ids without special tokens, however long the text is."""
    ids: list[int] = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def beginning(tokenizer: Any) -> list[int]:
    """The begin-of-text token where the tokenizer puts one before a text, else nothing."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if len(ids) > 1 and ids[0] == tokenizer.bos_token_id else []


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
