"""Prompts of sequences of different lengths through one workspace, against the reference.

Without a GPU the kernels run in Triton's interpreter, which is set up in conftest.py.
"""

import dataclasses
import math
from typing import Any

import pytest
import torch

from kernel_caches import poison
from ragged_caches import (
    DEVICE,
    groups_of,
    outputs_beside,
    plain_varlen,
    prompts,
    ragged_cache,
    spoil,
    use_varlen,
)
from tightkv.config import KVQuantConfig
from tightkv.kernels import ragged, ragged_plan, reference, sdpa
from tightkv.kernels.view import AttendOptions
from tightkv.pages.layout import PageLayout

pytest.importorskip("triton")
pytest.importorskip("tightkv.kernels.triton.backend")
from tightkv.kernels.triton import backend as kernels
from tightkv.kernels.triton import ragged as triton_ragged
from torch_ops import TorchRaggedOps

CFG = KVQuantConfig(page_size=32, sinks=2, exact_pages=1)
PLAIN: Any = TorchRaggedOps()
LENGTHS, COUNTS = [70, 0, 1, 64, 33, 140], [5, 7, 0, 33, 1, 12]


def bits(cfg, key, value):
    return cfg.replace(key_bits=key, value_bits=value)


def assert_workspaces_agree(cache, counts, most_tokens=1 << 20, spare=0, drop=None):
    """The kernel's rows are those of the twin, in memory that was full of NaN."""
    if drop is not None:
        cache.table.drop_exact(drop)
    poison(cache)
    view, layout = cache.view(), cache.layout
    _, new_key, new_value, starts = prompts(cache, counts)
    groups = groups_of(view, counts, starts, most_tokens, spare)
    for group in groups:
        shape = (group.tokens, layout.num_kv_heads, layout.head_dim)
        new = new_key[group.queries], new_value[group.queries]
        both = []
        for ops in (triton_ragged, PLAIN):
            made = [torch.full(shape, math.nan, dtype=layout.dtype, device=DEVICE) for _ in "kv"]
            ops.load_workspace(cache.codec, view, group, *new, *made)
            both.append(made)
        for made, expected in zip(*both, strict=True):
            assert torch.isfinite(made).all()
            torch.testing.assert_close(made, expected, atol=2e-3, rtol=2e-3)
    return groups


@pytest.mark.sampled
@pytest.mark.parametrize(
    "dim,widths",
    [(64, (4, 4)), (128, (4, 4)), (256, (4, 4)), (64, (2, 2)), (64, (8, 8)), (64, (3, 3)),
     (80, (3, 2)), (128, (8, 4))],
)  # fmt: skip
def test_workspace_is_the_twins(dim, widths):
    """Pages, sinks, rings and new tokens; no prefix, none but a sink, page boundaries."""
    cache = ragged_cache(bits(CFG, *widths), LENGTHS, dim)
    assert len(assert_workspaces_agree(cache, COUNTS)) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("encode_partial_page", [True, False])
@pytest.mark.parametrize(
    "cfg",
    [CFG.replace(sinks=0), CFG.replace(sinks=32, exact_pages=3), CFG.replace(rotation="haar"),
     CFG.replace(page_size=64, rotation="none", mean_bits=16), CFG.replace(key_centering="none"),
     CFG.replace(window_bits=8)],
    ids=["no sinks", "many sinks", "haar", "not rotated", "not centered",
         "ring of codes"],
)  # fmt: skip
def test_workspace_for_other_configs(cfg, encode_partial_page):
    cache = ragged_cache(cfg, LENGTHS, encode_partial_page=encode_partial_page)
    assert_workspaces_agree(cache, COUNTS)


def test_workspace_with_left_pads():
    pads = [3, 0, 0, 40, 33, 64]
    cache = ragged_cache(CFG, LENGTHS, left_pad=pads)
    assert_workspaces_agree(cache, COUNTS)


@pytest.mark.parametrize(
    "lengths,counts,spare", [([140, 140, 70], [4, 40, 3], 0), ([70, 141], [3, 0], 1)]
)
def test_workspace_where_a_ring_was_lost(lengths, counts, spare):
    """Codes end anywhere in a block then, and nothing is written after them."""
    cache = ragged_cache(CFG, lengths, encode_partial_page=True)
    assert_workspaces_agree(cache, counts, spare=spare, drop=1)


@pytest.mark.parametrize("spare", [1, 40, 300])
def test_workspace_where_the_host_expects_more_tokens(spare):
    """Rows that attention may read beyond the last token are zeros."""
    cache = ragged_cache(CFG, [70, 33])
    _, new_key, new_value, starts = prompts(cache, [5, 12])
    view = cache.view()
    (group,) = groups_of(view, [5, 12], starts, spare=spare)
    assert group.tokens == 120 + 2 * spare
    made = [torch.full((group.tokens, 2, 64), math.nan, device=DEVICE).half() for _ in "kv"]
    triton_ragged.load_workspace(cache.codec, view, group, new_key, new_value, *made)
    assert all(torch.isfinite(x[: 120 + triton_ragged.TAIL]).all() for x in made)
    assert not any(x[120 : 120 + triton_ragged.TAIL].any() for x in made)


def test_nothing_is_written_beyond_the_workspace():
    """Should the host expect too few tokens: other memory stays as it is."""
    cache = ragged_cache(CFG, [70, 97])
    _, new_key, new_value, starts = prompts(cache, [5, 12])
    view = cache.view()
    (group,) = groups_of(view, [5, 12], starts)
    for missing in (1, 7, 40):
        held = [torch.full((group.tokens, 2, 64), 7.0, device=DEVICE).half() for _ in "kv"]
        short = group._replace(tokens=group.tokens - missing)
        room = [x[: short.tokens] for x in held]
        triton_ragged.load_workspace(cache.codec, view, short, new_key, new_value, *room)
        assert all((x[short.tokens :] == 7).all() for x in held)


def test_more_sequences_than_are_looked_up_at_a_time():
    lengths, counts = [i % 5 for i in range(140)], [i % 3 for i in range(140)]
    cache = ragged_cache(CFG, lengths, heads=1)
    assert_workspaces_agree(cache, counts)


@pytest.mark.parametrize("dim,rotation", [(64, "hadamard"), (80, "haar"), (128, "none")])
def test_rotated_rows(dim, rotation):
    codec = ragged_cache(CFG.replace(rotation=rotation), [0], dim).codec
    x = torch.randn(7, 9, dim + 16, device=DEVICE).half()[:, 2:8, :dim]
    made, expected = (ops.rotate_queries(codec, x) for ops in (triton_ragged, PLAIN))
    assert made.is_contiguous()
    torch.testing.assert_close(made, expected, atol=2e-3, rtol=2e-3)
    out = [torch.zeros(7, 9, dim + 16, device=DEVICE).half() for _ in range(2)]
    for ops, whole in zip((triton_ragged, PLAIN), out, strict=True):
        ops.unrotate(codec, made, whole[:, 2:8, :dim])
    torch.testing.assert_close(*out, atol=2e-3, rtol=2e-3)
    assert not out[0][:, :2].any() and not out[0][:, 8:].any() and not out[0][..., dim:].any()
    torch.testing.assert_close(out[0][:, 2:8, :dim], x, atol=4e-3, rtol=4e-3)


def attend_both(cache, counts, view=None, most_tokens=1 << 20, spare=0, group=3, **options):
    """Output and LSE with the workspace, then the reference's."""
    query, new_key, new_value, starts = prompts(cache, counts, group)
    view = cache.view() if view is None else view
    view = dataclasses.replace(view, ragged=groups_of(view, counts, starts, most_tokens, spare))
    asked = AttendOptions(
        max(counts), scale=0.1, new_key=new_key, new_value=new_value,
        out=torch.full_like(query, math.nan), **options,
    )  # fmt: skip
    made = kernels.attend(cache.codec, query, view, starts, asked)
    return made, reference.attend(cache.codec, query, view, starts, asked._replace(out=None))


def assert_close(made, expected):
    """The budget of `extend`."""
    torch.testing.assert_close(made[1], expected[1], atol=5e-3, rtol=1e-3)
    torch.testing.assert_close(made[0], expected[0], atol=8e-3, rtol=4e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("most_tokens,calls", [(1 << 20, 1), (152, 3)])
@pytest.mark.parametrize("ops", ["kernels", "torch"])
def test_attention_is_the_references(ops, most_tokens, calls, group, monkeypatch):
    """In one group and in several; a prompt of no tokens, one without a prefix."""
    asked = []

    def watched(q, k, v, group, scale, out):
        asked.append(group)
        return plain_varlen(q, k, v, group, scale, out)

    use_varlen(monkeypatch, watched)
    if ops == "torch":
        for name in ("rotate_queries", "unrotate", "load_workspace"):
            monkeypatch.setattr(triton_ragged, name, getattr(PLAIN, name))
    cache = ragged_cache(CFG, LENGTHS)
    poison(cache)
    assert_close(*attend_both(cache, COUNTS, most_tokens=most_tokens, group=group))
    assert len(asked) == calls
    assert all(x.tokens <= most_tokens for x in asked)


def test_rounding_of_rotated_tokens(monkeypatch):
    """New tokens are rounded once rotated, and so is the output before it is rotated back."""
    use_varlen(monkeypatch)
    cache = ragged_cache(CFG, [140, 70])
    made, expected = attend_both(cache, [12, 30])
    monkeypatch.setattr(sdpa, "_VARLEN", [])
    pages, _ = attend_both(cache, [12, 30])
    off = [(x[0].float() - expected[0].float()).square().mean().sqrt() for x in (made, pages)]
    assert 0 < off[0] < 2.5 * off[1], off


def test_prompts_without_a_prefix_are_attended_to_where_they_are(monkeypatch):
    """Nothing is rotated, so nothing is rounded; keys beside another sequence's are copied."""
    asked = []

    def watched(q, k, v, group, scale, out):
        asked.append((q, k, v, out))
        return plain_varlen(q, k, v, group, scale, out)

    use_varlen(monkeypatch, watched)
    cache = ragged_cache(CFG, [0, 0, 0])
    poison(cache)
    query, new_key, new_value, starts = prompts(cache, [9, 0, 40])
    view = cache.view()
    view = dataclasses.replace(view, ragged=groups_of(view, [9, 0, 40], starts, 45))
    out = torch.full_like(query, math.nan)
    options = AttendOptions(40, new_key=new_key, new_value=new_value, out=out)
    made = kernels.attend(cache.codec, query, view, starts, options)
    expected = reference.attend(cache.codec, query, view, starts, options._replace(out=None))
    assert_close(made, expected)
    given = query, new_key, new_value, out
    assert len(asked) == 2
    for call, copied in zip(asked, (True, False), strict=True):
        same = [
            x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            for x, whole in zip(call, given, strict=True)
        ]
        assert same == [True, not copied, not copied, True]
        if copied:
            assert torch.equal(call[1], new_key[:9]) and torch.equal(call[2], new_value[:9])


@pytest.mark.parametrize("lengths", [[70, 64, 33], [0, 0, 0]], ids=["prefixes", "none"])
def test_a_group_without_queries_is_left_out(lengths, monkeypatch):
    """Nothing is dequantized for nobody, and attention gets no empty call."""
    asked = []

    def watched(q, k, v, group, scale, out):
        asked.append(len(q))
        return plain_varlen(q, k, v, group, scale, out)

    use_varlen(monkeypatch, watched)
    cache = ragged_cache(CFG, lengths)
    assert_close(*attend_both(cache, [9, 0, 5], most_tokens=40, spare=40))
    assert asked == [9, 5]


@pytest.mark.parametrize("spare", [0, 9])
def test_attention_with_left_pads_and_loose_bounds(spare, monkeypatch):
    use_varlen(monkeypatch)
    cache = ragged_cache(CFG, [70, 33, 64], left_pad=[3, 20, 40])
    poison(cache)
    assert_close(*attend_both(cache, [9, 5, 7], spare=spare))


def test_what_the_engine_refuses_is_read_out_of_the_pages(monkeypatch):
    """Once: nobody asks again. The line says so."""
    asked = []

    def refuse(*arguments):
        asked.append(1)
        raise RuntimeError("no such head")

    use_varlen(monkeypatch, refuse)
    cache = ragged_cache(CFG, [70, 33])
    with pytest.warns(UserWarning, match="no such head"):
        assert_close(*attend_both(cache, [9, 5]))
    assert_close(*attend_both(cache, [9, 5]))
    assert asked == [1] and sdpa.varlen_attention() is None


def test_what_goes_another_way(monkeypatch):
    """Windows, caps, float32; and all of it where the engine has no such attention."""

    def never(*arguments):
        raise AssertionError

    use_varlen(monkeypatch, never)
    cache = ragged_cache(CFG, [70, 33])
    for options in ({"window": 20}, {"softcap": 5.0}, {"causal": False}):
        attend_both(cache, [9, 5], **options)
    attend_both(ragged_cache(CFG, [70, 33], dtype=torch.float32), [9, 5])
    wide = ragged_cache(CFG, [10, 3], 512)
    assert not ragged.can_extend_ragged(wide.codec, *_can_extend_arguments(wide, [2, 1])), (
        "FlashAttention has heads of 256"
    )
    assert ragged.can_extend_ragged(cache.codec, *_can_extend_arguments(cache, [2, 1]))
    monkeypatch.setattr(sdpa, "_VARLEN", [])
    assert_close(*attend_both(cache, [9, 5]))


def _can_extend_arguments(cache, counts):
    query, new_key, new_value, starts = prompts(cache, counts)
    view = dataclasses.replace(cache.view(), ragged=groups_of(cache.view(), counts, starts))
    return query, view, new_key, new_value


# --- numbers of one request stay out of another's output ---
@pytest.mark.sampled
@pytest.mark.parametrize("ops", [triton_ragged, PLAIN], ids=["kernels", "torch"])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 60_000.0])
@pytest.mark.parametrize(
    "cfg,dtype",
    [(CFG, torch.float16), (CFG, torch.bfloat16), (bits(CFG, 8, 8), torch.float16),
     (CFG.replace(mean_bits=8), torch.float16), (CFG.replace(rotation="haar"), torch.float16),
     (CFG.replace(rotation="none"), torch.bfloat16),
     (CFG.replace(window_bits=8), torch.float16)],
    ids=["float16", "bfloat16", "8 bits", "8-bit means", "haar", "not rotated",
         "ring of codes"],
)  # fmt: skip
def test_the_workspace_is_finite(cfg, dtype, number, ops):
    """Whatever pages, rings, sinks and new tokens hold; other sequences are as they were."""
    lengths, counts = [70, 133, 64], [5, 40, 9]
    cache = ragged_cache(cfg, lengths, dtype=dtype)
    _, new_key, new_value, starts = prompts(cache, counts)
    (group,) = groups_of(cache.view(), counts, starts)
    both = []
    for _ in range(2):
        made = torch.full((2, group.tokens, 2, 64), math.nan, dtype=dtype, device=DEVICE)
        ops.load_workspace(cache.codec, cache.view(), group, new_key, new_value, *made)
        assert torch.isfinite(made).all()
        both.append(made)
        spoil(cache, 1, number)
        new_key[5:45] = new_value[5:45] = number
    first, second = 70 + 5, 70 + 5 + 133 + 40
    for mine in (slice(0, first), slice(second, None)):
        assert torch.equal(both[0][:, mine], both[1][:, mine])
    bad = both[1][:, first:second]
    assert not torch.equal(bad, both[0][:, first:second])
    assert math.isfinite(number) or not bad.any(), "zeros"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_numbers_of_a_dtype_stay_finite_once_rotated(dtype):
    cache = ragged_cache(CFG, [40, 40], dtype=dtype)
    _, new_key, new_value, starts = prompts(cache, [5, 5])
    new_key[:] = new_value[:] = torch.finfo(dtype).max
    (group,) = groups_of(cache.view(), [5, 5], starts)
    for ops in (triton_ragged, PLAIN):
        made = torch.full((2, group.tokens, 2, 64), math.nan, dtype=dtype, device=DEVICE)
        ops.load_workspace(cache.codec, cache.view(), group, new_key, new_value, *made)
        assert torch.isfinite(made).all()


@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("lengths", [[70, 133, 64], [0, 0, 0]], ids=["prefixes", "none"])
def test_requests_do_not_reach_each_other(lengths, number, monkeypatch):
    """Attention reads tiles that end in the next sequence, and multiplies its values by 0."""
    use_varlen(monkeypatch)
    counts = [5, 40, 9]
    options = {"lengths": lengths, "counts": counts, "cfg": CFG}
    plain = outputs_beside(kernels, **options)
    made = outputs_beside(kernels, number=number, **options)
    for i in (0, 2, 3, 5):
        assert torch.isfinite(made[i]).all() and torch.equal(made[i], plain[i])


# --- the plan ---
def test_groups_are_neighbours_that_fit(monkeypatch):
    counts, before = [3, 1, 0, 5, 2], [10, 20, 30, 1, 0]
    starts = torch.tensor([0, 3, 4, 4, 9, 11], dtype=torch.int32)
    lengths = torch.tensor([10, 18, 30, 1, 0], dtype=torch.int32)  # the host expects 20
    groups = ragged_plan.plan_groups(counts, before, 36, starts, lengths)
    assert [(g.rows.start, g.rows.stop) for g in groups] == [(0, 2), (2, 4), (4, 5)]
    assert [(g.queries.start, g.queries.stop) for g in groups] == [(0, 4), (4, 9), (9, 11)]
    assert [g.cu_seqlens_q.tolist() for g in groups] == [[0, 3, 4], [0, 0, 5], [0, 2]]
    assert [g.cu_seqlens_k.tolist() for g in groups] == [[0, 13, 32], [0, 30, 36], [0, 2]]
    assert [g.cu_blocks.tolist() for g in groups] == [[0, 1, 2], [2, 3, 4], [4, 5]]
    assert [(g.tokens, g.blocks, g.max_queries, g.max_keys) for g in groups] == [
        (34, 2, 3, 21), (36, 2, 5, 30), (2, 1, 2, 2),
    ]  # fmt: skip
    assert [g.is_fresh for g in groups] == [False, False, True]
    assert all(x.dtype == torch.int32 for g in groups for x in g[2:5])


@pytest.mark.parametrize(
    "heads,dim,tokens", [(8, 128, 65_536), (2, 256, 131_072), (64, 64, 16_384)]
)
def test_the_workspace_is_bounded(heads, dim, tokens):
    layout = PageLayout(KVQuantConfig(), heads, dim, torch.bfloat16)
    assert ragged_plan.workspace_tokens(layout) == tokens


def test_what_a_call_takes(monkeypatch):
    """Groups that fill the workspace take as much as is said, rotated queries and output too.

    What is left of it is the LSEs' and for splits of the keys.
    """
    taken = []

    def watched(q, k, v, group, scale, out):
        whole = sum(x.untyped_storage().nbytes() for x in (q, k, v, out))
        taken.append(whole)
        return plain_varlen(q, k, v, group, scale, out)

    use_varlen(monkeypatch, watched)
    cache = ragged_cache(CFG, [70, 33, 64])
    layout = cache.layout
    monkeypatch.setattr(ragged_plan, "WORKSPACE_BYTES", 75 * 2 * 2 * 64 * 2)
    room = ragged_plan.workspace_tokens(layout)
    assert room == 75
    attend_both(cache, [5, 1, 7], most_tokens=room)
    left = 3 * 13 * 6 * 4 + ragged_plan.SPLIT_ROWS * 64 * 4
    assert taken == [ragged_plan.most_bytes(layout, 13, 6) - left] * 3


def test_few_queries_or_few_tokens_are_not_worth_a_workspace():
    assert ragged_plan.is_worth([128] * 32, [8000] * 32)
    assert ragged_plan.is_worth([64] * 32, [8000] * 32)
    assert not ragged_plan.is_worth([40] * 32, [8000] * 32)
    assert ragged_plan.is_worth([160], [8192])
    assert not ragged_plan.is_worth([160] * 4, [1024] * 4), "launches take longer"
    assert not ragged_plan.is_worth([100], [100])
    assert not ragged_plan.is_worth([], [])
    assert ragged_plan.is_worth([100, 20], [0, 0]), "nothing to dequantize"
    assert ragged_plan.is_worth([1, 200], [1000, 8000]), "a decode among prompts"
    assert not ragged_plan.is_worth([1] * 31 + [64], [8000] * 32), "a prompt among decodes"
