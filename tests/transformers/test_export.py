"""StaticKV and tightkv::static_attention against PagedKV; operands nobody should hand over."""

import math
import struct
from typing import Any

import pytest
import torch

import sanitizers
from helpers import exact_attention, make_cache
from tightkv.config import FORMAT_VERSION, PRESETS, KVQuantConfig
from tightkv.export import StaticKV, operator_library
from tightkv.export.operator import OperatorError
from tightkv.export.static_kv import spec_of
from tightkv.paged.attention import attend
from tightkv.pages.layout import PageLayout, exact_dtype

try:
    operator_library()
except OperatorError as error:
    pytest.skip(str(error), allow_module_level=True)

SMALL = KVQuantConfig(page_size=32, exact_pages=1, sinks=2, window_bits=16)  # ring of 64 tokens


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pair:
    """A StaticKV and the PagedKV that it must agree with, bit for bit."""

    def __init__(self, cfg, *, heads=2, group=2, dim=64, dtype=torch.float32, pads=(0,), **options):
        self.static = StaticKV(PageLayout(cfg, heads, dim, dtype), 512, batch=len(pads), **options)
        self.paged = make_cache(
            cfg, rows=len(pads), heads=heads, dim=dim, dtype=dtype, left_pad=list(pads),
            encode_partial_page=False,
        )  # fmt: skip
        self.paged._kernels = "cpu"
        self.paged.feedback = options.get("feedback")
        self.heads, self.group, self.dim, self.dtype = heads, group, dim, dtype
        self.pads = torch.tensor(pads)
        self.length, self.seed = 0, 0

    def tokens(self, count):
        """Query, key and value of new tokens; keys with a common mean."""
        self.seed += 1
        heads, rows = self.heads, len(self.pads)
        x = noise(rows, heads * (self.group + 2), count, self.dim, seed=self.seed)
        x[:, -2 * heads : -heads] += 2 * noise(heads, 1, self.dim, seed=99)
        return x.to(self.dtype).split((heads * self.group, heads, heads), 1)

    def step(self, count, **options):
        """Both outputs for the next `count` tokens."""
        query, key, value = self.tokens(count)
        position = torch.arange(self.length, self.length + count)
        got = self.static(query, key, value, position, left_pad=self.pads, **options)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options["window"] = self.static.window
        plan = [range(len(self.pads)), [count] * len(self.pads)]
        if self.length and count <= 16:
            self.paged.append(self.paged.table.append(*plan), k, v)
            expected, _ = attend(self.paged, q, **options)
        else:
            if self.pads.any() and "mask" not in options:  # attend() hides what is in the cache
                at = torch.arange(self.length + count)
                options["mask"] = (at >= self.pads[:, None])[:, None, None].expand(-1, 1, count, -1)
            expected, _ = attend(self.paged, q, new_key=k, new_value=v, **options)
            self.paged.append(self.paged.table.append(*plan), k, v)
        self.length += count
        return got, expected

    def crop(self, length):
        self.length = length
        for row in range(len(self.pads)):
            self.paged.table.crop(row, length)

    def check_state(self):
        for b, row in enumerate(self.paged.table.rows):
            names = ("length", "ring_valid_from", "ring_read_from", "sink_count", "left_pad")
            assert self.static.state[b].tolist() == [getattr(row, name) for name in names]
            sealed = row.pages[: row.length // self.paged.layout.page_size]
            sealed = sealed[: self.static.pages.shape[1]]
            assert sealed
            assert torch.equal(self.static.pages[b, : len(sealed)], self.paged.pages[sealed])

    def check(self, counts, **options):
        for count in counts:
            got, expected = self.step(count, **options)
            assert torch.equal(got, expected), (self.length, count)
        self.check_state()


COUNTS = (70, 1, 1, 17, 16, 1, 40, 5, 1)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_presets_are_equal_to_the_paged_cache(preset, dtype):
    cfg = KVQuantConfig.preset(preset, page_size=32, exact_pages=1, sinks=2)
    Pair(cfg, dtype=dtype).check(COUNTS)


@pytest.mark.parametrize(
    ("heads", "group", "dim"), [(1, 8, 64), (4, 1, 80), (2, 3, 128), (1, 4, 192), (2, 2, 256)]
)
def test_shapes(heads, group, dim):
    Pair(SMALL, heads=heads, group=group, dim=dim).check(COUNTS)


@pytest.mark.parametrize(
    "options",
    [
        {"rotation": "none"},
        {"rotation": "haar"},
        {"key_centering": "none"},
        {"mean_bits": 8},
        {"sinks": 0},
        {"exact_pages": 3},
        {"page_size": 64, "key_scale": "corrected", "value_scale": "norm"},
        {"window_bits": 8},
        {"window_bits": 8, "rotation": "haar", "sinks": 0, "exact_pages": 2},
        {"window_bits": 8, "page_size": 64, "mean_bits": 8, "key_bits": 2, "value_bits": 3},
    ],
    ids=str,
)
def test_other_configs(options):
    Pair(SMALL.replace(**options)).check(COUNTS)


@pytest.mark.parametrize(
    "options",
    [{"softcap": 3.0}, {"scale": 0.3}, {"causal": False}],
    ids=str,
)
def test_options_of_attention(options):
    Pair(SMALL).check(COUNTS, **options)


@pytest.mark.parametrize("window", [2, 40, 100])
def test_windows_over_pages(window):
    Pair(SMALL, window=window).check(COUNTS)


@pytest.mark.parametrize("window", [2, 32, 33, 40])
def test_windows_in_the_ring_alone(window):
    """No pages, and the same as over exact keys and values."""
    kv = StaticKV.exact_window(window, 2, 64, torch.float32, 300, batch=2)
    assert kv.pages.numel() == 0
    query, key, value = noise(2, 4, 300, 64), noise(2, 2, 300, 64), noise(2, 2, 300, 64, seed=1)
    pads = torch.tensor([0, 7])
    lengths = (9, 70, 1, 16, 17, 100, 1, 1)
    for count, end in zip(lengths, torch.tensor(lengths).cumsum(0).tolist(), strict=True):
        new = (x[:, :, end - count : end] for x in (query, key, value))
        got = kv(*new, torch.arange(end - count, end), left_pad=pads)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        options = {"lengths": [end, end], "left_pad": [0, 7], "window": window}
        expected, _ = exact_attention(q[:, end - count : end], k, v, **options)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    new = (x[:, :, :1] for x in (query, key, value))
    forgotten = torch.tensor([max(end - 100, 1)])
    with pytest.raises(RuntimeError, match="where the ring has forgotten"):
        kv(*new, forgotten)


def test_rows_of_a_batch():
    Pair(SMALL, pads=(0, 0, 0)).check(COUNTS)


def test_left_padding():
    """Within the first chunk, longer than it, and across pages; hidden queries give zeros."""
    pair = Pair(SMALL, pads=(0, 3, 40, 75))
    for count in (70, 1, 20, 3, 1, 50, 1):
        got, expected = pair.step(count)
        # rows without a visible token are 0 in both; a mask takes another order of blocks
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-5)
        hidden = pair.pads[:, None] > torch.arange(pair.length - count, pair.length)
        assert (got[hidden] == 0).all()
    pair.check_state()


def test_padding_is_remembered():
    pair = Pair(SMALL, pads=(0, 9))
    pair.step(40)
    query, key, value = pair.tokens(1)
    position, before = torch.tensor([40]), pair.static.state.clone()
    with_pad = pair.static(query, key, value, position, left_pad=pair.pads)
    without = pair.static(query, key, value, position)  # position 40 again
    assert torch.equal(with_pad, without) and before[1, 4] == 9
    with pytest.raises(RuntimeError, match="left_pad=8 in row 1"):
        pair.static(query, key, value, position, left_pad=torch.tensor([0, 8]))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])
def test_masks(kind, heads):
    """Longer than the tokens so far, as a graph of fixed sizes has them."""
    pair = Pair(SMALL, pads=(0, 0))
    for count in (70, 1, 20, 4):
        keep = noise(2, heads, count, 512, seed=count) < 0.5
        mask = keep if kind == torch.bool else torch.where(keep, 0.25, -math.inf).to(kind)
        got, expected = pair.step(count, mask=mask, causal=False)
        assert torch.equal(got, expected)
    pair.check_state()


def test_crop_and_rewind():
    """A few tokens, within a page, before the ring, and to the beginning."""
    pair = Pair(SMALL)
    pair.check((150, 1, 1))
    for length in (149, 130, 70, 33):
        pair.crop(length)
        pair.check((1, 3, 20, 1))
    again = Pair(SMALL)
    again.static = pair.static  # position 0 forgets
    again.check(COUNTS)


def test_feedback():
    factors = torch.eye(64).expand(2, 64, 64) * (1 + noise(2, 64, 64).abs())
    factors = (factors + 0.1 * noise(2, 64, 64, seed=1).tril(-1)).contiguous()
    pair = Pair(SMALL, feedback=factors)
    assert pair.static.feedback.shape == (2, 64 * 65 // 2)
    pair.check(COUNTS)
    whole = Pair(SMALL, feedback=factors)
    whole.static.feedback = factors  # as files of earlier versions have them
    whole.check(COUNTS)
    plain = Pair(SMALL)
    plain.check(COUNTS)
    assert not torch.equal(pair.static.pages, plain.static.pages)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_tokens_may_have_another_dtype(dtype):
    """A float32 model with a ring of 16 bits attends as the paged cache with that ring does."""
    pair = Pair(SMALL, dtype=dtype, pads=(0, 0))
    pair.dtype = torch.float32
    tokens = pair.tokens
    large = {torch.float16: 1e6, torch.bfloat16: 3.4e38}[dtype]
    pair.tokens = lambda count: [x.masked_fill(x > 2.5, large) for x in tokens(count)]
    for count in (70, 1, 20, 1):
        got, expected = pair.step(count)
        assert got.dtype == torch.float32 and torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    pair.check_state()
    assert torch.equal(pair.static.ring[0], pair.paged.ring_key)


def test_any_strides():
    query, key, value = (noise(2, h, 20, 64, seed=h) for h in (4, 2, 3))
    value = value[:, :2]
    caches = [StaticKV(PageLayout(SMALL, 2, 64, torch.float32), 64, batch=2) for _ in range(2)]
    plain = caches[0](query, key, value.contiguous(), torch.arange(20))
    moved = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    assert torch.equal(caches[1](*moved, value, torch.arange(20)), plain)


def test_the_cache_ends_where_it_says():
    pair = Pair(SMALL)
    pair.static = StaticKV(PageLayout(SMALL, 2, 64, torch.float32), 161)
    pair.check((160, 1))
    with pytest.raises(
        RuntimeError, match=r"1 tokens from position 161 on; the cache has .* 0 to 160"
    ):
        pair.step(1)


@pytest.mark.parametrize("exact_pages", [1, 2])
@pytest.mark.parametrize("max_tokens", [191, 192, 193])
def test_pages_that_never_leave_the_ring_are_not_stored(max_tokens, exact_pages):
    """To the end and back again: no rewind reads a page that is not there."""
    pair = Pair(SMALL.replace(exact_pages=exact_pages))
    layout = pair.static.layout
    pair.static = StaticKV(layout, max_tokens)
    assert pair.static.pages.shape[1] == -(-max_tokens // 32) - exact_pages
    pair.check((max_tokens - 40, *[1] * 3, 17, 20))
    for back in (2, 12, 33, 70, 130):
        pair.crop(max_tokens - back)
        pair.check((1, back - 1))


def test_short_caches_have_no_pages():
    pair = Pair(SMALL.replace(exact_pages=3))
    pair.static = StaticKV(pair.static.layout, 96)
    assert pair.static.pages.shape[1] == 0
    for count in (64, 1, 31):
        got, expected = pair.step(count)
        assert torch.equal(got, expected)


def test_files_of_earlier_versions_have_all_pages():
    pair = Pair(SMALL)
    pages = pair.static.layout.new_pages(16)
    pair.static.pages = pages.view(1, *pages.shape)
    pair.check((470, 1, 40, 1))


def test_no_tokens():
    kv = StaticKV(PageLayout(SMALL, 2, 64, torch.float32), 64)
    empty = (torch.zeros(1, h, 0, 64) for h in (4, 2, 2))
    assert kv(*empty, torch.zeros(0, dtype=torch.int64)).shape == (1, 0, 4, 64)


def test_bytes_are_what_the_layout_says():
    layout = PageLayout(KVQuantConfig(), 8, 128, torch.bfloat16)
    kv = StaticKV(layout, 4096, batch=2)
    held = kv.pages.numel() + kv.ring.numel() + 2 * kv.sinks.numel()  # a ring of bytes
    counters = 2 * 5 * 4  # of the paged cache's sequences
    tables = 2 * 64 * 4  # and its block table
    unread = 2 * 3 * layout.page_bytes  # which stay in the ring
    paged = layout.total_bytes(4096, 2)
    assert held + counters + tables + unread == paged
    assert kv.allocated_bytes() == held + kv.state.numel() * 8 + kv.spec.numel() * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_caches_take_three_tenths_of_bf16(dtype):
    """SmolLM2-135M's shape at 8,192 tokens; a float32 model's exact tokens have 16 bits, too."""
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 3, 64, exact_dtype(dtype))
    kv = StaticKV(layout, 8192, feedback=torch.eye(64).expand(3, 64, 64).contiguous())
    assert kv.allocated_bytes() <= 0.3 * (2 * 8192 * 3 * 64 * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 2**31}, "max_tokens=2147483648"),
        ({"batch": 0}, "batch=0"),
        ({"cfg": KVQuantConfig(key_method="prod")}, "k4prodv4 cannot be exported: keys"),
        ({"cfg": KVQuantConfig(check_finite=True)}, "check_finite"),
        ({"feedback": torch.zeros(2, 64, 63)}, "feedback has shape"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_cannot_be_made(change, message):
    options = {"cfg": SMALL, "max_tokens": 64, **change}
    layout = PageLayout(options.pop("cfg"), 2, 64, torch.float32)
    with pytest.raises(ValueError, match=message):
        StaticKV(layout, **options)


# --- operands from elsewhere ---
NAMES = (
    "query", "key", "value", "position", "left_pad", "mask", "spec", "feedback",
    "pages", "ring", "sinks", "state", "scale", "softcap", "window", "causal",
)  # fmt: skip


def operands(batch=1, tokens=3):
    """Good ones, of a cache that holds 40 tokens."""
    kv = StaticKV(PageLayout(SMALL, 2, 64, torch.float32), 96, batch=batch)
    tensors = [noise(batch, heads, 40, 64) for heads in (4, 2, 2)]
    kv(*tensors, torch.arange(40))
    new = [x[:, :, :tokens] for x in tensors]
    values = (
        *new, torch.arange(40, 40 + tokens), None, None, kv.spec, None,
        kv.pages, kv.ring, kv.sinks, kv.state, 0.125, 0.0, 0, True,
    )  # fmt: skip
    return dict(zip(NAMES, values, strict=True))


def call(values):
    return torch.ops.tightkv.static_attention(*(values[name] for name in NAMES))


INT = torch.int64
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "query rank": ({"query": torch.zeros(4, 3, 64)}, "query has 3 dimensions"),
    "query heads": ({"query": torch.zeros(1, 3, 3, 64)}, "query has 3 heads; the cache has 2"),
    "query dim": ({"query": torch.zeros(1, 4, 3, 32)}, r"expected \[any, any, any, 64\]"),
    "query dtype": ({"query": torch.zeros(1, 4, 3, 64).double()}, "query is of another dtype"),
    "query strides": (
        {"query": torch.zeros(1, 4, 64, 3).transpose(2, 3)},
        "query must be contiguous in its last",
    ),
    "key tokens": ({"key": torch.zeros(1, 2, 4, 64)}, r"key has shape \[1, 2, 4, 64\]; expected"),
    "key heads": ({"key": torch.zeros(1, 1, 3, 64)}, "key has shape"),
    "key dtype": ({"key": torch.zeros(1, 2, 3, 64).half()}, "key is float16; expected float32"),
    "value rows": ({"value": torch.zeros(2, 2, 3, 64)}, "value has shape"),
    "rank 6": ({"value": torch.zeros(1, 1, 1, 2, 3, 64)}, "value has 6 dimensions"),
    "position count": ({"position": torch.arange(40, 42)}, "position has shape"),
    "position dtype": ({"position": torch.arange(40, 43).int()}, "position is of another dtype"),
    "position gap": ({"position": torch.tensor([40, 41, 43])}, "position has 43 after 41"),
    "position ahead": ({"position": torch.arange(41, 44)}, "position 41; the cache ends at 40"),
    "position negative": ({"position": torch.arange(-1, 2)}, "3 tokens from position -1 on"),
    "position largest": (
        {"position": torch.tensor([2**63 - 1, -(2**63), -(2**63) + 1])},
        "3 tokens from position 9223372036854775807 on",
    ),
    "left_pad shape": ({"left_pad": torch.zeros(2, dtype=INT)}, "left_pad has shape"),
    "left_pad dtype": ({"left_pad": torch.zeros(1)}, "left_pad is float32; expected int64"),
    "left_pad late": ({"left_pad": torch.ones(1, dtype=INT)}, "left_pad=1 in row 0"),
    "left_pad negative": (
        {"left_pad": torch.tensor([-1]), "position": torch.arange(3)},
        "left_pad=-1 in row 0",
    ),
    "mask rank": ({"mask": torch.zeros(3, 43)}, "mask has shape"),
    "mask short": ({"mask": torch.zeros(1, 1, 3, 42)}, "mask covers 42 tokens; the cache has 43"),
    "mask heads": ({"mask": torch.zeros(1, 3, 3, 43)}, "mask is for 1 rows and 3 heads"),
    "mask dtype": ({"mask": torch.zeros(1, 1, 3, 43, dtype=INT)}, "mask is int64"),
    "spec short": ({"spec": torch.zeros(5, dtype=INT)}, "spec is not one"),
    "spec empty": ({"spec": torch.zeros(0, dtype=INT)}, "spec is not one"),
    "spec zeros": ({"spec": torch.zeros(100, dtype=INT)}, "spec is not one"),
    "spec dtype": ({"spec": torch.zeros(100)}, "spec is float32; expected int64"),
    "feedback shape": ({"feedback": torch.zeros(2, 64, 32)}, "feedback has shape"),
    "feedback packed": ({"feedback": torch.zeros(2, 2016)}, r"feedback has shape .* 2080\]"),
    "feedback dtype": ({"feedback": torch.zeros(2, 64, 64).half()}, "feedback is float16"),
    "pages few": ({"pages": torch.zeros(1, 1, 2, 4416, dtype=torch.uint8)}, r"expected \[1, 2,"),
    "pages many": ({"pages": torch.zeros(1, 4, 2, 4416, dtype=torch.uint8)}, r"expected \[1, 3,"),
    "pages dtype": ({"pages": torch.zeros(1, 3, 2, 1)}, "pages has shape"),
    "ring short": ({"ring": torch.zeros(2, 1, 63, 2, 64)}, "ring has shape"),
    "ring dtype": ({"ring": torch.zeros(2, 1, 64, 2, 64, dtype=INT)}, "ring is int64"),
    "sinks dtype": ({"sinks": torch.zeros(2, 1, 2, 2, 64).half()}, "sinks is float16"),
    "sinks strides": (
        {"sinks": torch.zeros(1, 2, 2, 2, 64).transpose(0, 1).repeat(1, 2, 1, 1, 1)[:, ::2]},
        "sinks must be contiguous",
    ),
    "state shape": ({"state": torch.zeros(1, 4, dtype=INT)}, "state has shape"),
    "state length": ({"state": torch.tensor([[97, 50, 50, 0, 0]])}, "state .97, .* is not one"),
    "state exact": ({"state": torch.tensor([[90, 0, 64, 0, 0]])}, "state .90, .* is not one"),
    "state ring": ({"state": torch.tensor([[40, 10, 5, 0, 0]])}, "state .40, .* is not one"),
    "state sinks": ({"state": torch.tensor([[40, 0, 0, 3, 0]])}, "state .40, .* is not one"),
    "state start": ({"state": torch.tensor([[40, 0, 0, 0, -1]])}, "state .40, .* is not one"),
    "scale": ({"scale": math.nan}, "scale=nan"),
    "softcap": ({"softcap": -1.0}, "softcap=-1"),
    "window": ({"window": -1}, "window=-1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_operands_are_refused_and_change_nothing(name):
    change, message = BAD[name]
    good = operands()
    kept = {n: good[n].clone() for n in ("pages", "ring", "sinks", "state")}
    with pytest.raises(RuntimeError, match=message):
        call({**good, **change})
    assert all(torch.equal(good[n], kept[n]) for n in kept)
    call(good)


HEADER = (
    "magic", "format", "head_dim", "heads", "page_size", "record_bytes", "centered", "mean_bits",
    "mean", "exact_pages", "ring", "sinks", "max_tokens",
    *(f"{side}_{word}" for side in ("key", "value")
      for word in ("bits", "codes", "scales", "scale_mode", "rotation", "unit", "gain")),
)  # fmt: skip
VALUES = (-(2**63), -1, 0, 1, 3, 7, 16, 48, 64, 4095, 2**30, 2**31, 2**40, 2**62)


@pytest.mark.parametrize("word", range(len(HEADER)), ids=HEADER)
def test_every_word_of_a_spec_is_checked(word):
    """Another number is refused, or describes a layout that the other operands fit."""
    refused = 0
    for value in VALUES:
        values = operands()
        values["spec"] = values["spec"].clone()
        if values["spec"][word] == value:
            continue
        values["spec"][word] = value
        try:
            assert call(values).shape == (1, 3, 4, 64)
        except RuntimeError as error:
            assert "tightkv::static_attention: " in str(error)
            refused += 1
    assert refused >= 8


def test_another_format_is_refused():
    values = operands()
    values["spec"] = values["spec"].clone()
    values["spec"][1] = FORMAT_VERSION + 1
    with pytest.raises(RuntimeError, match=f"format {FORMAT_VERSION + 1}; this tightkv reads"):
        call(values)


@pytest.mark.parametrize("extra", [-1, 1])
def test_specs_of_another_length_are_refused(extra):
    values = operands()
    spec = values["spec"]
    values["spec"] = spec[:extra] if extra < 0 else torch.cat([spec, spec[:extra]])
    with pytest.raises(RuntimeError, match=r"spec ends within|words too many"):
        call(values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e9])
def test_tables_hold_numbers(bad):
    values = operands()
    first = len(HEADER)
    for at in (first, len(values["spec"]) - 1):  # signs of keys, levels of values
        spec = values["spec"].clone()
        spec[at] = struct.unpack("<q", struct.pack("<2f", bad, bad))[0]
        with pytest.raises(RuntimeError, match=r"spec has (signs|levels)\["):
            call({**values, "spec": spec})


def test_spec_has_the_format_of_the_pages():
    assert spec_of(PageLayout(SMALL, 2, 64, torch.float32), 64)[1] == FORMAT_VERSION


def test_sanitizers_find_nothing(tmp_path):
    """AddressSanitizer and UBSan over good operands, and over specs, states, operands and positions
    that were changed at random, each as large as it says."""
    configs = [
        (SMALL, 2, 64),
        (KVQuantConfig(key_bits=8, value_bits=2, page_size=32, exact_pages=2, sinks=0), 1, 48),
        (KVQuantConfig(key_bits=3, value_bits=8, mean_bits=8, exact_pages=1), 3, 32),
        (KVQuantConfig(key_bits=2, key_centering="none", rotation="none", page_size=32), 1, 16),
    ]
    specs = tmp_path / "specs"
    with specs.open("wb") as file:
        for cfg, heads, dim in configs:
            spec = spec_of(PageLayout(cfg, heads, dim, torch.float32), 200)
            file.write(struct.pack(f"<{len(spec) + 1}q", len(spec), *spec.tolist()))
    program = sanitizers.build("static_attention_driver.c", tmp_path)
    kinds = [tuple(map(int, line.split())) for line in sanitizers.run(program, specs).splitlines()]
    good, *changed = kinds
    assert good[0] > 500
    assert all(accepted > 50 and refused > 50 for accepted, refused in changed)


# --- torch's own tools ---
def test_opcheck():
    values = operands(batch=2)
    values["mask"] = torch.ones(1, 1, 3, 96, dtype=torch.bool)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    operator = torch.ops.tightkv.static_attention.default
    torch.library.opcheck(operator, tuple(values[n] for n in NAMES), test_utils=checks)
