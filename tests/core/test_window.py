"""A window of 8 bits: what rings store of a token, and that pages are coded from that."""

import math

import pytest
import torch

from helpers import add, make_cache, tokens
from tightkv.config import PRESETS, KVQuantConfig
from tightkv.kernels import reference, registry
from tightkv.kernels.view import SealedLayer
from tightkv.pages.layout import page_layout
from tightkv.pages.window import pack_12_bits, to_integers, unpack_12_bits

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=2, window_bits=8)


def by_hand(y, most):
    """The rounding of docs/layout.md, number by number in Python."""
    numbers = [float(x) for x in y]
    product = torch.tensor(max(map(abs, numbers))) * torch.tensor(1 / most)
    scale = product.clamp(max=65504).half()
    if not scale:
        return [0] * len(numbers), scale
    inverse = 1 / scale.float()
    levels = [round(float(torch.tensor(x) * inverse)) for x in numbers]  # half to even
    return [max(-most, min(most, k)) for k in levels], scale


@pytest.mark.parametrize("size", [0.0, 1e-9, 6e-6, 1.0, 3e4, 1e8, 1e30])
@pytest.mark.parametrize("most", [127, 2047])
def test_rounding_is_that_of_the_documentation(most, size):
    y = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)) * size
    y[0, 0], y[1] = -y[0].abs().max() * 2, 0.0
    codes, scales = to_integers(y, most)
    assert scales.dtype == torch.float16
    for row, code, scale in zip(y, codes, scales, strict=True):
        wanted, wanted_scale = by_hand(row, most)
        assert code.tolist() == wanted and scale == wanted_scale
    assert not codes[1].any() and scales[1] == 0


def test_half_of_a_step_goes_to_the_even_level():
    y = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5])
    codes, scale = to_integers(y, 127)
    assert scale == 1 and codes.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_no_code_is_off_by_more_than_half_of_a_step_and_the_scales_rounding():
    y = torch.randn(500, 128, generator=torch.Generator().manual_seed(2))
    codes, scales = to_integers(y, 127)
    step = scales.float()[:, None]
    # A float16 scale may be too small by 2**-11 of it: then 127 of them miss the largest number.
    assert ((codes * step - y).abs() <= step * (0.5 + 127 * 2**-11)).all()


@pytest.mark.parametrize("encode_partial_page", [True, False])
@pytest.mark.parametrize("rotation", ["none", "hadamard"])
def test_the_ring_is_rounded_and_pages_are_coded_from_it(rotation, encode_partial_page):
    cfg = CFG.replace(rotation=rotation)
    eight, plain = (
        make_cache(cfg.replace(window_bits=bits), encode_partial_page=encode_partial_page)
        for bits in (8, 16)
    )
    key, value = tokens(2, 150)
    rounded = []
    for side, x, most in ((eight.codec.key, key, 2047), (eight.codec.value, value, 127)):
        codes, scales = to_integers(side.rotation(x), most)
        rounded.append(side.rotation.inverse(codes.float() * scales.float()[..., None]))
    add(eight, key, value)
    add(plain, *rounded)
    assert eight.table.rows[0].ring_read_from == 150 - 2 * 32  # in tokens
    first = plain.table.rows[0].ring_read_from
    for got, wanted, exact in zip(
        eight.dequantize(), plain.dequantize(), (key, value), strict=True
    ):
        assert torch.equal(got[:, :2], exact[:, :2])  # the sinks
        torch.testing.assert_close(got[:, first:], wanted[:, first:], atol=2e-6, rtol=2e-6)
    if rotation == "none":  # rotating back and forth may move a number over a threshold
        assert torch.equal(eight.pages, plain.pages)


def test_keys_of_12_bits_are_bytes_and_nibbles():
    codes = torch.arange(-2048, 2048, dtype=torch.int16).view(-1, 16)
    packed = pack_12_bits(codes)
    assert packed.dtype == torch.int8 and packed.shape[-1] == 24
    assert torch.equal(unpack_12_bits(packed), codes)
    for channel, code in enumerate(codes[3].tolist()):
        byte = int(packed[3, 16 + channel // 8 * 4 + channel % 4])
        assert packed[3, channel] == code // 16 and byte >> channel % 8 // 4 * 4 & 15 == code % 16


def test_pages_sealed_later_have_the_bytes_of_pages_sealed_at_once():
    cache = make_cache(CFG)
    key, value = tokens(2, 96)
    add(cache, key, value)
    sealed = cache.pages.clone()
    view = cache.view()
    cache.pages.zero_()
    entries = [
        [row, 32 * i, cache.table.rows[row].pages[i], 0] for row in range(2) for i in range(3)
    ]
    layer = SealedLayer(cache.pages, view.ring_key, view.ring_value, None, view.ring_scales)
    chosen = torch.tensor([[len(entries), 0, 0, 0], *entries], dtype=torch.int32)
    reference.seal_layers(cache.codec, [layer], chosen)
    assert torch.equal(cache.pages, sealed)


def test_numbers_that_are_not_finite():
    cache = make_cache(CFG, rows=1)
    key, value = tokens(1, 40)
    key[0, 10, 0, 3], value[0, 11, 1, 5] = math.nan, math.inf
    zero, most = key.clone(), value.clone()
    zero[0, 10, 0, 3], most[0, 11, 1, 5] = 0.0, 65504.0
    other = make_cache(CFG, rows=1)
    add(cache, key, value)
    add(other, zero, most)
    for name in ("ring_key", "ring_value", "ring_scales"):
        assert torch.equal(getattr(cache, name), getattr(other, name))
    strict = make_cache(CFG.replace(check_finite=True), rows=1)
    with pytest.raises(ValueError, match="NaN or Inf"):
        add(strict, key, value)


@pytest.mark.parametrize("backend", ["cpu", "triton", "cuda"])
def test_every_backend_takes_it(backend):
    layout = page_layout(CFG, 2, 64, torch.bfloat16)
    assert registry.load(backend).unsupported(layout) is None


@pytest.mark.parametrize("name", PRESETS)
def test_config(name):
    cfg = KVQuantConfig.preset(name, window_bits=8)
    plain = KVQuantConfig.preset(name, window_bits=16)
    assert cfg.fingerprint() != plain.fingerprint()  # pages have other bytes
    assert KVQuantConfig.parse(cfg.to_json()) == cfg
    mixed = cfg.replace(layer_bits="0=k16v8")
    assert [mixed.for_layer(i, 2).window_bits for i in range(2)] == [16, 8]
    assert cfg.replace(key_bits=16).window_bits == 16  # where a side has 16
    with pytest.raises(ValueError, match="window_bits=4; supported: 8, 16"):
        cfg.replace(window_bits=4)
