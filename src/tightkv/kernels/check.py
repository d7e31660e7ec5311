"""What append and attend accept: rank, dtype, device and ranges, in one place.

`PagedKV.append` and `attention.attend` call these; kernels rely on them.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tightkv.pages.layout import PageLayout

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def expect(
    name: str,
    x: Tensor,
    shape: tuple[int | str, ...],
    device: torch.device,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Check the rank and each size (a name stands for any), then dtype, then device.

    A device has a number if its tensors have one: cuda:0, not cuda.
    """
    if not _fits(x.shape, shape):
        wanted = f"[{', '.join(map(str, shape))}]"
        raise ValueError(f"{name} has shape {list(x.shape)}; expected {wanted}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} is {_name(x.dtype)}; supported: {', '.join(map(_name, dtypes))}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device}; the cache is on {device}")


def check_new_tokens(layout: PageLayout, key: Tensor, value: Tensor, names: str = "") -> None:
    """Keys and values of new tokens have the same shape and the same dtype."""
    if key.shape != value.shape:
        raise ValueError(
            f"{names}key {list(key.shape)} and {names}value {list(value.shape)} must agree"
        )
    if key.dtype != value.dtype:
        raise ValueError(
            f"{names}key is {_name(key.dtype)}, {names}value is {_name(value.dtype)}; "
            f"both must have one dtype: cast them to {_name(layout.dtype)}"
        )


def check_feedback(layout: PageLayout, feedback: Tensor, device: torch.device) -> None:
    """The factors are those that `Codec.feedback_factors` makes for a layer of this layout."""
    heads, d = layout.num_kv_heads, layout.head_dim
    expect("feedback", feedback, (heads, d, d), device, (torch.float32,))
    if not feedback.is_contiguous():
        raise ValueError("feedback must be contiguous; call .contiguous() on it")
    if not layout.cfg.takes_feedback:
        raise ValueError(
            f"feedback for {layout.cfg.name}: only mse keys of 2, 3 and 4 bits without outlier "
            "channels are coded with it"
        )


def check_heads(layout: PageLayout, query_heads: int) -> None:
    if query_heads % layout.num_kv_heads or not query_heads:
        raise ValueError(
            f"query has {query_heads} heads; the cache has {layout.num_kv_heads}: "
            "not a whole multiple"
        )


def check_options(
    *, scale: float | None = None, window: int | None = None, softcap: float | None = None
) -> None:
    """Options that change the scores are in their range."""
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale={scale}; it must be a finite number, or None for 1/sqrt(head_dim)")
    if window is not None and window < 1:
        raise ValueError(f"window={window}; it must be at least 1, or None for no window")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}; it must be positive, or None for no cap")


def check_mask(mask: Tensor, batch: int, heads: int, queries: int, device: torch.device) -> None:
    """A mask is [B or 1, heads or 1, queries, tokens], bool or float."""
    expect(
        "mask", mask, ("B", "Hq", queries, "tokens"), device, (torch.bool, *FLOATS, torch.float64)
    )
    if mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads):
        raise ValueError(
            f"mask has shape {list(mask.shape)}; expected "
            f"[{batch} or 1, {heads} or 1, {queries}, tokens]"
        )


def check_mask_tokens(mask: Tensor, tokens: int) -> None:
    if mask.shape[3] < tokens:
        raise ValueError(f"mask covers {mask.shape[3]} tokens; the cache has {tokens}")


def _fits(sizes: Sequence[int], shape: tuple[int | str, ...]) -> bool:
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):  # a step makes many of these: no generator
        if size != wanted and not isinstance(wanted, str):
            return False
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
