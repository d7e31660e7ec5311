"""The prompts of tightkv generate: read, put into the chat template, encoded and checked."""

import sys
from pathlib import Path
from typing import Any

from tightkv.tools.eval.text import as_chat

QUESTION = "Give a short summary of the text above."
_FIRST_TOPIC = "execmodel"


def read_prompts(prompts: list[str], file: str | None, has_context: bool) -> list[str]:
    """From --prompt, else --prompt-file, else standard input; a long context has a question."""
    if prompts and file is not None:
        raise ValueError("--prompt and --prompt-file both give the prompt; keep one of them")
    if prompts:
        texts = prompts
    elif file is not None:
        try:
            texts = [Path(file).read_text(encoding="utf-8")]
        except UnicodeDecodeError:
            raise ValueError(f"prompt file {file!r} is not UTF-8 text") from None
    elif has_context:
        texts = [QUESTION]
    elif sys.stdin is None or sys.stdin.isatty():
        raise ValueError("no prompt; give --prompt TEXT, --prompt-file FILE, or standard input")
    else:
        texts = [sys.stdin.read()]
    for text in texts:
        if not text.strip():
            raise ValueError("the prompt is empty; give --prompt TEXT with some text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            raise ValueError(f"character {error.start} of the prompt is not Unicode text") from None
    return texts


def long_context(tokenizer: Any, tokens: int) -> str:
    """About so many tokens of Python's own language reference, which every Python carries."""
    from pydoc_data.topics import topics

    names = sorted(topics, key=lambda name: (name < _FIRST_TOPIC, name))
    ids = tokenizer.encode("\n\n".join(topics[name] for name in names), add_special_tokens=False)
    if len(ids) < tokens:
        raise ValueError(f"--long-prompt {tokens}; the text has only {len(ids)} tokens")
    return str(tokenizer.decode(ids[:tokens]))


def encode(tokenizer: Any, prompts: list[str], raw: bool) -> Any:
    """input_ids and attention_mask [B, tokens], padded on the left."""
    chat = not raw and getattr(tokenizer, "chat_template", None) is not None
    if chat:
        prompts = [as_chat(tokenizer, prompt) for prompt in prompts]
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # A template writes its own first token.
    return tokenizer(
        prompts,
        add_special_tokens=not chat,
        padding=len(prompts) > 1,
        padding_side="left",
        return_attention_mask=True,
        return_token_type_ids=False,
        return_tensors="pt",
    )


def check_length(prompt_tokens: int, new_tokens: int, limit: int | None) -> None:
    """The model has no positions for more than `limit` tokens."""
    if limit is None or prompt_tokens + new_tokens <= limit:
        return
    if prompt_tokens >= limit:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens; the model takes {limit} with its answer; "
            "shorten the prompt"
        )
    raise ValueError(
        f"the prompt has {prompt_tokens} tokens and --max-new-tokens {new_tokens} makes "
        f"{prompt_tokens + new_tokens}; the model takes {limit}; "
        f"give --max-new-tokens {limit - prompt_tokens} or less"
    )
