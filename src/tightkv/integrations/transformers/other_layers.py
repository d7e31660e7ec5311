"""Layers, or parts of layers, that a TightCache leaves as transformers keeps them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers.cache_utils import LinearAttentionLayer


@contextmanager
def all_or_none(layers: Sequence[Any]) -> Iterator[None]:
    """Put layers back as they were if one of them refuses.

    Attributes and their dicts are put back: the layers' own operations replace tensors, and
    never write into them.
    """
    before = [
        {name: dict(x) if isinstance(x, dict) else x for name, x in vars(layer).items()}
        for layer in layers
    ]
    try:
        yield
    except BaseException:
        for layer, state in zip(layers, before, strict=True):
            vars(layer).clear()
            vars(layer).update(state)
        raise


def crop(layer: Any, number: int, keep: int, removed: int) -> None:
    """Crop one of transformers' own layers, or a hybrid layer's linear part, to `keep` tokens.

    Layers that record the past also drop what they do not need, even if no token is removed.
    """
    if isinstance(layer, LinearAttentionLayer):
        if not any(layer.is_conv_states_initialized.values()):
            return
        if not removed and not layer.record_past:
            return
        if removed and any(layer.is_recurrent_states_initialized.values()):
            raise RuntimeError(
                f"layer {number} has a recurrent state, which cannot be cropped by {removed} "
                "tokens; compute the cache again"
            )
        LinearAttentionLayer.crop(layer, -removed)
        for i, state in layer.conv_states.items():
            if state is not None and state.shape[-1] < layer.conv_kernel_size[i]:
                raise RuntimeError(_too_far(number, removed))
        return
    if not layer.is_initialized:
        return
    removed = max(0, layer.get_seq_length() - keep)
    if not removed and not getattr(layer, "record_past", False):
        return
    layer.crop(-removed)
    held, window = layer.keys.shape[-2], getattr(layer, "sliding_window", None)
    wanted = keep if window is None else min(keep, window - 1)
    if held < wanted:
        raise RuntimeError(_too_far(number, removed))


def _too_far(number: int, removed: int) -> str:
    return (
        f"layer {number} has not recorded enough to be cropped by {removed} tokens; call "
        "activate_past_recording() before they are added, or compute the cache again"
    )


def forget_states(layer: LinearAttentionLayer) -> None:
    """Make linear-attention states as new: the next batch may have another size."""
    recording = layer.record_past
    LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
    layer.record_past = recording
