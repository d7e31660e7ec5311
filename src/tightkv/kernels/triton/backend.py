"""append and attend in Triton: same functions as `kernels.reference`, same pages.

For configs whose codes are of the native codebook (`unsupported`).
"""

import torch

from tightkv.kernels.backend import Takes
from tightkv.kernels.constants import unsupported_codec
from tightkv.kernels.triton.append import append
from tightkv.kernels.triton.attend import attend
from tightkv.kernels.triton.device import interpreted
from tightkv.pages.layout import PageLayout

__all__ = ["NAME", "TAKES", "append", "attend", "unavailable", "unsupported"]

NAME = "triton"
TAKES = Takes(ragged=True, graphs=True)


def unavailable(device_type: str | None, asked: bool = False) -> str | None:
    """Why these kernels cannot run on a kind of device (None: on any here), or None.

    The interpreter (TRITON_INTERPRET=1) runs them on the CPU, for tests; only if `asked`.
    """
    if device_type == "cpu" and interpreted() and asked:
        return None
    if device_type not in (None, "cuda"):
        return f"Triton kernels do not run on {device_type}"
    if not torch.cuda.is_available():
        return "no CUDA or ROCm device"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80"
    return None


def unsupported(layout: PageLayout) -> str | None:
    """Why these kernels cannot run a config, or None."""
    reason = unsupported_codec(layout)
    if reason is None and not (64 <= layout.head_dim <= 256 or layout.head_dim == 512):
        return f"head_dim={layout.head_dim}; they have 64 to 256, and 512"
    if reason is None and layout.head_dim == 512 and layout.cfg.rotation == "haar":
        return 'rotation="haar" at head_dim=512; there they have "hadamard" and "none"'
    return reason
