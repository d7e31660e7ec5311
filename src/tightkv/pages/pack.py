"""Codes to bytes and back, exactly, for every width from 1 to 8 bits.

The order of bits is chosen for the decoders (docs/layout.md): inside a little-endian word,
one mask brings eight codes to the low bits of its eight nibbles, which is what the GPU's
byte-permute and the CPU's byte-shuffle instructions take as table indices.
"""

import torch
from torch import Tensor

CODES_PER_UNIT = 16  # a packed row holds whole units


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [..., n] below 2**bits -> uint8 bytes [..., n * bits / 8]."""
    _check(codes.shape[-1], bits)
    if bits == 8:
        return codes.contiguous()
    if bits > 4:  # low nibbles first, then the high bits
        return torch.cat([pack(codes & 15, 4), pack(codes >> 4, bits - 4)], -1)
    nibbles = _nibbles(codes, bits)
    return (nibbles[..., 0] | (nibbles[..., 1] << 4)).flatten(codes.dim() - 1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """uint8 bytes [..., n * bits / 8] -> uint8 codes [..., n]."""
    _check_bits(bits)
    count, rest = divmod(packed.shape[-1] * 8, bits)
    if rest or count % CODES_PER_UNIT:
        raise ValueError(
            f"{packed.shape[-1]} bytes are no row of {bits}-bit codes; "
            f"a row holds a multiple of {CODES_PER_UNIT} codes"
        )
    if bits == 8:
        return packed.contiguous()
    if bits > 4:
        low = packed[..., : count // 2]
        return unpack(low, 4) | (unpack(packed[..., count // 2 :], bits - 4) << 4)
    return _codes(torch.stack([packed & 15, packed >> 4], -1), bits)


def _check_bits(bits: int) -> None:
    if bits not in range(1, 9):
        raise ValueError(f"bits={bits}; supported: 1 to 8")


def _check(count: int, bits: int) -> None:
    _check_bits(bits)
    if count <= 0 or count % CODES_PER_UNIT:
        raise ValueError(f"{count} codes; a row holds a multiple of {CODES_PER_UNIT} codes")


# Each byte holds a low and a high nibble: nibble 2k and 2k+1 of its word.


def _nibbles(codes: Tensor, bits: int) -> Tensor:
    """Codes [..., n] of at most 4 bits -> nibbles [..., byte, 2], in the order of bytes."""
    if bits == 1:
        return (codes.unflatten(-1, (-1, 2, 4)) << _range(4, codes)).sum(-1, dtype=torch.uint8)
    if bits == 2:  # 16 codes a 32-bit word: code 8h + n sits at bit 4n + 2h
        c = codes.unflatten(-1, (-1, 2, 4, 2))  # [..., word, h, byte, nibble]
        return c[..., 0, :, :] | (c[..., 1, :, :] << 2)
    if bits == 3:
        # A group is `word` codes in 3 words. A word's nibbles hold 3-bit codes in their low bits;
        # the spare top bits of the 3 words are the 3 bits of the group's last quarter of codes.
        word = _word3(codes.shape[-1])
        c = codes.unflatten(-1, (-1, 4, word // 8, 2))  # [..., group, quarter, byte, nibble]
        spare = (c[..., 3:, :, :] >> _range(3, codes).view(3, 1, 1)) & 1
        return c[..., :3, :, :] | (spare << 3)
    return codes.unflatten(-1, (-1, 2))


def _codes(nibbles: Tensor, bits: int) -> Tensor:
    """Nibbles [..., bytes, 2] -> codes [..., n] of at most 4 bits."""
    if bits == 1:
        return ((nibbles.unsqueeze(-1) >> _range(4, nibbles)) & 1).flatten(-3)
    if bits == 2:
        n = nibbles.unflatten(-2, (-1, 4))  # [..., word, byte, nibble]
        return torch.stack([n & 3, n >> 2], -3).flatten(-4)
    if bits == 3:
        word = _word3(nibbles.shape[-2] * 8 // 3)
        n = nibbles.unflatten(-2, (-1, 3, word // 8))  # [..., group, 3, byte, nibble]
        bit = (n >> 3) << _range(3, n).view(3, 1, 1)
        spare = bit[..., 0, :, :] | bit[..., 1, :, :] | bit[..., 2, :, :]
        return torch.cat([n & 7, spare.unsqueeze(-3)], -3).flatten(-4)
    return nibbles.flatten(-2)


def _word3(count: int) -> int:
    """Word width of 3-bit rows: 32 bits, or 16 where the row is an odd number of units."""
    return 32 if count % 32 == 0 else 16


def _range(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=torch.uint8, device=like.device)
