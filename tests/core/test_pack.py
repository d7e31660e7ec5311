import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tightkv.pages.pack import pack, unpack


@given(
    bits=st.integers(1, 8),
    units=st.integers(1, 20),
    lead=st.lists(st.integers(0, 3), max_size=3),
    seed=st.integers(0, 2**30),
)
def test_round_trip_in_exactly_bits_over_eight_bytes(bits, units, lead, seed):
    n = 16 * units
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (*lead, n), generator=generator).to(torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*lead, n * bits // 8)
    assert torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_byte_pattern_is_some_row(bits):
    # No wasted bit: unpack then pack is the identity on arbitrary bytes.
    packed = torch.randint(0, 256, (64, 32 * bits // 8), dtype=torch.uint8)
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


def words(packed):
    """Little-endian 32-bit words of a packed row."""
    raw = bytes(packed.tolist())
    return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]


def test_four_bits_are_nibbles():
    codes = torch.randint(0, 16, (64,), dtype=torch.uint8)
    for j, word in enumerate(words(pack(codes, 4))):
        assert [(word >> 4 * n) & 15 for n in range(8)] == codes[8 * j : 8 * j + 8].tolist()


def test_three_bits_fourth_word_from_the_spare_bits():
    codes = torch.randint(0, 8, (64,), dtype=torch.uint8)
    row = words(pack(codes, 3))
    for g in range(2):
        a, b, c = row[3 * g : 3 * g + 3]
        spare = (a >> 3) & 0x11111111 | (b >> 2) & 0x22222222 | (c >> 1) & 0x44444444
        for j, word in enumerate((a, b, c, spare)):
            for n in range(8):
                assert (word >> 4 * n) & 7 == int(codes[32 * g + 8 * j + n])


def test_two_bits_two_masks_give_nibbles():
    codes = torch.randint(0, 4, (64,), dtype=torch.uint8)
    for j, word in enumerate(words(pack(codes, 2))):
        for h in range(2):
            for n in range(8):
                assert (word >> (4 * n + 2 * h)) & 3 == int(codes[16 * j + 8 * h + n])


def test_odd_units_of_three_bits_use_half_words():
    codes = torch.randint(0, 8, (80,), dtype=torch.uint8)
    raw = bytes(pack(codes, 3).tolist())
    for g in range(5):
        a, b, c = (
            int.from_bytes(raw[6 * g + 2 * j : 6 * g + 2 * j + 2], "little") for j in range(3)
        )
        spare = (a >> 3) & 0x1111 | (b >> 2) & 0x2222 | (c >> 1) & 0x4444
        for j, word in enumerate((a, b, c, spare)):
            for n in range(4):
                assert (word >> 4 * n) & 7 == int(codes[16 * g + 4 * j + n])


def test_non_contiguous_input():
    codes = torch.randint(0, 8, (32, 5), dtype=torch.uint8).T
    assert torch.equal(unpack(pack(codes, 3), 3), codes)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: pack(torch.zeros(16, dtype=torch.uint8), 9), "bits=9"),
        (lambda: pack(torch.zeros(17, dtype=torch.uint8), 4), "17 codes"),
        (lambda: pack(torch.zeros(0, dtype=torch.uint8), 4), "0 codes"),
        (lambda: unpack(torch.zeros(7, dtype=torch.uint8), 3), "7 bytes"),
    ],
)
def test_bad_input(call, word):
    with pytest.raises(ValueError, match=word):
        call()
