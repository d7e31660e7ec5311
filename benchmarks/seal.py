"""Time of an append with and without error feedback, in microseconds, on one GPU.

python benchmarks/seal.py

Steps run from a CUDA graph of appends to several layers (other pages, other factors), so that
factors come from memory as in a model; the time is that of one append.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.kernels.cuda import backend as cuda
from tightkv.kernels.triton import backend as triton
from tightkv.kernels.view import AppendOptions, CacheView
from tightkv.math.feedback import QueryMetric
from tightkv.pages.codec import Codec
from tightkv.pages.layout import page_layout

DEVICE = torch.device("cuda")
HEADS, DIM, LAYERS = 8, 128, 16


class Layer:
    """`batch` rows of which the first `sealing` complete a page with their `new` newest tokens."""

    def __init__(
        self, cfg: KVQuantConfig, batch: int, sealing: int, pages: int, new: int, feedback: bool
    ) -> None:
        layout = page_layout(cfg, HEADS, DIM, torch.bfloat16)
        self.codec, self.new = Codec(layout), new
        ends, whole = _counts(batch, pages * cfg.page_size), pages * batch
        ends[sealing:] -= 5
        shape = (batch, layout.ring_tokens, HEADS, DIM)
        ring = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "kv"]
        sinks = [x.new_zeros(batch, cfg.sinks, HEADS, DIM) for x in ring]
        q = torch.randn(HEADS, 4 * DIM, DIM) * torch.logspace(0.7, -0.7, DIM)
        factors = self.codec.feedback_factors(QueryMetric(q.mT @ q), DEVICE)
        self.view = CacheView(
            layout.new_pages(whole, DEVICE),
            torch.arange(whole, dtype=torch.int32, device=DEVICE).view(batch, pages),
            ends,
            _counts(batch, 0),
            (ends - layout.ring_tokens).clamp_min(0),
            _counts(batch, cfg.sinks),
            torch.arange(batch, dtype=torch.int32, device=DEVICE),
            *ring,
            *sinks,
            feedback=factors if feedback else None,
        )
        self.exact = (ends - new - layout.ring_tokens + 16).clamp_min(0) * int(new == 1)
        self.first = torch.arange(0, batch * new + 1, new, dtype=torch.int32, device=DEVICE)
        self.tokens = [ring[0].new_empty(batch * new, HEADS, DIM).normal_() for _ in "kv"]

    def append(self, kernels: ModuleType) -> None:
        options = AppendOptions(self.first, self.exact, self.new, encode_partial_page=False)
        kernels.append(self.codec, self.view, *self.tokens, options)


def _counts(batch: int, value: int) -> Tensor:
    return torch.full((batch,), value, dtype=torch.int32, device=DEVICE)


def microseconds(run: Callable[[], None], repeats: int = 30) -> float:
    """Median time of a call, captured as a CUDA graph."""
    run()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def measure(
    title: str, kernels: ModuleType, cfg: KVQuantConfig, batch: int, sealing: int, pages: int,
    new: int, layers: int = LAYERS,
) -> None:  # fmt: skip
    times = []
    for feedback in (False, True):
        made = [Layer(cfg, batch, sealing, pages, new, feedback) for _ in range(layers)]

        def run(made: list[Layer] = made) -> None:
            for layer in made:
                layer.append(kernels)

        times.append(microseconds(run) / layers)
    plain, fed = times
    sys.stdout.write(f"{cfg.name} {title:44s} {plain:9.1f} {fed:9.1f}   x{fed / plain:.2f}\n")


def main() -> None:
    sys.stdout.write(f"{torch.cuda.get_device_name()}; us per append: plain, with feedback\n")
    for cfg in map(KVQuantConfig.preset, ("k4v4", "k2v2")):
        whole = 8192 // cfg.page_size
        for batch in (1, 8, 64, 256):
            layers = LAYERS if batch < 256 else 4
            measure(f"batch {batch}, all rows seal", cuda, cfg, batch, batch, 4, 1, layers)
            measure(f"batch {batch}, none seals", cuda, cfg, batch, 0, 4, 1)
        for batch, sealing in ((64, 2), (256, 8)):
            measure(f"batch {batch}, {sealing} rows seal", cuda, cfg, batch, sealing, 4, 1)
        measure("prefill of 8192 tokens", cuda, cfg, 1, 1, whole, 8192, 4)
        measure("batch 8, all rows seal (Triton)", triton, cfg, 8, 8, 4, 1, 4)
        measure("prefill of 8192 tokens (Triton)", triton, cfg, 1, 1, whole, 8192, 2)


if __name__ == "__main__":
    main()
