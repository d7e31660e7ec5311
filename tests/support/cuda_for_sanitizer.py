r"""Appends, sealing and decode of uneven sequences, for NVIDIA's sanitizer.

compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck \
    python tests/support/cuda_for_sanitizer.py
"""

import torch

from kernel_caches import anisotropic_metric, cache_on, fill, queries
from tightkv.config import KVQuantConfig
from tightkv.kernels.cuda import backend as cuda
from tightkv.kernels.options import AttendOptions
from tightkv.math.feedback import QueryMetric

CASES = (
    ("k4v4", 128, [700, 65, 1], [1, 2, 1]),
    ("k2v2", 128, [300, 90, 40], [1, 1, 1]),
    ("k3v2", 128, [500, 64, 7], [4, 1, 1]),
    ("k8v4", 128, [300, 64, 7], [1, 2, 1]),
    ("k8v8", 128, [300, 90, 1], [1, 1, 1]),
    ("k4v4", 80, [700, 65, 1], [1, 2, 1]),
    ("k3v3", 192, [300, 90, 40], [1, 1, 1]),
)


def main() -> None:
    for preset, dim, lengths, counts in CASES:
        cfg = KVQuantConfig.preset(preset)
        cache = cache_on(cfg, lengths, dim=dim, heads=2, dtype=torch.bfloat16, name="cuda")
        if cfg.takes_feedback and dim == 128:  # of others Triton seals
            cache.use_metric(QueryMetric(anisotropic_metric(2, 128)))
        fill(cache, lengths)
        fill(cache, counts, seed=2)
        q, cu_seqlens = queries(cache, counts, 4)
        out, _ = cuda.attend(
            cache.codec, q, cache.view(), cu_seqlens, AttendOptions(max_queries=max(counts))
        )
        assert out.isfinite().all()


if __name__ == "__main__":
    main()
