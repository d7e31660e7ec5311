"""Questions about a document, in the words and tokens the model was made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tightkv.tools.eval.windows import beginning, encode


def ask(tokenizer: Any, document: str, questions: Sequence[str]) -> list[list[int]]:
    """A prompt per question, up to where the answer begins."""
    prompts = []
    for question in questions:
        text = f"Document:\n\n{document}\n\nQuestion: {question}"
        if tokenizer.chat_template is None:
            prompts.append(beginning(tokenizer) + encode(tokenizer, f"{text}\nAnswer:"))
            continue
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        prompts.append(encode(tokenizer, chat))
    return prompts


def begin_reply(tokenizer: Any, words: str) -> list[int]:
    """The first words of a reply, after which only the answer itself can come."""
    return encode(tokenizer, words if tokenizer.chat_template is not None else f" {words}")


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with; less than the whole of any."""
    count = 0
    for tokens in zip(*prompts, strict=False):
        if len(set(tokens)) > 1:
            return count
        count += 1
    return max(0, count - 1)
