"""Latent attention (MLA): pages, the reference and the Triton kernels on the same codes.

Without a GPU the kernels run in Triton's interpreter, which is set up in conftest.py.
"""

import math

import pytest
import torch

from kernel_caches import DEVICE
from rounding import UNIT, check_codes, missed_by
from tightkv.config import KVQuantConfig
from tightkv.kernels import mla_reference
from tightkv.math.quantize import finite
from tightkv.pages.latent import LatentCodec, LatentLayout, scale_code, scale_value

pytest.importorskip("triton")
mla = pytest.importorskip("tightkv.kernels.triton.mla")
triton_ahead = pytest.importorskip("triton_ahead")

CFG = KVQuantConfig.preset("k4v4")
# The interpreter's bfloat16 is not to be relied on.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
# The interpreter takes its time.
RANK, MANY, FEW = (512, 128, 16) if DEVICE.type == "cuda" else (64, 66, 3)


def codec_of(bits=4, rank=RANK, rope_dim=64, dtype=HALF, **options):
    cfg = CFG.replace(key_bits=bits, value_bits=bits, **options)
    return LatentCodec(LatentLayout(cfg, rank, rope_dim, dtype))


def vectors(*shape, dtype=HALF, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


class Sequences:
    """Tokens of several sequences in shuffled pages; what is not theirs is poison."""

    def __init__(self, codec, lengths, seed=0):
        layout, self.codec, self.lengths = codec.layout, codec, lengths
        each = max(1, -(-max(lengths) // layout.page_size))
        count = len(lengths) * each + 1
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.table = order[: len(lengths) * each].reshape(len(lengths), each).int().to(DEVICE)
        self.pages = torch.full((count, layout.page_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.latent = vectors(sum(lengths), layout.rank, dtype=layout.dtype, seed=seed)
        self.rope = vectors(sum(lengths), layout.rope_dim, dtype=layout.dtype, seed=seed + 1)
        self.slots = torch.cat([self.slots_of(i, n) for i, n in enumerate(lengths)])

    def slots_of(self, row, length):
        at, size = torch.arange(length, device=DEVICE), self.codec.layout.page_size
        return self.table[row, at // size].long() * size + at % size

    def filled(self, kernels=mla_reference):
        kernels.append(self.codec, self.pages, self.latent, self.rope, self.slots)
        return self

    def decode(self, kernels, heads, queries=1, scale=0.06):
        layout, count = self.codec.layout, queries * len(self.lengths)
        q = vectors(count, heads, layout.rank, dtype=layout.dtype, seed=7)
        q_rope = vectors(count, heads, layout.rope_dim, dtype=layout.dtype, seed=8)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        return kernels.decode(self.codec, q, q_rope, self.pages, self.table, lengths, scale)


def test_a_token_of_deepseek_takes_385_bytes():
    layout = codec_of(rank=512).layout
    assert layout.bytes_per_token == 385 and layout.page_bytes == 64 * 385
    assert 656 / layout.bytes_per_token > 1.7
    assert codec_of(bits=3, rank=512).layout.bytes_per_token == 192 + 128 + 1
    assert codec_of(bits=2, rank=256, rope_dim=32).layout.bytes_per_token == 64 + 64 + 1


def test_scales_are_the_nearest_of_five_bits_and_three():
    codes = torch.arange(256, dtype=torch.uint8)
    values = scale_value(codes)
    assert torch.equal(scale_code(values)[1:], codes[1:])
    assert values[0] == 0 and values[255] == 61440 and (values.diff() > 0).all()
    norms = torch.exp2(torch.linspace(-15, 15, 1000))
    assert ((scale_value(scale_code(norms)) - norms).abs() <= norms / 16).all()
    assert scale_code(torch.tensor([0.0, 1e-30, 1e30])).tolist() == [0, 0, 255]


@pytest.mark.parametrize(("bits", "distortion"), [(4, 0.0095), (3, 0.0346), (2, 0.1175)])
def test_a_byte_of_scale_costs_little(bits, distortion):
    """Unbiased decoding has D / (1 - D); rounding the scale first adds at most 2% to that."""
    codec = codec_of(bits=bits, rank=512)
    x = vectors(400, 512) * torch.exp2(vectors(400, 1, seed=3).float())
    codes, scale = codec.encode(x)
    missed = (codec.decode(codes, scale) - x.float()).square().sum(-1) / x.float().square().sum(-1)
    gain = (codec.decode(codes, scale) * x.float()).sum(-1) / x.float().square().sum(-1)
    assert abs(float(missed.mean()) / (distortion / (1 - distortion)) - 1) < 0.03
    assert abs(float(gain.mean()) - 1) < 0.003


@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize("rank", [RANK, 192])
def test_append_writes_the_bytes_of_the_reference(bits, rank):
    codec = codec_of(bits=bits, rank=rank, page_size=32)
    sequences = Sequences(codec, [34, 3])
    sequences.latent[5], sequences.latent[6, :7] = 0, torch.nan
    sequences.latent *= 30
    sequences.slots[[2, 9]] = -1
    expected = sequences.filled().pages.clone()
    sequences.pages.fill_(0xFF)
    pages = sequences.filled(mla).pages
    if rank == RANK:
        assert torch.equal(pages, expected)
        return
    # A dense rotation: sums in another order may miss a threshold of the scale or of a code.
    live = sequences.slots[sequences.slots >= 0]
    y = codec.rotation(finite(sequences.latent[sequences.slots >= 0]))
    codes, scale, _ = codec.layout.read(pages, live)
    norm, missed = y.double().norm(dim=-1), missed_by(y)
    low, high = (norm + sign * rank**0.5 * missed[:, 0] for sign in (-1, 1))
    assert ((scale >= scale_code(low.float())) & (scale <= scale_code(high.float()))).all()
    factor = rank**0.5 / scale_value(scale)[:, None].double().clamp_min(1e-30)
    check_codes(codec.codebook, y * factor, (missed + 4 * UNIT * y.abs()) * factor, codes)
    rope = codec.layout.read(expected, live)[2]
    codec.layout.write(expected, live, codes, scale, rope)  # no other byte differs
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("kernels", [mla_reference, mla])
def test_padding_is_not_checked_for_nan(kernels):
    sequences = Sequences(codec_of(check_finite=True), [3])
    sequences.latent[1], sequences.slots[1] = torch.nan, -1
    sequences.filled(kernels)
    sequences.latent[2, 0] = torch.nan
    with pytest.raises(ValueError, match=r"1 of \d+ elements are NaN"):
        sequences.filled(kernels)


@pytest.mark.parametrize(
    ("heads", "lengths", "options"),
    [
        (FEW, [1, 65], {"rank": 512}),
        (16, [1, 64, 130], {}),
        (MANY, [65], {}),
        (20, [90], {"bits": 3, "rope_dim": 32}),
        (FEW, [33, 70], {"bits": 2, "dtype": torch.float16, "page_size": 32}),
        (FEW, [40], {"rank": 192, "dtype": torch.float32}),
    ],
)
def test_decode_equals_the_reference(heads, lengths, options):
    sequences = Sequences(codec_of(**options), lengths).filled()
    assert_close(sequences.decode(mla, heads), sequences.decode(mla_reference, heads))


def assert_close(found, expected):
    """float16 queries and weights: 2^-10 of the largest output; LSEs to 2^-9."""
    size = float(expected[0].float().abs().max())
    half = 2.0**-7 if expected[0].dtype == torch.bfloat16 else 2.0**-10
    torch.testing.assert_close(found[0].float(), expected[0].float(), atol=half * size, rtol=0)
    torch.testing.assert_close(found[1], expected[1], atol=2.0**-8, rtol=2.0**-10)


def test_queries_of_one_sequence_see_their_own_tokens():
    sequences = Sequences(codec_of(), [66, 2, 1]).filled()
    found = sequences.decode(mla, FEW, queries=3)
    assert_close_where_seen(found, sequences.decode(mla_reference, FEW, queries=3))
    # two tokens seen by three queries, one token by three
    assert torch.isneginf(found[1]).all(-1).tolist() == [False] * 3 + [True] + [False] * 2 + [
        True, True, False,
    ]  # fmt: skip


def test_queries_per_sequence_decide_no_binary(monkeypatch):
    """Drafts of each length would wait for the compiler."""
    from tightkv.kernels.triton import mla_decode

    constants = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: constants.append(options)

    monkeypatch.setattr(mla_decode, "_decode_kernel", Kernel())
    sequences = Sequences(codec_of(), [5, 4]).filled()
    for queries in (1, 3):
        sequences.decode(mla, FEW, queries)
    assert constants[0] == constants[1]


def assert_close_where_seen(found, expected):
    seen = ~torch.isneginf(expected[1])
    assert torch.equal(torch.isneginf(found[1]), ~seen)
    assert (found[0][~seen] == 0).all()
    assert_close([x[seen] for x in found], [x[seen] for x in expected])


def test_sequences_without_tokens_give_zeros():
    sequences = Sequences(codec_of(), [0, 70, 0]).filled()
    found = sequences.decode(mla, FEW)
    assert_close_where_seen(found, sequences.decode(mla_reference, FEW))
    none = torch.zeros(0, 16, RANK, dtype=HALF, device=DEVICE)
    empty = mla.decode(
        sequences.codec, none, none[..., :64], sequences.pages, sequences.table[:0],
        torch.zeros(0, dtype=torch.int32, device=DEVICE), 1.0,
    )  # fmt: skip
    assert empty[0].shape == none.shape


@pytest.mark.parametrize("options", [{"bits": 3}, {"rank": 192, "dtype": torch.float32}])
def test_gather_gives_back_what_is_stored(options):
    codec = codec_of(**options)
    sequences = Sequences(codec, [70, 130, 9]).filled()
    starts = torch.tensor([64, 0, 3], dtype=torch.int32, device=DEVICE)
    counts = torch.tensor([5, 130, 6], device=DEVICE)
    cu_seqlens = torch.tensor([0, 5, 135, 141], dtype=torch.int32, device=DEVICE)
    rows = torch.repeat_interleave(torch.arange(3, device=DEVICE), counts).int()
    layout = codec.layout
    shape = (141, layout.rank + layout.rope_dim)
    results = []
    for kernels in (mla_reference, mla):
        out = torch.full(shape, torch.nan, dtype=layout.dtype, device=DEVICE)
        kernels.gather(codec, sequences.pages, sequences.table, cu_seqlens, starts, rows, out)
        results.append(out)
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[layout.dtype]
    torch.testing.assert_close(results[1], results[0], rtol=step, atol=1e-5)
    exact = torch.cat([sequences.rope[64:69], sequences.rope[70:200], sequences.rope[203:209]])
    assert torch.equal(results[1][:, layout.rank :], exact)
    kept = torch.cat([sequences.latent[64:69], sequences.latent[70:200], sequences.latent[203:209]])
    missed = (results[1][:, : layout.rank] - kept).float().norm() / kept.float().norm()
    assert missed < 1.1 * math.sqrt(codec.codebook.distortion)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((CFG.replace(key_bits=8), 512, 64), "k8v4 .* takes the larger .* 8; supported: 2, 3, 4"),
        ((CFG, 520, 64), "kv_lora_rank=520; supported: multiples of 64"),
        ((CFG, 512, 0), "qk_rope_head_dim=0; supported: 16, 32, 64, 128"),
        ((CFG.replace(codebook="gaussian"), 512, 64), "codebook='gaussian'"),
        ((CFG.replace(outlier_share=0.5, key_bits=3, value_bits=3), 512, 64), "outlier_share=0"),
    ],
)
def test_what_pages_do_not_hold_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        LatentLayout(*arguments)


def test_kernels_compile_and_fit_shared_memory():
    """Compiled, which the interpreter does not do; 3 bits once did not."""
    shared = triton_ahead.compiled(512, "k3v3", "mla", 128)
    assert len(shared) == 5 and max(shared.values()) <= 227 * 1024, shared
