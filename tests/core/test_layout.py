import pytest
import torch

from tightkv.config import PRESETS, KVQuantConfig
from tightkv.pages.layout import ALIGN, SIDES, PageLayout, outlier_channels, token_fields

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
CONFIGS = [KVQuantConfig.preset(name) for name in PRESETS] + [
    KVQuantConfig(key_method="prod", value_method="group", group_size=16),
    KVQuantConfig(key_bits=2, value_bits=3, outlier_share=0.5, mean_bits=8),
    KVQuantConfig(key_bits=16, value_bits=8, key_centering="none"),
    KVQuantConfig(key_method="absmax", key_centering="none", page_size=32),
]


def random_fields(layout, side, *lead, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for f in token_fields(layout.cfg, side, layout.head_dim):
        shape = (*lead, f.count)
        if f.is_codes:
            out[f.name] = torch.randint(0, 2**f.bits, shape, generator=generator).to(torch.uint8)
        else:
            dtype = layout.raw_dtype if f.name == "raw" else torch.float16
            out[f.name] = torch.randn(shape, generator=generator).to(dtype)
    return out


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.name)
def test_planes_hold_whole_pages_and_single_tokens(cfg, head_dim):
    layout = PageLayout(cfg, 3, head_dim)
    size = layout.page_size
    pages = layout.new_pages(4).random_(0, 256)
    written = {side: random_fields(layout, side, 4, 3, size) for side in SIDES}
    for side, fields in written.items():
        layout.write(pages, side, fields)
    expected = {side: layout.read(pages, side) for side in SIDES}
    for side, fields in written.items():
        for name, value in fields.items():
            assert torch.equal(expected[side][name], value), (side, name)

    slots = torch.randperm(4 * size)[: size + 5]  # some pair mates together, some alone
    page, offset = slots // size, slots % size
    for side in SIDES:
        new = random_fields(layout, side, len(slots), 3, seed=1)
        layout.write_tokens(pages, page, offset, side, new)
        for name, value in new.items():
            expected[side][name][page, :, offset] = value
    for side in SIDES:
        for name, value in layout.read(pages, side).items():
            assert torch.equal(value, expected[side][name]), (side, name)


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.name)
def test_a_single_token_of_a_single_head_may_have_any_strides(cfg):
    """Its only scale counts as contiguous whatever its stride is."""
    layout = PageLayout(cfg, 1, 64)
    slot = torch.tensor([1]), torch.tensor([5])
    for side in SIDES:
        fields = random_fields(layout, side, 1, 1)
        pages = layout.new_pages(2)
        layout.write_tokens(pages, *slot, side, fields)
        strided = {name: torch.stack([x, x], -1)[..., 0] for name, x in fields.items()}
        again = layout.new_pages(2)
        layout.write_tokens(again, *slot, side, strided)
        assert torch.equal(pages, again) and pages.any()


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: c.name)
def test_planes_are_aligned_disjoint_and_as_small_as_their_bits(cfg, head_dim):
    layout = PageLayout(cfg, 2, head_dim)
    spans = sorted((p.offset, p.size, p) for p in layout.planes.values())
    end = 0
    for offset, size, field in spans:
        assert offset % ALIGN == 0 and 0 <= offset - end < ALIGN
        assert size * 8 == field.count * field.bits * layout.page_size
        end = offset + size
    assert layout.record_bytes % ALIGN == 0
    assert layout.new_pages(5).numel() == 5 * layout.page_bytes
    assert layout.bytes_per_token * layout.page_size == layout.page_bytes


def test_the_bytes_the_readme_claims():
    # 64 + 2 bytes a key, 64 + 2 a value, a 256-byte mean for 64 tokens.
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128)
    assert layout.bytes_per_token == 8 * (64 + 2 + 64 + 2 + 256 / 64)
    half = PageLayout(KVQuantConfig.preset("k4v4", mean_bits=8, page_size=128), 8, 128)
    assert half.bytes_per_token == 8 * (132 + 144 / 128)
    three = PageLayout(KVQuantConfig.preset("k3v3", key_centering="none"), 1, 128)
    assert three.bytes_per_token == 48 + 2 + 48 + 2


def test_key_codes_lie_where_the_kernels_look():
    """One 16-byte vector: the same word of tokens r, r + 8, r + 16, r + 24."""
    from tightkv.pages.pack import pack

    for bits in (2, 3, 4, 8):
        layout = PageLayout(KVQuantConfig(key_bits=bits, value_bits=4), 1, 128)
        fields = random_fields(layout, "key", 1, 1, 64)
        pages = layout.new_pages(1)
        layout.write(pages, "key", fields)
        plane = layout.planes["key", "codes"]
        words = pages[0, 0, plane.offset : plane.offset + plane.size].view(torch.int32)
        rows = pack(fields["codes"][0, 0], bits).contiguous().view(torch.int32)  # [64, 4 * bits]
        for block, j, r, c in ((0, 0, 0, 0), (1, bits - 1, 5, 3), (0, 1, 7, 2)):
            at = (((block * bits + j) * 8 + r) * 4 + c) * 4
            for i in range(4):
                assert words[at + i] == rows[32 * block + 8 * i + r, c * bits + j]


def test_value_codes_lie_where_the_kernels_look():
    """One word: four dims of two neighbouring tokens; a vector: pairs c, c + 4, c + 8, c + 12."""
    layout = PageLayout(KVQuantConfig(value_bits=8), 1, 128)
    fields = random_fields(layout, "value", 1, 1, 64)
    pages = layout.new_pages(1)
    layout.write(pages, "value", fields)
    plane = layout.planes["value", "codes"]
    data = pages[0, 0, plane.offset : plane.offset + plane.size]
    codes = fields["codes"][0, 0]  # [64, 128]
    for block, j, r, c, i in ((0, 0, 0, 0, 0), (1, 7, 5, 3, 2), (1, 2, 7, 1, 3)):
        at = ((((block * 8 + j) * 8 + r) * 4 + c) * 4 + i) * 4
        token = 2 * (16 * block + 4 * i + c)
        dim = 16 * r + 2 * j
        expected = [codes[token + k % 2, dim + k // 2] for k in range(4)]
        assert data[at : at + 4].tolist() == [int(x) for x in expected]


def test_scales_lie_four_rows_together():
    layout = PageLayout(KVQuantConfig(), 1, 64)
    pages = layout.new_pages(1)
    fields = random_fields(layout, "key", 1, 1, 64)
    fields["scale"] = torch.arange(64.0).half().view(1, 1, 64, 1)
    layout.write(pages, "key", fields)
    plane = layout.planes["key", "scale"]
    numbers = pages[0, 0, plane.offset : plane.offset + plane.size].view(torch.float16)
    assert numbers[:8].tolist() == [0, 8, 16, 24, 1, 9, 17, 25]
    assert numbers[32:36].tolist() == [32, 40, 48, 56]


@pytest.mark.parametrize("mean_bits", [8, 16])
def test_mean_precision(mean_bits):
    layout = PageLayout(KVQuantConfig(mean_bits=mean_bits), 2, 80)
    pages = layout.new_pages(3).random_(0, 256)
    mean = torch.randn(3, 2, 80) * torch.tensor([1.0, 1e3, 0.0]).view(3, 1, 1)
    layout.write_mean(pages, mean)
    error = (layout.read_mean(pages) - mean).abs().amax(-1)
    assert (error <= mean.abs().amax(-1) * (2**-11 if mean_bits == 16 else 1 / 250)).all()
    assert not layout.read_mean(pages)[2].any()


def test_outlier_channels_are_the_slow_rope_channels_or_as_named():
    cfg = KVQuantConfig(key_bits=3, value_bits=3, outlier_share=0.25)
    assert outlier_channels(cfg, 128) == (*range(48, 64), *range(112, 128))
    named = cfg.replace(outlier_channels=tuple(range(31, -1, -1)))
    assert outlier_channels(named, 128) == tuple(range(32))
    with pytest.raises(ValueError, match="needs 16 below 64"):
        outlier_channels(named, 64)
    with pytest.raises(ValueError, match="gives 0 of 64"):
        outlier_channels(cfg.replace(outlier_share=0.05), 64)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: PageLayout(KVQuantConfig(), 1, 72), "head_dim=72"),
        (lambda: PageLayout(KVQuantConfig(), 0, 64), "num_kv_heads=0"),
        (lambda: PageLayout(KVQuantConfig(), 1, 64, torch.int8), "torch.int8"),
        (lambda: PageLayout(KVQuantConfig(value_method="group"), 1, 80), "group_size=32"),
    ],
)
def test_bad_shapes(make, word):
    with pytest.raises(ValueError, match=word):
        make()
