"""Padding: what an attention mask hides on the left of each row, and whether it hides more."""

from typing import NamedTuple

import torch
from torch import Tensor

_NOTE = "_tightkv_padding"


class Padding(NamedTuple):
    """The first key of each row that some query sees; all keys where none is seen."""

    starts: tuple[int, ...]
    causal: bool  # nothing is hidden but keys before the start and after the query


def note_padding(mask: Tensor, padding: Padding) -> None:
    """Attach a mask's padding to it, for `noted_padding`."""
    setattr(mask, _NOTE, (padding, _version(mask)))


def noted_padding(mask: Tensor | None, batch: int) -> Padding | None:
    """What `note_padding` attached; None if the mask is another's or was changed since."""
    if mask is None:
        return Padding((0,) * batch, causal=True)
    padding, version = getattr(mask, _NOTE, (None, None))
    return padding if version == _version(mask) else None


def left_padding(visible: Tensor) -> Padding:
    """The padding of a causal mask whose keys are visible or not: bool [B, keys].

    `causal` says whether all hidden keys are on the left. Waits for the device once.
    """
    keys = visible.shape[1]
    starts = keys - visible.sum(1)
    on_the_left = visible == (torch.arange(keys, device=visible.device) >= starts[:, None])
    *counts, causal = torch.cat([starts, on_the_left.all()[None].to(starts.dtype)]).tolist()
    return Padding(tuple(counts), bool(causal))


def seen_padding(mask: Tensor, batch: int) -> Padding:
    """The padding of any mask [B|1, H|1, queries, keys], bool or added to scores."""
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min
    seen = seen.any(2).any(1).expand(batch, -1)  # [B, keys]
    starts = torch.where(seen.any(-1), seen.int().argmax(-1), seen.shape[-1])
    return Padding(tuple(starts.tolist()), causal=False)


def _version(mask: Tensor) -> int | None:
    """Counts changes in place; tensors of inference mode do not."""
    return None if mask.is_inference() else mask._version
