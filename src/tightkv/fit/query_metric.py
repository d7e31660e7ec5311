"""The metric E[q q^T] of a KV head's queries, from a layer's weights alone.

Error feedback codes keys in it (`math.feedback`). Inputs x of unit RMS and no preferred direction
make queries W (g * x) + b of the covariance C = W diag(g^2) W^T + b b^T. A norm of each query
(QK-norm) and RoPE, averaged over positions, are applied to C; a KV head's metric is the sum over
its query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

POSITIONS = 4096
"""RoPE is averaged over positions up to this one."""
_STEP = 7


def covariance(weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weights [heads, dim, hidden], the input norm in them, and biases [heads, dim] -> C."""
    found = weight @ weight.mT
    return found if bias is None else found + bias[:, :, None] * bias[:, None, :]


def normed(cov: Tensor) -> Tensor:
    """E[z z^T / mean(z^2)] of z of covariance `cov` [..., dim, dim].

    To second order in C / tr C, N: the directions of most energy have less of the norm's. The
    trace is exact, and the result positive semidefinite: N (1 + 2 tr N^2 - 2 N).
    """
    size = cov.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    unit = cov / torch.where(size > 0, size, 1.0)
    energy = unit.square().sum((-2, -1), keepdim=True)  # tr N^2
    return cov.shape[-1] * ((1 + 2 * energy) * unit - 2 * unit @ unit)


class MeanRope:
    """The mean of R_p C R_p^T over positions p.

    With channels paired to complex numbers z, RoPE turns E[z_i conj(z_j)] by p (w_i - w_j) and
    E[z_i z_j] by p (w_i + w_j), so that their means are products with two constant matrices.
    """

    def __init__(
        self,
        inv_freq: Tensor,
        dim: int,
        interleaved: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        """Pairs are (i, i + pairs), or (2i, 2i + 1); channels beyond them do not turn."""
        pairs = inv_freq.numel()
        if 2 * pairs > dim or dim % 2:
            raise ValueError(f"{pairs} RoPE pairs do not fit a head of {dim} channels")
        turned = torch.arange(2 * pairs, device="cpu").view((-1, 2) if interleaved else (2, -1))
        first, second = turned.unbind(1 if interleaved else 0)
        still = torch.arange(2 * pairs, dim, device="cpu").view(2, -1)
        self.order = torch.cat([first, still[0], second, still[1]]).to(device)
        angles = torch.zeros(dim // 2, dtype=torch.float64, device="cpu")
        angles[:pairs] = inv_freq.double().cpu()
        places = torch.arange(0, POSITIONS, _STEP, dtype=torch.float64, device="cpu")[:, None]
        turns = torch.polar(torch.ones_like(places), places * angles)
        self.apart = (turns.mT @ turns.conj() / len(turns)).to(device, torch.complex64)
        self.together = (turns.mT @ turns / len(turns)).to(device, torch.complex64)

    def __call__(self, cov: Tensor) -> Tensor:
        """[..., dim, dim] -> the same."""
        half = len(self.order) // 2
        mixed = cov[..., self.order[:, None], self.order]
        aa, ab = mixed[..., :half, :half], mixed[..., :half, half:]
        ba, bb = mixed[..., half:, :half], mixed[..., half:, half:]
        apart = torch.complex(aa + bb, ba - ab) * self.apart
        together = torch.complex(aa - bb, ba + ab) * self.together
        plus, minus = (together + apart) / 2, (together - apart) / 2
        top = torch.cat([plus.real, minus.imag], -1)
        low = torch.cat([plus.imag, -minus.real], -1)
        back = self.order.argsort()
        return torch.cat([top, low], -2)[..., back[:, None], back]
