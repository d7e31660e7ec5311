"""StaticKV: the compressed cache of one layer as buffers of a module."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor, nn

from tightkv.config import FORMAT_VERSION, KVQuantConfig
from tightkv.export.operator import load_operator
from tightkv.export.static_shape import StaticShape, new_ring
from tightkv.kernels.check import check_feedback, check_options
from tightkv.kernels.constants import unsupported_codec
from tightkv.kernels.cpu import library
from tightkv.math.feedback import packed_factors
from tightkv.math.quantize import TurboQuantMSE
from tightkv.pages.codec import Codec
from tightkv.pages.layout import MAX_TOKENS, PageLayout, page_layout

_STATE_WORDS = 5
_MAGIC = b"TIGHTKVX"
_SIDE = struct.Struct("<5q2d")


class StaticKV(nn.Module):
    """Pages, ring, sinks and counters of `batch` sequences of at most `max_tokens` tokens.

    Nothing changes its size, so `torch.export` and `torch.compile` see one operator on fixed
    buffers. Pages have the bytes of `PagedKV`, but there are none for the last of `max_tokens`
    tokens, which never leave the ring. Exact tokens are kept in the layout's dtype, or in the
    codes of `window_bits=8`.
    """

    spec: Tensor  # int64: spec_of
    pages: Tensor  # uint8 [B, pages, Hkv, record_bytes]
    ring: Tensor  # new_ring
    sinks: Tensor  # [2, B, sinks, Hkv, D]
    state: Tensor  # int64 [B, 5]: length, ring_valid_from, ring_read_from, sink_count, left_pad
    feedback: Tensor | None  # float32 [Hkv, D * (D + 1) / 2]: packed_factors; [Hkv, D, D] on a GPU
    key_center: Tensor | None  # [Hkv, D]
    value_center: Tensor | None
    key_scale: Tensor | None  # [Hkv, D], by which keys are divided

    def __init__(
        self,
        layout: PageLayout,
        max_tokens: int,
        *,
        batch: int = 1,
        feedback: Tensor | None = None,
        window: int | None = None,
        device: torch.device | str = "cpu",
        query_heads: int | None = None,
        softcap: float | None = None,
        centers: tuple[Tensor, Tensor] | None = None,
        key_scale: Tensor | None = None,
    ) -> None:
        """`feedback` are the layer's `Codec.feedback_factors`; None codes each key for itself.

        `window` is the layer's sliding window. Where the ring holds it whole, there are no pages.
        On a GPU the kernels are compiled here, for queries of `query_heads` heads and the `softcap`
        that forward will be given. `centers` are those of `math.centers`, in the model's dtype:
        keys and values are stored relative to them, and keys divided by a `key_scale`
        (`math.key_scale`).
        """
        super().__init__()
        if not 1 <= max_tokens <= MAX_TOKENS:
            raise ValueError(f"max_tokens={max_tokens}; allowed: 1 to {MAX_TOKENS}")
        if batch < 1:
            raise ValueError(f"batch={batch}; it must be at least 1")
        exact = torch.empty(0, dtype=layout.dtype, device=device)
        device = exact.device  # "cuda" has a number now
        if feedback is not None:
            check_feedback(layout, feedback, device)
        check_options(window=window, softcap=softcap)
        load_operator()
        self.layout, self.max_tokens, self.window = layout, max_tokens, window
        heads, dim = layout.num_kv_heads, layout.head_dim
        count = 0 if layout.ring_holds(window) else layout.read_pages(max_tokens)
        pages = layout.new_pages(batch * count, device)
        self.kernels = 0  # of the CPU
        if device.type != "cpu":
            from tightkv.export.cuda_programs import known_kernels

            if query_heads is None or query_heads % heads:
                raise ValueError(
                    f"query_heads={query_heads}; on a GPU it must be given, as a multiple of "
                    f"{heads}"
                )
            shape = StaticShape(
                layout, query_heads, batch, max_tokens, feedback is not None, window, softcap
            )
            self.kernels = known_kernels(shape, device)
        self.register_buffer("spec", spec_of(layout, max_tokens).to(device))
        if feedback is not None and device.type == "cpu":
            feedback = packed_factors(feedback)
        self.register_buffer("feedback", feedback)
        key_center, value_center = (None, None) if centers is None else centers
        self.register_buffer("key_center", key_center)
        self.register_buffer("value_center", value_center)
        self.register_buffer("key_scale", key_scale)
        # Buffers of the tokens, not of the model:
        tokens = {
            "pages": pages.view(batch, count, *pages.shape[1:]),
            "ring": new_ring(layout, batch, device),
            "sinks": exact.new_zeros(2, batch, layout.cfg.sinks, heads, dim),
            "state": torch.zeros(batch, _STATE_WORDS, dtype=torch.int64, device=device),
        }
        for name, buffer in tokens.items():
            if device.type != "cpu":  # CUDA graphs of a compiled step may write to it in place
                torch._dynamo.mark_static_address(buffer)
            self.register_buffer(name, buffer, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor,
        *,
        left_pad: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        causal: bool = True,
    ) -> Tensor:
        """Append key and value [B, Hkv, T, D], then attend: query [B, Hq, T, D] -> [B, T, Hq, D].

        `position` int64 [T] is where the tokens go: on from the end, or from before it, which
        drops what was there; position 0 begins anew. `left_pad` int64 [B] counts the padding of
        each row and comes with position 0. `mask` is as in `attention.attend`.
        """
        if self.key_center is not None and self.value_center is not None:
            key, value = key - self.key_center[:, None], value - self.value_center[:, None]
        if self.key_scale is not None:
            key = key / self.key_scale[:, None]
            by_group = query.unflatten(1, (len(self.key_scale), -1))  # [B, Hkv, G, T, D]
            query = (by_group * self.key_scale[:, None, None]).flatten(1, 2)
        scale = 1 / math.sqrt(self.layout.head_dim) if scale is None else scale
        out: Tensor = torch.ops.tightkv.static_attention(
            query, key, value, position, left_pad, mask,
            self.spec, self.feedback, self.pages, self.ring, self.sinks, self.state,
            scale, softcap or 0.0, self.window or 0, causal, self.kernels,
        )  # fmt: skip
        if self.value_center is not None:
            heads = self.layout.num_kv_heads
            out = (out.unflatten(2, (heads, -1)) + self.value_center[:, None]).flatten(2, 3)
        return out

    @classmethod
    def exact_window(
        cls,
        window: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_tokens: int,
        **options: Any,
    ) -> StaticKV:
        """The cache of a sliding-window layer that is not compressed: a ring alone.

        `options` are the constructor's.
        """
        cfg = KVQuantConfig(page_size=32, sinks=0, window_bits=16)
        cfg = cfg.replace(exact_pages=1 + -(-(window - 1) // cfg.page_size))
        layout = page_layout(cfg, num_kv_heads, head_dim, dtype)
        return cls(layout, max_tokens, window=window, **options)

    @property
    def length(self) -> int:
        """Tokens of each row so far, padding included."""
        return int(self.state[0, 0])

    def allocated_bytes(self) -> int:
        """Bytes of every buffer."""
        return sum(x.numel() * x.element_size() for x in self.buffers())


# --- the spec: 27 words of 8 bytes, then tables; native/static_spec.c reads and checks it ---
def spec_of(layout: PageLayout, max_tokens: int) -> Tensor:
    """int64 [words]: all of a layout that the operator needs, and the most tokens of a row."""
    if reason := unsupported_codec(layout):
        raise ValueError(f"{layout.cfg.name} cannot be exported: {reason}")
    if layout.cfg.check_finite:
        raise ValueError("check_finite=True cannot be exported; set it to False")
    codec, layer = Codec(layout), library.describe(layout)
    assert isinstance(codec.key, TurboQuantMSE) and isinstance(codec.value, TurboQuantMSE)
    words = (
        FORMAT_VERSION, layer.dim, layer.heads, layer.page_size, layer.record_bytes,
        layer.centered, layer.mean_bits, layer.mean,
        layout.cfg.exact_pages, layout.ring_tokens, layout.cfg.sinks, max_tokens,
    )  # fmt: skip
    data = bytearray(_MAGIC + struct.pack(f"<{len(words)}q", *words))
    for side in (layer.key, layer.value):
        data += _SIDE.pack(
            side.bits, side.codes, side.scales, side.scale_mode, side.rotation,
            side.unit, side.gain,
        )  # fmt: skip
    for quantizer in (codec.key, codec.value):
        tables = library.side_tables(quantizer)
        if quantizer.bits == 8:  # codes are whole multiples of the unit
            del tables["thresholds"]
        for table in tables.values():
            data += _bytes(table)
    return torch.frombuffer(data, dtype=torch.int64).clone()


def _bytes(table: Tensor) -> bytes:
    raw = bytes(table.flatten().view(torch.uint8).tolist())
    return raw + bytes(-len(raw) % 8)
