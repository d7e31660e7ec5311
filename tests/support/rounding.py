"""Encoders against the reference where both round: bounds from the sums, then every byte.

A kernel adds in an order of its own. What it stores may differ from the reference's only where the
exact number is nearer to a threshold than such sums can miss. `following` checks that number by
number and lets the reference go on with the kernel's choice, so that all other bytes must agree.
"""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch

from tightkv.kernels import reference
from tightkv.math.feedback import gain
from tightkv.math.quantize import _SCALES
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout
from tightkv.pages.window import rotated

UNIT = 2.0**-24  # of float32: half of the distance between neighbours at 1
HALF = 2.0**-11  # of float16
TINY = torch.finfo(torch.float32).tiny
LEAST_HALF = 2.0**-25  # half of the distance between subnormal ones


@contextmanager
def following(ours, float32_sums=False):
    """Within, the reference appends what `ours` has just appended, with its means.

    With `float32_sums`, of dense rotations, also with its codes and scales. Sums in float64, as the
    reference has them, are rounded once: their order shows in one of 2**29.
    """
    plain_seal, plain_store = reference.seal, reference.store
    layout = ours.layout
    dense = float32_sums and ours.codec.key.rotation.kind == "haar"

    def seal(codec, pages, page_ids, tokens, keep, pad, feedback=None):
        made = ours.pages[page_ids.long()]
        offset = torch.arange(layout.page_size, device=pages.device)

        def take_mean(layout, records, mean):
            records[..., layout.mean_offset :] = made[..., layout.mean_offset :]

        def take_key(codec, y, mean=None, feedback=None):
            got = layout.read(made, "key")
            new = (offset >= keep[:, None])[:, None, :, None]
            check_key(codec, y, mean, feedback, got, new)
            return got

        def take_value(codec, side, y):
            got = layout.read(made, "value")
            new = (offset >= keep[:, None])[:, None, :, None]
            check_fields(codec.value, y, missed_by(y), None, got, new)
            return got

        with ExitStack() as hooks:
            if codec.cfg.centered:
                check_mean(codec, made, rotated(codec, *tokens)[0], keep, pad)
                hooks.enter_context(patch.object(PageLayout, "write_mean", take_mean))
            if dense:
                name = "encode_centered" if codec.cfg.centered else "encode_keys"
                hooks.enter_context(patch.object(Codec, name, take_key))
                hooks.enter_context(patch.object(Codec, "encode_rotated", take_value))
            plain_seal(codec, pages, page_ids, tokens, keep, pad, feedback)

    def store(codec, pages, tokens, page, offset):
        def take(codec, side, y):
            got = layout.read(ours.pages[page], side)  # [n, Hkv, page_size, count]
            got = {name: field[torch.arange(len(page)), :, offset] for name, field in got.items()}
            check_fields(codec.side(side), y, missed_by(y), None, got)
            return got

        with ExitStack() as hooks:
            if dense:
                hooks.enter_context(patch.object(Codec, "encode_rotated", take))
            plain_store(codec, pages, tokens, page, offset)

    with patch.object(reference, "seal", seal), patch.object(reference, "store", store):
        yield


def missed_by(y):
    """What a float32 sum may miss of a coordinate of rotated y [..., dim] -> [..., 1]."""
    # The sum of |R_ij x_j| is at most |x| = |y|: rows of R have unit length.
    return (y.shape[-1] + 2) * UNIT * y.double().norm(dim=-1, keepdim=True)


def check_mean(codec, records, y, keep, pad):
    """Means of records are the exact ones of rotated keys [n, page_size, Hkv, D], rounded once."""
    layout = codec.layout
    y = y.transpose(1, 2).double()  # [n, Hkv, page_size, D]
    real = (torch.arange(layout.page_size, device=y.device) >= pad[:, None]).double()
    share = (real / real.sum(1, keepdim=True).clamp_min(1))[:, None, :, None]
    mean = (y * share).sum(2)
    sums = layout.page_size + layout.head_dim + 4
    missed = sums * UNIT * (y.norm(dim=-1, keepdim=True) * share).sum(2)
    found = layout.read_mean(records).double()
    if layout.cfg.mean_bits == 16:
        step = 2 * HALF * found.abs() + 2 * LEAST_HALF
    else:
        at = layout.mean_offset + layout.head_dim
        step = records[..., at : at + 2].contiguous().view(torch.float16).double()
        top = mean.abs().amax(-1, keepdim=True) / 127
        off = (step - top).abs() <= HALF * top + missed / 127 + LEAST_HALF
        assert off[keep == 0].all(), "steps of means"
    wrong = (found - mean).abs() > step / 2 * (1 + 256 * UNIT) + missed
    assert not wrong[keep == 0].any(), f"{int(wrong[keep == 0].sum())} channels of means"


def check_key(codec, y, mean, feedback, got, new):
    """Fields of rotated keys [..., heads, tokens, dim] of a page, centered or not."""
    scale, missed = got["scale"], missed_by(y)
    target = y
    if mean is not None:
        centered, rest = torch.signbit(scale), y - mean
        size, less = (x.double().norm(dim=-1, keepdim=True) for x in (y, rest))
        clear = (less - size).abs() > 4 * y.shape[-1] ** 0.5 * missed
        assert ((centered == (less < size)) | ~clear | ~new).all(), "which keys are centered"
        target = torch.where(centered, rest, y)
    check_fields(codec.key, target, missed, feedback, {**got, "scale": scale.abs()}, new)


def check_fields(quantizer, y, missed, feedback, got, new=True):
    """Codes and scales of rotated y [..., dim], of whose coordinates sums may miss `missed`."""
    dim, codes, y = quantizer.dim, got["codes"], y.double()
    norm = y.norm(dim=-1, keepdim=True)
    unsure = dim**0.5 * missed / norm.clamp_min(TINY) + 8 * UNIT  # of the norm, relative
    factor = dim**0.5 if feedback is None else gain(quantizer.bits) * dim**0.5
    x = y / norm.clamp_min(TINY) * factor
    off = factor * missed / norm.clamp_min(TINY) + x.abs() * unsure
    centroid = quantizer.codebook.decode(codes).double()
    target, target_off = x, off
    if feedback is None:
        plain = _SCALES[quantizer.scale_mode]
        want = plain(y.float(), norm.float(), quantizer._direction(codes)).double()
        unsure = 4 * unsure
    else:  # each coordinate with what the later ones of `got` missed
        lower = feedback.tril(-1).double()
        target = x + (x - centroid) @ lower
        reach = off @ lower.abs()
        sums = (dim + 2) * UNIT
        target_off = off + reach + sums * ((x - centroid).abs() @ lower.abs() + target.abs())
        weights = feedback.diagonal(dim1=1, dim2=2).double()[:, None]
        size, rest = x + x @ lower, target - centroid
        size_off = off + reach + sums * (x.abs() @ lower.abs() + x.abs())
        whole = (weights * size * size).sum(-1, keepdim=True)
        along = (weights * size * (size - rest)).sum(-1, keepdim=True)
        moved = size_off * (size - rest).abs() + size.abs() * (size_off + target_off)
        unsure = unsure + (2 * weights * size.abs() * size_off).sum(-1, keepdim=True) / whole
        unsure = unsure + (weights * moved).sum(-1, keepdim=True) / along
        want = norm / gain(quantizer.bits) * (whole / along).clamp(0.5, 2.0)
    check_codes(quantizer.codebook, target, target_off, codes, new)
    scale, most = got["scale"].double(), torch.finfo(torch.float16).max
    wrong = (scale - want.clamp_max(most)).abs() > (HALF + unsure) * want + LEAST_HALF
    assert not (wrong & new).any(), f"{int((wrong & new).sum())} scales"


def check_codes(book, z, missed, codes, new=True):
    """Each code is that of a number within `missed` of z."""
    low, high = (book.decode(book.encode((z + sign * missed).float())) for sign in (-1, 1))
    found = book.decode(codes)
    wrong = ((found < low) | (found > high)) & new
    assert not wrong.any(), f"{int(wrong.sum())} codes"
