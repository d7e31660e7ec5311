"""vLLM's FlashAttention 3 as attention of prompts, against plain attention. Needs a Hopper GPU."""

import pytest
import torch

pytest.importorskip("vllm")
if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
    pytest.skip("FlashAttention 3 needs a Hopper GPU", allow_module_level=True)

from ragged_caches import outputs_beside, plain_varlen, use_varlen
from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.step.flash_attention import (
    flash_attention_3,
    prefer_flash_attention,
    varlen_flash_attention_3,
)
from tightkv.kernels import sdpa
from tightkv.kernels.ragged_plan import plan_groups


@pytest.mark.parametrize("batch,heads,kv_heads,queries,keys,causal", [
    (1, 8, 2, 301, 301, True), (1, 8, 2, 1, 1, True), (3, 4, 4, 257, 999, False),
    (2, 4, 1, 130, 130, True), (1, 2, 2, 2048, 4100, False),
])  # fmt: skip
def test_flash_attention_equals_plain_attention(batch, heads, kv_heads, queries, keys, causal):
    """Queries and keys as they come: parts of larger tensors, heads in front or behind."""
    make = torch.Generator("cuda").manual_seed(0)

    def random(tokens, count):
        shape = (batch, tokens, count + 3, 128)
        x = torch.randn(shape, generator=make, device="cuda").bfloat16()
        return x[:, :, :count].transpose(1, 2)

    q, k, v = random(queries, heads), random(keys, kv_heads), random(keys, kv_heads)
    if not causal:  # as pieces of a prefix are
        k, v = (x.contiguous()[:, :, 5:] for x in (k, v))
    scale = 128**-0.5
    made = flash_attention_3(q, k, v, scale, causal)
    plain = sdpa._plain_attention(q, k, v, scale, causal)
    assert made.out.shape == q.shape and made.lse.is_contiguous()
    torch.testing.assert_close(made.out.float(), plain.out.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(made.lse, plain.lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("spare", [0, 3])
@pytest.mark.parametrize("heads,kv_heads", [(8, 2), (4, 4)])
def test_varlen_attention_equals_plain_attention(heads, kv_heads, spare):
    """In several groups; no prefix, no new tokens, and fewer tokens than the host expects."""
    counts, before = [64, 0, 200, 1, 97, 33], [1000, 70, 0, 300, 4097, 5]
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    lengths = torch.tensor(before, device="cuda").int()
    bounds = [n + spare for n in before]
    groups = plan_groups(counts, bounds, 4300, starts, lengths)
    assert len(groups) == 2
    q = torch.randn(sum(counts), heads, 128, device="cuda").bfloat16()
    for group in groups:
        shape = (group.tokens, kv_heads, 128)
        k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in "kv")
        mine, scale = q[group.queries], 128**-0.5
        out, plain_out = torch.full_like(mine, torch.nan), torch.empty_like(mine)
        lse = varlen_flash_attention_3(mine, k, v, group, scale, out)
        plain_lse = plain_varlen(mine, k, v, group, scale, plain_out)
        torch.testing.assert_close(out.float(), plain_out.float(), atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, plain_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [[1000, 333], [0, 0]], ids=["prefixes", "none"])
def test_requests_do_not_reach_each_other(lengths, dim, number, monkeypatch):
    """Tiles of keys end in the next sequence, whose values are multiplied by 0."""
    from tightkv.kernels.triton import backend as kernels

    asked = []

    def watched(*arguments):
        asked.append(1)
        return varlen_flash_attention_3(*arguments)

    use_varlen(monkeypatch, watched)
    options = {"lengths": lengths, "counts": [75, 90], "dim": dim, "dtype": torch.bfloat16}
    plain = outputs_beside(kernels, cfg=KVQuantConfig(), **options)
    made = outputs_beside(kernels, cfg=KVQuantConfig(), number=number, **options)
    assert asked == [1, 1]
    for i in (0, 2):
        assert torch.isfinite(made[i]).all() and torch.equal(made[i], plain[i])


def test_it_is_chosen(monkeypatch):
    monkeypatch.setattr(sdpa, "_PREFERRED", [])
    monkeypatch.setattr(sdpa, "_VARLEN", [])
    prefer_flash_attention.cache_clear()
    prefer_flash_attention()
    q = torch.empty(1, 2, 300, 128, device="cuda", dtype=torch.bfloat16)
    assert sdpa._backends(q, q, any_length=False)[0] is flash_attention_3
    assert sdpa.varlen_attention() is varlen_flash_attention_3
