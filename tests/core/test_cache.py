import pickle
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import add, make_cache, tokens
from tightkv.config import PRESETS, KVQuantConfig
from tightkv.kernels.registry import select
from tightkv.kernels.view import AppendOptions, AttendOptions
from tightkv.paged.cache import POOL_GROWTH
from tightkv.paged.sequences import SequenceTable, row_tensors
from tightkv.pages.layout import PageLayout

# Triton takes tensors of the CPU in its interpreter alone.
COMPILED = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles for the GPU")
ON_CPU = ["reference", pytest.param("triton", marks=COMPILED), "cpu"]
# Exact rings, for tests of what is in them; test_window.py has those of the default.
CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=2, window_bits=16)
CPU = torch.device("cpu")


def page_bytes(cache, row):
    """The bytes of a row's pages, wherever they lie in the pool."""
    return cache.pages[cache.table.rows[row].pages]


def relative_error(a, b):
    return float((a - b).square().sum() / a.square().sum())


@pytest.mark.parametrize("encode_partial_page", [True, False])
@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("window_bits", [8, 16])
def test_allocated_bytes_are_the_claimed_bytes(window_bits, name, dim, encode_partial_page):
    cfg = KVQuantConfig.preset(name, window_bits=window_bits)
    cache = make_cache(cfg, dim=dim, dtype=torch.bfloat16, encode_partial_page=encode_partial_page)
    key, value = tokens(2, 150, dim=dim)
    add(cache, key, value)
    assert cache.allocated_bytes() == cache.layout.total_bytes(150, 2, encode_partial_page)
    assert (
        cache.pages.numel() == sum(len(r.pages) for r in cache.table.rows) * cache.layout.page_bytes
    )
    assert cache.layout.bytes_per_token * cfg.page_size == cache.layout.page_bytes


@given(
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    encode_partial_page=st.booleans(),
    page=st.sampled_from([32, 64]),
    window_bits=st.sampled_from([8, 16]),
)
@settings(max_examples=30)
def test_appending_in_pieces_gives_the_bytes_of_appending_at_once(
    cuts, encode_partial_page, page, window_bits
):
    cfg = CFG.replace(page_size=page, window_bits=window_bits)
    key, value = tokens(2, sum(cuts))
    whole, pieces = (make_cache(cfg, encode_partial_page=encode_partial_page) for _ in range(2))
    add(whole, key, value)
    at = 0
    for n in cuts:
        add(pieces, key[:, at : at + n], value[:, at : at + n])
        at += n
    sealed = sum(cuts) // page
    for row in range(2):
        # Codes of an open page may hold leftovers past the length; sealed ones are equal.
        assert torch.equal(page_bytes(whole, row)[:sealed], page_bytes(pieces, row)[:sealed])
        for cache in (whole, pieces):
            cache.table.crop(row, sum(cuts))  # nothing to drop: the window of the newest token
    for a, b in zip(whole.dequantize(), pieces.dequantize(), strict=True):
        assert torch.equal(a, b)


def test_ring_and_sinks_are_exact_and_pages_are_close():
    cache = make_cache(CFG)
    key, value = tokens(2, 32 * 5 + 7)
    add(cache, key, value)
    state = cache.table.rows[0]
    assert (state.length, state.ring_read_from, state.sink_count) == (167, 32 * 4, 2)
    k, v = cache.dequantize()
    for exact, seen in ((key, k), (value, v)):
        assert torch.equal(seen[:, 128:], exact[:, 128:])
        assert torch.equal(seen[:, :2], exact[:, :2])
        assert not torch.equal(seen[:, 2:128], exact[:, 2:128])
    assert relative_error(value[:, 2:128], v[:, 2:128]) == pytest.approx(0.0092, rel=0.1)
    # The bias (4 of 5 parts of the energy) costs nothing once pages are centered.
    assert relative_error(key[:, 2:128], k[:, 2:128]) < 0.0095 / 4


@pytest.mark.parametrize("length,first", [(31, 0), (32, 0), (64, 0), (65, 32), (96, 32), (97, 64)])
def test_the_ring_holds_the_open_page_and_the_one_before(length, first):
    cache = make_cache(CFG)
    add(cache, *tokens(2, length))
    assert cache.table.rows[0].ring_read_from == first


def test_centering_is_chosen_per_token_and_marked_by_the_sign():
    cfg = CFG.replace(sinks=0, exact_pages=1)
    cache = make_cache(cfg, rows=1)
    key, value = tokens(1, 64, bias=4.0)
    key[:, 5] = -0.2 * key[:, 6]  # far from the mean, small: better left alone
    add(cache, key, value)
    scale = cache.layout.read(cache.pages[0], "key")["scale"][..., 0]  # [heads, page_size]
    centered = torch.signbit(scale)
    assert not centered[:, 5].any()
    assert centered[:, torch.arange(32) != 5].all()
    assert relative_error(key[:, :32], cache.dequantize()[0][:, :32]) < 0.002
    plain = make_cache(cfg.replace(key_centering="none"), rows=1)
    add(plain, key, value)
    assert not torch.signbit(plain.layout.read(plain.pages[0], "key")["scale"]).any()
    assert relative_error(key[:, :32], plain.dequantize()[0][:, :32]) > 0.008


def test_identical_keys_have_zero_scale_and_are_exact_through_the_mean():
    cache = make_cache(CFG.replace(sinks=0, exact_pages=1), rows=1)
    key = torch.ones(1, 64, 2, 64) * 3
    add(cache, key, key)
    assert torch.allclose(cache.dequantize()[0][:, :32], key[:, :32], atol=2e-2)


@pytest.mark.parametrize("encode_partial_page", [True, False])
def test_crop_inside_the_ring_and_going_on_is_as_if_nothing_happened(encode_partial_page):
    key, value = tokens(2, 150)
    other, other_value = tokens(2, 40, seed=5)
    straight, cropped = (make_cache(CFG, encode_partial_page=encode_partial_page) for _ in range(2))
    add(straight, key, value)
    add(cropped, key[:, :110], value[:, :110])
    add(cropped, other, other_value)  # rejected: 110..150, over the sealed page 96..128
    for row in range(2):
        cropped.table.crop(row, 110)
    add(cropped, key[:, 110:], value[:, 110:])
    for row in range(2):
        assert torch.equal(page_bytes(straight, row)[:4], page_bytes(cropped, row)[:4])
        assert cropped.table.rows[row].ring_read_from == straight.table.rows[row].ring_read_from
    for a, b in zip(straight.dequantize(), cropped.dequantize(), strict=True):
        assert torch.equal(a, b)


def test_numbers_may_be_tensors():
    """As some versions of transformers give them; the next token is copied by address."""
    key, value = tokens(1, 61)
    cache = make_cache(CFG, rows=1, left_pad=torch.tensor([3]))
    add(cache, key[:, :60], value[:, :60], counts=torch.tensor([60]))
    cache.table.crop(0, torch.tensor(50))
    add(cache, key[:, 50:51], value[:, 50:51], counts=torch.tensor([1]))
    state = cache.table.rows[0]
    assert (type(state.length), type(state.left_pad), state.length) == (int, int, 51)
    assert torch.equal(cache.ring_key[0, 50 % cache.ring_key.shape[1]], key[0, 50])


def test_a_ring_that_is_part_of_another_tensor_takes_the_token_in_its_place():
    key, value = tokens(1, 101)
    caches = [make_cache(CFG, rows=1, encode_partial_page=False) for _ in range(2)]
    for cache in caches:
        add(cache, key[:, :100], value[:, :100])
    wide = torch.zeros(*caches[1].ring_key.shape[:-1], 80)
    wide[..., :64] = caches[1].ring_key
    caches[1].ring_key = wide[..., :64]
    for cache in caches:
        plan = cache.table.append([0], [1])
        assert plan.ring_only
        cache.append(plan, key[:, 100:], value[:, 100:])
    assert torch.equal(caches[0].ring_key, caches[1].ring_key) and not wide[..., 64:].any()


def test_tokens_taken_back_leave_the_window_as_it_was():
    """Speculative decoding: whatever was drafted and dropped, the same tokens are read exactly."""
    key, value = tokens(1, 200)
    draft, draft_value = tokens(1, 16, seed=6)
    plain, drafted = make_cache(CFG, rows=1), make_cache(CFG, rows=1)
    for at in range(0, 200, 5):
        add(plain, key[:, at : at + 5], value[:, at : at + 5])
        add(drafted, draft, draft_value)
        drafted.table.crop(0, at)
        add(drafted, key[:, at : at + 5], value[:, at : at + 5])
        assert drafted.table.rows[0].ring_read_from == plain.table.rows[0].ring_read_from
        assert plain.table.rows[0].ring_read_from == max(0, (at // 32 - 1) * 32)
        assert torch.equal(drafted.dequantize()[0], plain.dequantize()[0])


@pytest.mark.parametrize("encode_partial_page", [True, False])
def test_crop_deep_into_a_sealed_page_keeps_its_tokens_and_takes_new_ones(encode_partial_page):
    key, value = tokens(1, 200)
    cache = make_cache(CFG, rows=1, encode_partial_page=encode_partial_page)
    add(cache, key, value)
    old_key, old_value = cache.dequantize()
    cache.table.crop(0, 45)  # page 1 holds 32..64; the ring held 160..200
    state = cache.table.rows[0]
    assert (state.length, state.ring_read_from, len(state.pages)) == (45, 45, 2)
    assert torch.equal(cache.dequantize()[0], old_key[:, :45])
    new, new_value = tokens(1, 100, seed=3)
    for at in range(0, 100, 10):
        add(cache, new[:, at : at + 10], new_value[:, at : at + 10])
    k, v = cache.dequantize()
    assert torch.equal(k[:, :45], old_key[:, :45]) and torch.equal(v[:, :45], old_value[:, :45])
    assert relative_error(new[:, :19], k[:, 45:64]) < 0.006  # centered on the old page's mean
    assert relative_error(new_value[:, :19], v[:, 45:64]) < 0.012
    assert torch.equal(k[:, 96:145], new[:, 51:])


@pytest.mark.parametrize(("seed", "wide"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize(("bits", "dim"), [(16, 64), (8, 64), (8, 80)])
def test_tokens_put_in_the_ring_alone_are_as_if_kernels_had_stored_them(bits, dim, seed, wide):
    """Steps that seal nothing take a short way; another cache of the same tokens never does."""
    random = Random(seed)
    options = {"rows": 3, "dim": dim, "encode_partial_page": False, "dtype": torch.bfloat16}
    cfg = CFG.replace(window_bits=bits)
    short, long = (make_cache(cfg, kernels="cpu", **options) for _ in range(2))
    taken = 0
    for step in range(100):
        rows, do = len(short.table), random.random()
        tables = (short.table, long.table)
        if do < 0.04:
            order = random.choices(range(rows), k=random.randint(1, 4))
            for cache in (short, long):
                cache.table.select(order)
                cache.select(order)
        elif do < 0.08:
            row = random.randrange(rows)
            length = random.randint(0, short.table.lengths[row])
            for table in tables:
                table.crop(row, length)
        elif do < 0.12:
            pad = random.randint(0, 1)
            for table in tables:
                table.add_rows([pad])
        count = random.choice([1, 1, 1, 1, 1, 1, 1, 1, 5, 60])
        some = sorted(random.sample(range(len(short.table)), random.randint(1, len(short.table))))
        dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
        key, value = (x.to(dtype) for x in tokens(len(some), count, dim=dim, seed=step))
        key[0, 0, 0, :3] = torch.tensor([torch.inf, torch.nan, -3e4])
        if wide:  # the heads of a token are not side by side: the kernels store it
            key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))
        plans = [table.append(some, [count] * len(some)) for table in tables]
        taken += plans[0].ring_only
        short.append(plans[0], key, value)
        long.append(replace(plans[1], ring_only=False), key, value)
        for table in tables:
            for a, b in zip(table.tensors(CPU), row_tensors(table.rows, CPU), strict=True):
                assert a.shape == b.shape and torch.equal(a, b)
        for name in short.exact_names:
            torch.testing.assert_close(
                getattr(short, name), getattr(long, name), rtol=0, atol=0, equal_nan=True
            )
    for a, b in zip(short.dequantize(), long.dequantize(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert taken > 5  # else nothing was compared


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("pads, first", [([0, 0], [100, 71]), ([0, 40], [100, 30]), ([3], [5])])
def test_tensors_follow_the_rows_step_by_step(pads, first, bits):
    """Those that only grew are made from the last ones."""
    table = SequenceTable(CFG.replace(window_bits=bits), encode_partial_page=False)
    rows, grew = range(len(pads)), 0
    table.add_rows(pads)
    table.append(rows, first)
    for step in range(150):
        if step == 70:
            table.crop(0, table.rows[0].length - 3)
        if step == 90:
            table.select([*rows][::-1])
        grew += table.append(rows, [1] * len(rows)).ring_only
        for a, b in zip(table.tensors(CPU), row_tensors(table.rows, CPU), strict=True):
            assert torch.equal(a, b)
    assert grew > 100


def test_views_keep_their_lengths_when_the_sequences_grow():
    cache = make_cache(CFG, encode_partial_page=False)
    key, value = tokens(2, 101)
    add(cache, key[:, :100], value[:, :100])
    view = cache.view()
    before = view.lengths.clone()
    add(cache, key[:, 100:], value[:, 100:])
    assert torch.equal(view.lengths, before) and cache.view().lengths.tolist() == [101, 101]


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_a_single_token_is_checked_and_rounded_whichever_way_it_takes(kernels):
    cache = make_cache(CFG, rows=1, dtype=torch.float16, kernels=kernels, encode_partial_page=False)
    key, value = tokens(1, 102)
    add(cache, key[:, :100], value[:, :100])
    add(cache, 1e6 * key[:, 100:101], value[:, 100:101])  # float32, beyond float16
    add(cache, key[:, 101:].half(), value[:, 101:].half())
    stored = cache.dequantize()[0][:, 100:]
    assert stored[0, 0].abs().max() == torch.finfo(torch.float16).max
    assert torch.equal(stored[:, 1], key[:, 101].half())
    with pytest.raises(ValueError, match="value has shape"):
        add(cache, key[:, :1], value[:, :1, :1])
    with pytest.raises(ValueError, match="both must have one dtype"):
        add(cache, key[:, :1], value[:, :1].half())
    checked = make_cache(
        CFG.replace(check_finite=True), rows=1, kernels=kernels, encode_partial_page=False
    )
    add(checked, key[:, :100], value[:, :100])
    with pytest.raises(ValueError, match="elements are NaN or Inf"):
        add(checked, key[:, 100:101] * torch.nan, value[:, 100:101])


def test_shared_pages_are_copied_only_when_written():
    key, value = tokens(2, 100)
    cache = make_cache(CFG)
    add(cache, key, value)
    before = [x.clone() for x in cache.dequantize()]
    cache.table.select([1, 1, 0])
    cache.select([1, 1, 0])
    assert cache.table.used_pages == 8
    k, v = cache.dequantize()
    for i, source in enumerate((1, 1, 0)):
        assert torch.equal(k[i], before[0][source]) and torch.equal(v[i], before[1][source])
    one, one_value = tokens(3, 60, seed=7)
    add(cache, one, one_value)
    k, _ = cache.dequantize()
    for i, source in enumerate((1, 1, 0)):
        assert torch.equal(k[i, 128:], one[i, 28:])
        assert relative_error(key[source, 96:], k[i, 96:100]) < 0.006
    # Rows 0 and 1 share pages 0..2 and own their later ones: 3 + 2 * 2, and 5 of row 2.
    assert cache.table.used_pages == 12
    cache.table.select([2])
    cache.select([2])
    assert cache.table.used_pages == 5


def test_losing_the_ring_loses_accuracy_never_data():
    cache = make_cache(CFG, rows=1)
    key, value = tokens(1, 90)
    add(cache, key, value)
    cache.ring_key.fill_(float("nan"))
    cache.ring_value.fill_(float("nan"))
    cache.sink_key.fill_(float("nan"))
    cache.table.drop_exact(0)
    k, v = cache.dequantize()
    assert relative_error(key, k) < 0.012 and relative_error(value, v) < 0.012
    more, more_value = tokens(1, 50, seed=2)
    for at in range(50):
        add(cache, more[:, at : at + 1], more_value[:, at : at + 1])
    k, v = cache.dequantize()
    assert torch.equal(k[:, 96:], more[:, 6:])
    assert relative_error(key[:, 64:], k[:, 64:90]) < 0.012
    assert torch.isfinite(k).all() and torch.isfinite(v).all()
    ring_only = make_cache(CFG, rows=1, encode_partial_page=False)
    add(ring_only, key, value)
    with pytest.raises(ValueError, match="encode_partial_page=True"):
        ring_only.table.drop_exact(0)


def test_append_touches_no_page_but_its_own():
    cache = make_cache(CFG)
    key, value = tokens(2, 70)
    add(cache, key, value)
    cache.reserve(20)
    before = cache.pages.clone()
    mine = {r.pages[-1] for r in cache.table.rows}
    add(cache, *tokens(2, 3, seed=4))
    changed = {i for i in range(20) if not torch.equal(before[i], cache.pages[i])}
    assert changed == mine


def test_a_growing_pool_holds_a_small_share_in_reserve():
    most = 4 * POOL_GROWTH * CFG.page_size  # so many that a share is more than a page
    cache = make_cache(CFG)
    add(cache, *tokens(1, most))
    full = len(cache.pages)
    add(cache, *tokens(1, 1, seed=4))
    assert full == 4 * POOL_GROWTH and len(cache.pages) == full + full // POOL_GROWTH


def test_rows_may_use_any_ring_of_a_pool():
    """An engine's rings are a pool, and its batch has padding tokens at the end."""
    key, value = tokens(2, 100)
    own, pooled = make_cache(CFG), make_cache(CFG)
    add(own, key, value, counts=[100, 70])
    plan = pooled.table.append([0, 1], [100, 70])
    pooled.reserve(pooled.table.num_pages)
    view, pool = pooled.view(), torch.zeros(5, pooled.layout.ring_tokens, 2, 64)
    sinks = torch.zeros(5, 2, 2, 64)
    view = replace(
        view,
        ring_rows=torch.tensor([3, 1], dtype=torch.int32),
        ring_key=pool,
        ring_value=pool.clone(),
        sink_key=sinks,
        sink_value=sinks.clone(),
    )
    options = AppendOptions(*plan.tensors(pooled.device), 100, encode_partial_page=True)
    key, value = (torch.cat([x[0, :100], x[1, :70], x[0, :3]]) for x in (key, value))
    pooled.kernels.append(pooled.codec, view, key, value, options)
    assert torch.equal(view.pages, own.pages)
    for name in ("ring_key", "ring_value", "sink_key", "sink_value"):
        assert torch.equal(getattr(view, name)[[3, 1]], getattr(own, name))
        assert not getattr(view, name)[[0, 2, 4]].any()
    q = torch.randn(2, 4, 64)
    ends = torch.arange(3, dtype=torch.int32)
    out, _ = pooled.kernels.attend(pooled.codec, q, view, ends, AttendOptions(max_queries=1))
    assert torch.equal(
        out, own.kernels.attend(own.codec, q, own.view(), ends, AttendOptions(max_queries=1))[0]
    )


@pytest.mark.parametrize("name", ON_CPU)
def test_a_row_shorter_than_its_new_tokens_is_left_alone(name):
    """What an engine's dry run sends: lengths of 0 or 1 and many tokens."""
    cache = make_cache(CFG)
    add(cache, *tokens(2, 42))
    for row in range(2):
        cache.table.crop(row, 40)
    kernels = select(name, cache.device, cache.layout)
    view = replace(cache.view(), lengths=torch.tensor([1, 42], dtype=torch.int32))
    written = ("pages", "ring_key", "ring_value", "sink_key", "sink_value")
    before = {n: getattr(view, n).clone() for n in written}
    key, value = (x.flatten(0, 1) for x in tokens(1, 42, seed=2))
    first = torch.tensor([0, 40, 42], dtype=torch.int32)
    options = AppendOptions(first, view.left_pad, 40, encode_partial_page=True)
    kernels.append(cache.codec, view, key, value, options)
    mine = cache.table.rows[0].pages
    assert torch.equal(view.pages[mine], before["pages"][mine])
    for n in written[1:]:
        assert torch.equal(getattr(view, n)[0], before[n][0])
    assert torch.equal(view.ring_key[1, 40:42], key[40:])


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("mode", ["corrected", "least_squares"])
def test_zero_keys_and_values_are_stored_as_zeros(name, mode):
    cfg = CFG.replace(key_bits=8, value_bits=8, key_scale=mode, value_scale=mode, exact_pages=1)
    cache = make_cache(cfg, rows=1)
    cache._kernels = select(name, cache.device, cache.layout).NAME
    zero = torch.zeros(1, 70, 2, 64)
    add(cache, zero, zero)
    cache.table.drop_exact(0)
    for x in cache.dequantize():
        assert torch.equal(x, zero)


def test_ragged_rows():
    cache = make_cache(CFG, rows=3)
    key, value = tokens(3, 100)
    add(cache, key, value, counts=[0, 33, 100])
    add(cache, *tokens(3, 5, seed=1), counts=[5, 0, 2])
    assert cache.table.lengths == [5, 33, 102]
    k, _ = cache.dequantize()
    assert torch.equal(k[0, :5], tokens(3, 5, seed=1)[0][0])
    assert torch.equal(k[1, :33], key[1, :33])  # all within the ring
    assert not k[0, 5:].any() and not k[1, 33:].any()
    assert torch.equal(k[2, 100:], tokens(3, 5, seed=1)[0][2, :2])


def test_left_padding_stays_out_of_means_and_sinks():
    key, value = tokens(2, 130)
    key[1, :20] = 1e4  # garbage where row 1 is padded
    cache = make_cache(CFG, left_pad=[0, 20])
    add(cache, key, value)
    k, _ = cache.dequantize()
    assert torch.equal(k[1, 20:22], key[1, 20:22]), "sinks are the first real tokens"
    assert not k[1, :20].any()
    assert relative_error(key[1, 22:96], k[1, 22:96]) < 0.0095 / 4


def test_a_refused_append_changes_nothing():
    cache = make_cache(CFG, max_pages=6)
    key, value = tokens(2, 90)
    add(cache, key, value)
    before = [x.clone() for x in cache.dequantize()]
    with pytest.raises(MemoryError, match="needs 2 pages of 32 tokens; 0 of 6 are free"):
        add(cache, key, value, counts=[10, 10])
    assert cache.table.lengths == [90, 90]
    for a, b in zip(before, cache.dequantize(), strict=True):
        assert torch.equal(a, b)
    cache.table.crop(1, 30)
    add(cache, key, value, counts=[10, 10])
    assert cache.table.lengths == [100, 40]


def test_clear_frees_every_page():
    cache = make_cache(CFG)
    add(cache, *tokens(2, 90))
    cache.table.clear()
    assert (len(cache.table), cache.table.used_pages) == (0, 0)
    cache.table.add_rows([0, 0])
    add(cache, *tokens(2, 90, seed=8))
    assert cache.table.num_pages == 6
    assert torch.equal(cache.dequantize()[0][:, 64:], tokens(2, 90, seed=8)[0][:, 64:])


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        (torch.zeros(2, 3, 64), torch.zeros(2, 3, 64), r"expected \[2, T, 2, 64\]"),
        (torch.zeros(2, 3, 2, 32), torch.zeros(2, 3, 2, 32), r"expected \[2, T, 2, 64\]"),
        (torch.zeros(1, 3, 2, 64), torch.zeros(1, 3, 2, 64), r"expected \[2, T, 2, 64\]"),
        (torch.zeros(2, 3, 2, 64), torch.zeros(2, 4, 2, 64), "must agree"),
        (torch.zeros(2, 2, 2, 64), torch.zeros(2, 2, 2, 64), "hold 3 tokens"),
        (torch.zeros(2, 3, 2, 64, device="meta"), torch.zeros(2, 3, 2, 64), "is on meta"),
    ],
)
def test_bad_operands(key, value, word):
    cache = make_cache(CFG)
    plan = cache.table.append([0, 1], [3, 3])
    with pytest.raises(ValueError, match=word):
        cache.append(plan, key, value)


def test_bad_rows():
    table = SequenceTable(CFG)
    table.add_rows([0, 0])
    for call, word in (
        (lambda: table.append([0, 2], [1, 1]), "row=2"),
        (lambda: table.append([0, 0], [1, 1]), "one count for each row"),
        (lambda: table.append([0], [-1]), "negative"),
        (lambda: table.crop(0, 1), "crop to 1"),
        (lambda: table.add_rows([-1]), "negative"),
        (lambda: table.select([5]), "row=5"),
    ):
        with pytest.raises(ValueError, match=word):
            call()
    assert table.lengths == [0, 0]


def test_table_of_another_config_is_refused():
    from tightkv.paged.cache import PagedKV

    with pytest.raises(ValueError, match="another page_size"):
        PagedKV(PageLayout(KVQuantConfig(), 2, 64), SequenceTable(CFG))


def test_a_pickled_cache_is_used_in_another_process(tmp_path):
    """There nothing has imported its kernels yet."""
    cache = make_cache(CFG, kernels="auto")
    add(cache, *tokens(2, 70))
    path, name = tmp_path / "cache", cache.kernels.NAME
    path.write_bytes(pickle.dumps(cache))
    code = f"""
import pickle
from pathlib import Path
from tightkv.paged.attention import attend
cache = pickle.loads(Path({str(path)!r}).read_bytes())
assert cache.kernels.NAME == {name!r}
query = cache.ring_key[:, -1:]
assert attend(cache, query)[0].isfinite().all()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
