"""A plain split-KV decode kernel over a bf16 cache: what Triton does without compression."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _decode_kernel(
    query, key, value, lengths, partial, partial_lse, scale, each, stride_b, stride_h,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    split, splits = tl.program_id(0), tl.num_programs(0)
    batch, head = tl.program_id(1) // HKV, tl.program_id(1) % HKV
    g, d, t = tl.arange(0, GP), tl.arange(0, D), tl.arange(0, TILE)
    tokens = tl.load(lengths + batch)
    row = (batch * HKV + head) * G + g
    q = tl.load(query + row[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
    base = batch.to(tl.int64) * stride_b + head * stride_h
    peak = tl.full([GP], float("-inf"), tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, D], tl.float32)
    for at in range(split * each, tl.minimum(tokens, (split + 1) * each), TILE):
        there = at + t < tokens
        where = base + (at + t)[:, None] * D + d[None, :]
        k = tl.load(key + where, mask=there[:, None], other=0.0)
        s = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
        s = tl.where(there[None, :], s, float("-inf"))
        new = tl.maximum(peak, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(peak - new)
        total = total * shrink + tl.sum(p, axis=1)
        v = tl.load(value + where, mask=there[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        peak = new
    at = row * splits + split
    result = acc / tl.maximum(total, 1e-30)[:, None]  # a short sequence may have fewer splits
    tl.store(partial + at[:, None] * D + d[None, :], result, mask=(g < G)[:, None])
    tl.store(partial_lse + at, peak + tl.log2(total), mask=g < G)


@triton.jit
def _merge_kernel(
    partial, partial_lse, out, SPLITS: tl.constexpr, SP: tl.constexpr, D: tl.constexpr
):
    row, s, d = tl.program_id(0), tl.arange(0, SP), tl.arange(0, D)
    lse = tl.load(partial_lse + row * SPLITS + s, mask=s < SPLITS, other=float("-inf"))
    w = tl.exp2(lse - tl.max(lse, axis=0))
    where = partial + (row * SPLITS + s)[:, None] * D + d[None, :]
    o = tl.load(where, mask=(s < SPLITS)[:, None], other=0.0)
    result = tl.sum(o * w[:, None], axis=0) / tl.sum(w, axis=0)
    tl.store(out + row * D + d, result.to(out.dtype.element_ty))


def bf16_decode(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor) -> Tensor:
    """query [B, Hq, D] over the first `lengths` [B] of key and value [B, Hkv, N, D], contiguous."""
    batch, hq, d = query.shape
    hkv, tokens = key.shape[1], key.shape[2]
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = max(1, min(2 * processors // (batch * hkv), tokens // 256, 64))
    each = triton.cdiv(triton.cdiv(tokens, splits), 64) * 64
    partial = torch.empty(batch * hq, splits, d, dtype=torch.float32, device=query.device)
    partial_lse = torch.empty(batch * hq, splits, dtype=torch.float32, device=query.device)
    out = torch.empty_like(query)
    _decode_kernel[(splits, batch * hkv)](
        query, key, value, lengths, partial, partial_lse, 1 / math.sqrt(d), each,
        key.stride(0), key.stride(1), HKV=hkv, G=hq // hkv,
        GP=max(16, triton.next_power_of_2(hq // hkv)), D=d, TILE=64 if d <= 128 else 32,
        num_warps=4, num_stages=4 if d <= 256 else 2,
    )  # fmt: skip
    _merge_kernel[(batch * hq,)](
        partial, partial_lse, out, SPLITS=splits, SP=triton.next_power_of_2(splits), D=d
    )
    return out
