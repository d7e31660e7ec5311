"""Latent attention (MLA) over compressed pages in plain torch: the oracle of the kernels.

Pages are uint8 [pages, page_bytes]. Queries are absorbed: a head's query meets the latent itself,
and the output is a latent, too.
"""

import math

import torch
from torch import Tensor

from tightkv.pages.latent import LatentCodec

NAME = "reference"


def append(codec: LatentCodec, pages: Tensor, latent: Tensor, rope: Tensor, slots: Tensor) -> None:
    """Write latent [T, rank] and rope [T, rope_dim] at slots [T]; negative ones are left out.

    A slot is page * page_size + place.
    """
    live = slots >= 0
    codes, scale = codec.encode(latent[live])
    codec.layout.write(pages, slots[live], codes, scale, rope[live])


def gather(
    codec: LatentCodec,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    rows: Tensor,
    out: Tensor,
) -> None:
    """Exact copies of stored tokens: out [T, rank + rope_dim], row by row of a block table.

    Row r gives the tokens from position starts[r] on to out[cu_seqlens[r] : cu_seqlens[r + 1]];
    rows [T] is r of each token of the output.
    """
    size, row = codec.layout.page_size, rows.long()
    at = torch.arange(len(out), device=out.device) - cu_seqlens[row] + starts[row]
    slots = block_table[row, at // size].long() * size + at % size
    codes, scale, rope = codec.layout.read(pages, slots)
    rank = codec.layout.rank
    out[:, :rank], out[:, rank:] = codec.decode(codes, scale), rope


def decode(
    codec: LatentCodec,
    query: Tensor,
    query_rope: Tensor,
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """query [N, H, rank], query_rope [N, H, rope_dim] -> latents [N, H, rank] and LSE [N, H].

    block_table [B, pages] and lengths [B] are of sequences with N / B queries each, the last of
    which sees all tokens. A query that sees none gets zeros and an LSE of -inf.
    """
    layout, queries = codec.layout, len(query) // max(len(lengths), 1)
    size, tokens = layout.page_size, block_table.shape[1] * layout.page_size
    at = torch.arange(tokens, device=query.device)
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float32, device=query.device)
    turned = codec.rotation(query)
    for row in range(len(query)):
        sequence, back = row // queries, queries - 1 - row % queries
        seen = at[: max(int(lengths[sequence]) - back, 0)]
        if not len(seen):
            continue
        slots = block_table[sequence, seen // size].long() * size + seen % size
        codes, byte, rope = layout.read(pages, slots)
        latent = codec.decode_rotated(codes, byte)  # [n, rank]
        scores = (turned[row] @ latent.T + query_rope[row].float() @ rope.float().T) * scale
        lse[row] = scores.logsumexp(-1)
        out[row] = scores.softmax(-1) @ latent
    return codec.rotation.inverse(out).to(query.dtype), lse
