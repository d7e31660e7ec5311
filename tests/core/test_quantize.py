import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tightkv.math.codebook import get_codebook
from tightkv.math.quantize import (
    AbsMax,
    GroupUniform,
    OutlierMSE,
    Raw,
    TurboQuantMSE,
    TurboQuantProd,
)

DIMS = (64, 80, 128, 256)


def vectors(n, dim, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) * 3 + 0.5


def relative_error(x, y):
    return float((x - y).square().sum() / x.square().sum())


def theory(book, dim):
    """Expected relative error of each scale mode, from moments of one coordinate.

    X is a coordinate of sqrt(dim) times a random unit vector x, Q its code, c the code's
    direction. All modes but `norm` depend on the angle between x and c alone; its sine
    squared is what least squares leaves: the error less its component along c.
    """
    x = torch.linspace(-math.sqrt(dim), math.sqrt(dim), 400_001, dtype=torch.float64)[1:-1]
    weight = (1 - x.square() / dim) ** ((dim - 3) / 2)
    weight /= weight.sum()
    q = book.decode(book.encode(x.float())).double()
    a, b = float((weight * x * q).sum()), float((weight * q * q).sum())
    along = float((weight * (x - q).square() * q * q).sum()) / (b * dim)
    sine = 1 - a * a / b - along
    return {
        "norm": 1 - 2 * a + b,
        "least_squares": sine,
        "corrected": 2 - 2 * math.sqrt(1 - sine),
        "unbiased": sine / (1 - sine),
    }


@pytest.mark.sampled
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("book", ["fp8", "gaussian", "beta"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_mse_within_three_percent_of_theory(bits, book, dim):
    x = vectors(3000, dim)
    for mode, expected in theory(get_codebook(book, bits, dim), dim).items():
        quantizer = TurboQuantMSE(dim, bits, scale_mode=mode, codebook=book)
        measured = relative_error(x, quantizer.decode(quantizer.encode(x)))
        assert measured == pytest.approx(expected, rel=0.03), mode


@pytest.mark.parametrize(("book", "most"), [("fp8", 1.2e-4), ("gaussian", 5e-5), ("beta", 5e-5)])
def test_eight_bits(book, most):
    x = vectors(2000, 128)
    quantizer = TurboQuantMSE(128, 8, codebook=book)
    assert relative_error(x, quantizer.decode(quantizer.encode(x))) < most


def test_unbiased_mode_is_unbiased_and_norm_mode_shrinks():
    x = vectors(20000, 64)
    for mode, slope in (("unbiased", 1.0), ("norm", 1 - get_codebook("beta", 2, 64).distortion)):
        quantizer = TurboQuantMSE(64, 2, scale_mode=mode, codebook="beta")
        y = quantizer.decode(quantizer.encode(x))
        assert float((x * y).sum() / x.square().sum()) == pytest.approx(slope, rel=0.003)


def test_corrected_mode_keeps_the_norm():
    x = vectors(50, 128)
    quantizer = TurboQuantMSE(128, 3, scale_mode="corrected")
    y = quantizer.decode(quantizer.encode(x))
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prod_inner_products_unbiased_with_the_variance_of_theory(bits):
    dim, seeds = 64, 300
    x = torch.nn.functional.normalize(vectors(64, dim, 1), dim=-1)
    q = torch.nn.functional.normalize(vectors(64, dim, 2) - 0.5, dim=-1)
    exact = (q * x).sum(-1)
    errors, predicted = [], []
    for seed in range(seeds):
        quantizer = TurboQuantProd(dim, bits, seed=seed)
        fields = quantizer.encode(x)
        errors.append(quantizer.inner_product(q, fields) - exact)
        rest = x - quantizer.coarse.decode(fields)
        hit = (q * rest).sum(-1)
        predicted.append((math.pi / 2 * rest.square().sum(-1) - hit.square()) / dim)
    error = torch.stack(errors)
    spread = error.std() / math.sqrt(error.numel())
    assert abs(float(error.mean())) < 4 * float(spread)
    assert float(error.var()) == pytest.approx(float(torch.stack(predicted).mean()), rel=0.03)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_uniform_quantizers_have_the_error_of_their_step(bits):
    x = vectors(4000, 128)
    group = GroupUniform(128, bits)
    fields = group.encode(x)
    theory = fields["scale"].float().square().mean() / 12
    # The two end points of a group are levels: their error is nil.
    assert float((group.decode(fields) - x).square().mean()) == pytest.approx(
        float(theory) * 30 / 32, rel=0.03
    )
    absmax = AbsMax(128, bits)
    fields = absmax.encode(x)
    theory = fields["scale"].float().square().mean() / 12
    assert float((absmax.decode(fields) - x).square().mean()) == pytest.approx(
        float(theory), rel=0.03
    )


@pytest.mark.parametrize("bits", [2, 3])
def test_outlier_channels_get_their_extra_bit(bits):
    channels = (*range(0, 32), *range(64, 96))
    quantizer = OutlierMSE(128, bits, channels)
    x = vectors(3000, 128)
    y = quantizer.decode(quantizer.encode(x))
    wide = torch.zeros(128, dtype=torch.bool)
    wide[list(channels)] = True
    for part, part_bits in ((wide, bits + 1), (~wide, bits)):
        theory = get_codebook("beta", part_bits, 64).distortion
        assert relative_error(x[:, part], y[:, part]) == pytest.approx(theory, rel=0.03)


ALL = {
    "mse": lambda d: TurboQuantMSE(d, 4),
    "prod": lambda d: TurboQuantProd(d, 3),
    "group": lambda d: GroupUniform(d, 4, group_size=16),
    "absmax": lambda d: AbsMax(d, 4),
    "outlier": lambda d: OutlierMSE(d, 3, tuple(range(16))),
    "raw": lambda d: Raw(d),
}


@pytest.mark.parametrize("name", ALL)
@given(
    dim=st.sampled_from([32, 48, 64, 80]),
    lead=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    strided=st.booleans(),
)
@settings(max_examples=15)
def test_shapes_dtypes_strides(name, dim, lead, dtype, strided):
    quantizer = ALL[name](dim)
    x = torch.randn(*lead, dim, 2).to(dtype)
    x = x[..., 0] if strided else x[..., 0].contiguous()
    fields = quantizer.encode(x)
    y = quantizer.decode(fields)
    assert y.shape == x.shape and y.dtype == torch.float32
    again = quantizer.encode(x.contiguous())
    for key, value in fields.items():
        assert value.shape[:-1] == x.shape[:-1]
        assert torch.equal(value, again[key])
    if x.numel():
        assert relative_error(x.float(), y) < 0.3
        q = torch.randn(dim)
        torch.testing.assert_close(
            quantizer.inner_product(q, fields), (y * q).sum(-1), atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("name", ALL)
def test_zero_nan_and_inf(name):
    quantizer = ALL[name](64)
    assert not quantizer.decode(quantizer.encode(torch.zeros(2, 64))).any()
    bad = torch.randn(3, 64)
    bad[0, 3], bad[1, 5], bad[2, 7] = math.nan, math.inf, -math.inf
    y = quantizer.decode(quantizer.encode(bad))
    assert torch.isfinite(y).all()
    clean = bad[:1].nan_to_num(0.0)
    # One row or several: sums of a matrix product may be in another order.
    torch.testing.assert_close(y[:1], quantizer.decode(quantizer.encode(clean)))
    with pytest.raises(ValueError, match="3 of 192 elements are NaN or Inf"):
        quantizer.encode(bad, check=True)


@pytest.mark.parametrize("name", ALL)
def test_huge_and_tiny_inputs_stay_finite(name):
    quantizer = ALL[name](64)
    for size in (1e30, 1e-30, 6e4, 1e-6):
        assert torch.isfinite(quantizer.decode(quantizer.encode(torch.randn(4, 64) * size))).all()


def test_errors():
    with pytest.raises(ValueError, match=r"\(3, 32\); expected \[\.\.\., 64\]"):
        TurboQuantMSE(64, 4).encode(torch.zeros(3, 32))
    with pytest.raises(ValueError, match=r"expected \[\.\.\., 64\]"):
        TurboQuantMSE(64, 4).encode(torch.tensor(1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ALL)
def test_cpu_and_gpu_give_the_same_codes(name, dim):
    quantizer = ALL[name](dim)
    x = vectors(2000, dim)
    here, there = quantizer.encode(x), quantizer.encode(x.cuda())
    for key, value in here.items():
        if key == "signs":  # of float32 sums, whose order is the device's
            assert isinstance(quantizer, TurboQuantProd)
            coarse = quantizer.coarse
            y = coarse.rotation(x)
            rest = (y - coarse.decode_rotated(here)).double()
            sketch = quantizer.sketch(x.device).double().T
            clear = (rest @ sketch).abs() > (dim + 2) * 2.0**-24 * (rest.abs() @ sketch.abs())
            assert torch.equal(value[clear], there[key].cpu()[clear])
        else:
            assert torch.equal(value, there[key].cpu()), key


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("mode", ["norm", "corrected", "least_squares", "unbiased"])
def test_a_zero_vector_has_a_zero_scale(mode, bits):
    fields = TurboQuantMSE(64, bits, scale_mode=mode).encode(torch.zeros(3, 64))
    assert not fields["scale"].any() and torch.isfinite(fields["scale"]).all()
