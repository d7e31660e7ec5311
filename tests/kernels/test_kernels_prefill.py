"""The kernels around torch's attention in a prefill, against their plain-torch twins.

Without a GPU they run in Triton's interpreter, which is set up in conftest.py.
"""

import math

import pytest
import torch

from kernel_caches import poison
from prefill_caches import CFG, assert_extends_like_the_reference, filled
from tightkv.kernels import prefill
from tightkv.kernels.sdpa import AttentionState
from tightkv.kernels.view import AttendOptions

pytest.importorskip("triton")
pytest.importorskip("tightkv.kernels.triton.backend")
from tightkv.kernels.triton import prefill as triton_prefill
from torch_ops import TorchPrefillOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = TorchPrefillOps()
# The interpreter's bfloat16 is not to be relied on.
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def by_token(*shape, dtype=torch.float16, pad=0):
    """Random [B, H, T, D] that lies in memory as [B, T, H, D + pad]."""
    b, h, t, d = shape
    return torch.randn(b, t, h, d + pad, device=DEVICE).to(dtype)[..., :d].transpose(1, 2)


def part(b, h, t, d, dtype=torch.float16, **options):
    """Attention over some tokens; LSEs far apart now and then, so that one part vanishes."""
    lse = torch.randn(b, h, t, device=DEVICE) * 10
    return AttentionState(by_token(b, h, t, d, dtype=dtype, **options), lse)


def copy(x):
    return AttentionState(x.out.clone(), x.lse.clone())


def close(made, expected):
    half = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[expected.dtype]
    torch.testing.assert_close(made, expected, atol=half, rtol=half)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "dim,rotation", [(64, "hadamard"), (128, "hadamard"), (80, "haar"), (64, "none")]
)
def test_rotated_queries(dim, rotation, dtype):
    codec = filled(CFG.replace(rotation=rotation), 0, dim).codec
    query = by_token(2, 6, 37, dim, dtype=dtype, pad=16)
    made = triton_prefill.rotate_queries(codec, query)
    assert made.is_contiguous() and made.dtype == dtype
    close(made, PLAIN.rotate_queries(codec, query))


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", HALVES)
def test_join(dim, dtype):
    """Half precision and strided first, float32 in place from then on."""
    parts = [part(2, 2, 37, dim, dtype) for _ in range(3)]
    expected = PLAIN.merge_states(PLAIN.merge_states(parts[0], parts[1]), parts[2])
    once = triton_prefill.merge_states(copy(parts[0]), parts[1])
    assert once.out.dtype == torch.float32 and once.out.is_contiguous()
    made = triton_prefill.merge_states(once, parts[2])
    assert made.out.data_ptr() == once.out.data_ptr(), "no new accumulator"
    close(made.out, expected.out)
    close(made.lse, expected.lse)


@pytest.mark.parametrize("prefix_dtype", ["half", "float32"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "dim,rotation", [(64, "hadamard"), (80, "haar"), (128, "none"), (128, None)]
)
def test_finish(dim, rotation, dtype, prefix_dtype):
    """Heads of a group lie behind one another as queries of the prefix."""
    codec = None if rotation is None else filled(CFG.replace(rotation=rotation), 0, dim).codec
    prefix = part(2, 2, 3 * 19, dim, torch.float32 if prefix_dtype == "float32" else dtype)
    exact = part(2, 6, 19, dim, dtype)
    expected = copy(exact)
    PLAIN.merge_and_unrotate(codec, prefix, expected)
    made = AttentionState(exact.out, exact.lse)
    triton_prefill.merge_and_unrotate(codec, prefix, made)
    close(made.out, expected.out)
    close(made.lse, expected.lse)


@pytest.mark.sampled
@pytest.mark.parametrize("first,count", [(0, 64), (0, 50), (64, 64), (128, 12)])
@pytest.mark.parametrize("encode_partial_page", [True, False])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("window_bits", [8, 16])
def test_a_chunk_of_the_prefix(window_bits, dim, encode_partial_page, first, count):
    """Codes, sinks and ring in one frame; NaN in slots that nothing was written to."""
    cfg = CFG.replace(window_bits=window_bits)
    cache = filled(cfg, 140, dim, encode_partial_page=encode_partial_page)
    if encode_partial_page:
        cache.table.drop_exact(1)
    poison(cache)
    shape = (2, 64, 2, dim)
    made, expected = (
        [torch.full(shape, math.nan, dtype=torch.float16, device=DEVICE) for _ in "kv"]
        for _ in range(2)
    )
    triton_prefill.load_prefix(cache.codec, cache.view(), first, count, *made)
    PLAIN.load_prefix(cache.codec, cache.view(), first, count, *expected)
    for a, b in zip(made, expected, strict=True):
        assert torch.isfinite(a[:, :count]).all()
        close(a[:, :count], b[:, :count])


@pytest.mark.parametrize("prefix", [0, 20, 34, 131])
@pytest.mark.parametrize("window_bits", [8, 16])
def test_extend_with_the_kernels(window_bits, prefix, monkeypatch):
    """After 34 tokens the window of 8 bits begins where the sinks end: no code is read."""
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 64)
    monkeypatch.setattr(prefill, "MIN_QUERIES", 1)
    cfg = CFG.replace(window_bits=window_bits)
    cache = filled(cfg, prefix, encode_partial_page=False)
    poison(cache)
    assert_extends_like_the_reference(cache, ops=triton_prefill)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("count", [300, 512])
@pytest.mark.parametrize("prefix", [0, 100, 5000])
def test_attend_takes_the_way_of_many_queries(prefix, count, batch, dtype):
    """Through `attend`, with torch's own attention kernels: cuDNN gets whole 512s alone."""
    from helpers import add, make_cache, tokens
    from tightkv.kernels import reference
    from tightkv.kernels.triton import backend as kernels

    cache = make_cache(CFG.replace(page_size=64), rows=batch, dim=128, dtype=dtype, device=DEVICE)
    if prefix:
        add(cache, *(x.to(DEVICE, dtype) for x in tokens(batch, prefix, dim=128)))
    drawn = tokens(batch, count, dim=128, seed=5)
    new_key, new_value = (x.to(DEVICE, dtype).flatten(0, 1) for x in drawn)
    query = torch.randn(batch * count, 8, 128, device=DEVICE).to(dtype)
    first = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * count
    options = {"max_queries": count, "new_key": new_key, "new_value": new_value}
    out, lse = kernels.attend(cache.codec, query, cache.view(), first, AttendOptions(**options))
    expected, expected_lse = reference.attend(
        cache.codec, query, cache.view(), first, AttendOptions(**options)
    )
    half = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    torch.testing.assert_close(lse, expected_lse, atol=40 * half, rtol=half)
    size = float(expected.abs().max())
    torch.testing.assert_close(out.float(), expected.float(), atol=8 * half * size, rtol=8 * half)
