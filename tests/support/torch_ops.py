"""`triton.prefill` and `triton.ragged` in plain torch, for any device and config."""

from dataclasses import replace

import torch
from torch import Tensor

from tightkv.kernels import reference
from tightkv.kernels.ragged_plan import RaggedGroup
from tightkv.kernels.sdpa import AttentionState
from tightkv.kernels.view import CacheView
from tightkv.pages.codec import Codec


class TorchPrefillOps:
    """What `kernels.prefill.extend` calls."""

    def rotate_queries(self, codec: Codec, query: Tensor) -> Tensor:
        return codec.key.rotation(query).to(query.dtype).contiguous()

    def load_prefix(
        self, codec: Codec, view: CacheView, start: int, count: int, key: Tensor, value: Tensor
    ) -> None:
        for segment in reference.token_segments(codec, view):
            at = segment.position - start
            row, n = (segment.valid & (at >= 0) & (at < count)).nonzero(as_tuple=True)
            for target, x, side in ((key, segment.key, "key"), (value, segment.value, "value")):
                exact = x[row, :, n]
                rotated = exact if segment.rotated else codec.side(side).rotation(exact)
                target[row, at[row, n]] = rotated.to(target.dtype)

    def merge_states(self, old: AttentionState, new: AttentionState) -> AttentionState:
        both = torch.logaddexp(old.lse, new.lse)
        out = old.out.float() * torch.exp(old.lse - both)[..., None]
        return AttentionState(out + new.out.float() * torch.exp(new.lse - both)[..., None], both)

    def merge_and_unrotate(
        self, codec: Codec | None, prefix: AttentionState, exact: AttentionState
    ) -> None:
        out = prefix.out.float() if codec is None else codec.value.rotation.inverse(prefix.out)
        own = AttentionState(out.reshape(exact.out.shape), prefix.lse.reshape(exact.lse.shape))
        merged = self.merge_states(own, exact)
        exact.out.copy_(merged.out)
        exact.lse.copy_(merged.lse)


class TorchRaggedOps:
    """What `kernels.ragged.try_extend_ragged` calls."""

    def rotate_queries(self, codec: Codec, query: Tensor) -> Tensor:
        return codec.key.rotation(query).to(query.dtype).contiguous()

    def unrotate(self, codec: Codec, mixed: Tensor, out: Tensor) -> None:
        out.copy_(codec.value.rotation.inverse(mixed))

    def load_workspace(
        self,
        codec: Codec,
        view: CacheView,
        group: RaggedGroup,
        new_key: Tensor,
        new_value: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> None:
        starts, queries = group.cu_seqlens_k.tolist(), group.cu_seqlens_q.tolist()
        for i, row in enumerate(range(*group.rows.indices(view.batch))):
            begin, end = queries[i], queries[i + 1]
            first, pad = starts[i], int(view.left_pad[row])
            coded = dequantized_row(codec, view, row)
            for side, target, new in (("key", key, new_key), ("value", value, new_value)):
                cached = coded[side][pad:]
                at = first + len(cached)
                target[first:at] = _finite(cached, target.dtype)
                rotated = codec.side(side).rotation(new[begin:end])
                target[at : at + end - begin] = _finite(rotated, target.dtype)
        for target in (key, value):
            target[starts[-1] :] = 0


def _finite(x: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN and infinity as 0, other numbers as near as the dtype has them."""
    most = torch.finfo(dtype).max
    return torch.nan_to_num(x, 0.0, 0.0, 0.0).clamp(-most, most).to(dtype)


def dequantized_row(codec: Codec, view: CacheView, row: int) -> dict[str, Tensor]:
    """Keys and values [length, Hkv, D] of a sequence in the frame of the pages, in float32."""
    one = replace(view, **{name: getattr(view, name)[row : row + 1] for name in _BY_ROW})
    shape = (int(one.lengths), codec.layout.num_kv_heads, codec.layout.head_dim)
    found = {side: view.pages.new_zeros(shape, dtype=torch.float32) for side in ("key", "value")}
    for segment in reference.token_segments(codec, one):
        _, n = segment.valid.nonzero(as_tuple=True)
        for side, x in (("key", segment.key), ("value", segment.value)):
            exact = x[0, :, n].transpose(0, 1)
            rotated = exact if segment.rotated else codec.side(side).rotation(exact)
            found[side][segment.position[0, n]] = rotated
    return found


_BY_ROW = ("block_table", "lengths", "left_pad", "ring_read_from", "sink_counts", "ring_rows")
