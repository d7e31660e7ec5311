"""Windows of tokens, spread evenly over the texts they are cut from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tightkv.tools.eval.text import Text, beginning, encode


@dataclass(frozen=True)
class Windows:
    """Token ids [n, tokens], and the name of the text each row is from."""

    ids: Tensor
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sources)


def cut_windows(tokenizer: Any, texts: Sequence[Text], tokens: int, count: int) -> Windows:
    """`count` windows that do not overlap, as many from each text as its length allows.

    Each begins with the token the model's texts begin with, if there is one.
    """
    if tokens < 2 or count < 1:
        raise ValueError(f"{count} windows of {tokens} tokens; at least 1 of 2 tokens is needed")
    if not texts:
        raise ValueError("no text was given; at least one is needed")
    first = beginning(tokenizer)
    own = tokens - len(first)
    encoded = [torch.tensor(encode(tokenizer, text.content), device="cpu") for text in texts]
    room = [len(ids) // own for ids in encoded]
    for text, ids, windows in zip(texts, encoded, room, strict=True):
        if not windows:
            raise ValueError(
                f"the text {text.name!r} has {len(ids)} tokens, fewer than a window of {tokens}; "
                "give a longer text or a smaller --window"
            )
    begin = torch.tensor(first, dtype=torch.long, device="cpu")
    rows, sources = [], []
    for text, ids, share in zip(texts, encoded, _shares(room, tokens, count), strict=True):
        for i in range(share):
            start = (2 * i + 1) * (len(ids) - own * share) // (2 * share) + i * own
            rows.append(torch.cat([begin, ids[start : start + own]]))
            sources.append(text.name)
    return Windows(torch.stack(rows), tuple(sources))


def _shares(room: Sequence[int], tokens: int, count: int) -> list[int]:
    """How many windows each text gives: evenly, the rest from those that have more."""
    if sum(room) < count:
        raise ValueError(
            f"the texts hold {sum(room)} windows of {tokens} tokens, not {count}; "
            "give more text or a smaller --windows"
        )
    shares = [0] * len(room)
    while sum(shares) < count:
        open_texts = [i for i in range(len(room)) if shares[i] < room[i]]
        shares[min(open_texts, key=lambda i: shares[i])] += 1
    return shares
