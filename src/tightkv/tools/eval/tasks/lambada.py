"""LAMBADA from a local file: the last word of a passage, by likelihood and as the likeliest word.

The first passages of the file are not scored: they stand before each of the others, so that
there is a cache to read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tightkv.tools.eval.tasks.probes import Passage, Probe, ProbeTask
from tightkv.tools.eval.text import read_examples
from tightkv.tools.eval.windows import beginning, encode


def build_lambada(
    tokenizer: Any, path: str | Path, prefix_tokens: int, limit: int, chunk: int
) -> ProbeTask:
    """At most `limit` passages, each after the same `prefix_tokens` tokens or a few more."""
    texts = [row["text"].strip() for row in read_examples(path, ["text"])]
    for number, text in enumerate(texts, 1):
        if len(text.split()) < 2:
            raise ValueError(
                f"file {str(path)!r}: passage {number} is {text!r}; it needs two words or more"
            )
    prefix, used = beginning(tokenizer), 0
    while len(prefix) < prefix_tokens and used < len(texts):
        prefix += encode(tokenizer, f"{texts[used]}\n\n")
        used += 1
    if used >= len(texts):
        raise ValueError(
            f"file {str(path)!r} has {len(texts)} passages, which fill the {prefix_tokens} tokens "
            "that stand before the scored ones and leave none; give a longer file or fewer "
            "--prompt-tokens"
        )
    probes = []
    for text in texts[used : used + limit]:
        start, word = text.rsplit(maxsplit=1)
        question, answer = encode(tokenizer, start), encode(tokenizer, f" {word}")
        probes.append(Probe(word, 1.0, tuple(question), tuple(answer)))
    longest = len(prefix) + max(len(p.question) + len(p.answer) for p in probes)
    return ProbeTask("lambada", (Passage(longest, tuple(prefix), tuple(probes)),), chunk)
