r"""Appends, sealing and decode of uneven sequences, for NVIDIA's sanitizer.

compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck \
    python tests/support/cuda_for_sanitizer.py
"""

import dataclasses
import itertools
from unittest.mock import patch

import torch

from kernel_caches import anisotropic_metric, cache_on, fill, queries
from tightkv.config import KVQuantConfig
from tightkv.kernels.cuda import backend as cuda
from tightkv.kernels.view import AttendOptions
from tightkv.math.feedback import QueryMetric

CASES = (
    ("k4v4", 128, [700, 65, 1], [1, 2, 1]),
    ("k2v2", 128, [300, 90, 40], [1, 1, 1]),
    ("k3v2", 128, [500, 64, 7], [4, 1, 1]),
    ("k8v4", 128, [300, 64, 7], [1, 2, 1]),
    ("k8v8", 128, [300, 90, 1], [1, 1, 1]),
    ("k4v4", 80, [700, 65, 1], [1, 2, 1]),
    ("k3v3", 192, [300, 90, 40], [1, 1, 1]),
    ("k4v4/8", 128, [700, 65, 1], [1, 2, 1]),  # a window of 8 bits
    ("k3v2/8", 80, [300, 90, 40], [1, 1, 1]),
)


def main() -> None:
    # As transformers and as vLLM append; on few processors, many sequences.
    for case, partial, processors in itertools.product(CASES, (False, True), (1, 132)):
        with patch.object(cuda, "processor_count", lambda _, count=processors: count):
            run(*case, partial)


def run(preset: str, dim: int, lengths: list[int], counts: list[int], partial: bool) -> None:
    name, _, window_bits = preset.partition("/")
    cfg = KVQuantConfig.preset(name, window_bits=int(window_bits or 16))
    cache = cache_on(
        cfg, lengths, dim=dim, heads=2, dtype=torch.bfloat16, name="cuda",
        encode_partial_page=partial,
    )  # fmt: skip
    if cfg.takes_feedback and dim == 128:  # of others Triton seals
        cache.use_metric(QueryMetric(anisotropic_metric(2, 128)))
    fill(cache, lengths)
    fill(cache, counts, seed=2)
    for group in (4, 16):
        q, cu_seqlens = queries(cache, counts, group)
        view = dataclasses.replace(cache.view(), overlaps_append=True)
        options = AttendOptions(max_queries=max(counts))
        assert cuda.attend(cache.codec, q, view, cu_seqlens, options)[0].isfinite().all()


if __name__ == "__main__":
    main()
