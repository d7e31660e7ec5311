"""Counter-based random numbers: word i of a (seed, stream) pair is a pure function of i.

The words are splitmix64 in wrap-around int64 arithmetic, so bits and signs are the same on every
platform and torch version. torch's own generators are neither used nor disturbed.
"""

import math

import torch
from torch import Tensor


def _signed(word: int) -> int:
    """The int64 with the same 64 bits as `word` modulo 2**64."""
    return (word + 2**63) % 2**64 - 2**63


_STEP = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _shift_right(words: Tensor, count: int) -> Tensor:
    """Logical shift; torch's >> copies the sign bit down."""
    return (words >> count) & ((1 << (64 - count)) - 1)


def _mix(words: Tensor) -> Tensor:
    """splitmix64's finalizer: a bijection of 64-bit words in which every bit moves every bit."""
    words = (words ^ _shift_right(words, 30)) * _MULTIPLIER_1
    words = (words ^ _shift_right(words, 27)) * _MULTIPLIER_2
    return words ^ _shift_right(words, 31)


def random_bits(seed: int, stream: int, n: int) -> Tensor:
    """`n` words of 64 random bits, int64 on the CPU. Streams of one seed are independent."""
    start = torch.tensor([_signed(seed)], dtype=torch.int64, device="cpu") + _STEP
    key = _mix(_mix(start) + _signed(stream))
    counter = torch.arange(1, n + 1, dtype=torch.int64, device="cpu")
    return _mix(key + counter * _STEP)


def random_signs(seed: int, stream: int, n: int) -> Tensor:
    """`n` random signs, float32 +1 or -1 on the CPU: the top bit of each word."""
    positive = random_bits(seed, stream, n) >= 0
    return positive.to(torch.float32) * 2 - 1


def random_normal(seed: int, stream: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal float64 samples on the CPU, by Box-Muller from two words each.

    log and cos come from the platform's math library, so the last bit may differ between platforms.
    """
    n = math.prod(shape)
    words = _shift_right(random_bits(seed, stream, 2 * n), 11).to(torch.float64)
    radius_bits, angle_bits = words.view(n, 2).unbind(1)
    radius = (-2 * ((radius_bits + 1) * 2.0**-53).log()).sqrt()  # log of (0, 1]
    return (radius * (angle_bits * (2 * math.pi * 2.0**-53)).cos()).reshape(shape)
