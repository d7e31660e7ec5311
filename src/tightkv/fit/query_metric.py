"""The metric E[q q^T] of a KV head's queries, from a layer's weights alone.

Error feedback codes keys in it (`math.feedback`). Inputs x of unit RMS and no preferred direction
make queries W (g * x) + b of the covariance C = W diag(g^2) W^T + b b^T. A norm of each query
(QK-norm) and RoPE, averaged over positions, are applied to C; a KV head's metric is the sum over
its query heads.
"""

from dataclasses import replace

import torch
from torch import Tensor

from tightkv.fit.attention_weights import AttentionWeights, Projected, finite
from tightkv.fit.key_noise import turned_energy
from tightkv.model_shape.families import column

READ_BYTES = 3 << 29
"""Of larger query matrices only some heads of each group are read, one at least."""
LEAST_BITS = 3
"""Of keys that gain by this metric. Fewer need one of real queries (docs/log.md)."""

# Families whose queries are known to be what is computed here (tests compare them all).
KNOWN = tuple(column("known_queries"))
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


class MetricReader:
    """Reads the heads of one of the tensor-parallel ranks; work and results are on `device`."""

    def __init__(
        self, weights: AttentionWeights, rank: int, ranks: int, device: torch.device | str
    ) -> None:
        self.weights, self.rank, self.ranks, self.device = weights, rank, ranks, device
        total = sum(weights.matrix_bytes(layer, "q") for layer in weights.layers) / ranks
        self.share = min(1.0, READ_BYTES / max(1.0, total))
        self._ropes: dict[tuple[float, ...], MeanRope] = {}

    def metric(self, layer: int) -> Tensor:
        """[KV heads, dim, dim]."""
        heads, kv_heads = (self.weights.sizes(layer, side)[0] for side in "qk")
        group, rest = divmod(heads, kv_heads)
        if rest:
            raise ValueError(f"{heads} query heads for {kv_heads} KV heads")
        query, count = self._projection(layer, "q"), max(1, int(group * self.share))
        groups = (slice(head * group, head * group + count) for head in self._kv_heads(layer))
        found = torch.stack([self._covariance(query, heads).sum(0) for heads in groups])
        return finite(self._rope(layer)(found), f"the metric of layer {layer}")

    def key_energy(self, layer: int, page_size: int) -> Tensor:
        """[KV heads, dim]: what page means leave of each channel."""
        key, mine, weights = self._projection(layer, "k"), self._kv_heads(layer), self.weights
        heads, moving = slice(mine.start, mine.stop), key
        if key.norm is None:
            moving = replace(key, bias=None, shift=None)
        cov = self._rope(layer)(self._covariance(moving, heads))
        energy = cov.diagonal(dim1=1, dim2=2).clamp_min(0).cpu()
        constant = None if moving is key else key.constant(self._weight(key, heads), heads)
        if constant is not None:
            inv_freq = weights.inv_freq(layer)
            turned = turned_energy(constant, inv_freq, page_size, weights.interleaved) / 2
            both = turned.repeat_interleave(2, 1) if weights.interleaved else turned.repeat(1, 2)
            energy[:, : both.shape[1]] += both
        return finite(energy, f"the key energies of layer {layer}")

    def _kv_heads(self, layer: int) -> range:
        """The KV heads of this rank."""
        shape = self.weights.shape.layers[layer]
        first = self.rank * shape.num_kv_heads // self.ranks
        return range(first, first + shape.shard(self.ranks).num_kv_heads)

    def _projection(self, layer: int, side: str) -> Projected:
        self.weights.refuse_unknown(layer)
        found = self.weights.projection(layer, side)
        if found.matrix is None:
            raise ValueError(f"{found.name} is quantized")
        return found

    def _weight(self, found: Projected, heads: slice) -> Tensor:
        """[heads, dim, hidden]."""
        assert found.matrix is not None
        count, rows = heads.stop - heads.start, found.head_rows
        weight = found.matrix.rows(heads.start * rows, count * rows).read()
        return weight.to(self.device).float().view(count, rows, -1)[:, : found.dim]

    def _covariance(self, found: Projected, heads: slice) -> Tensor:
        """[heads, dim, dim]."""
        weight = self._weight(found, heads)
        cov = covariance(found.gained(weight), found.constant(weight, heads))
        if found.norm is None:
            return cov
        norm = found.norm.to(weight).view(-1, found.dim)
        if len(norm) > 1:  # of all heads together
            norm = norm[heads]
        else:
            cov = normed(cov)
        return cov * norm[:, :, None] * norm[:, None, :]

    def _rope(self, layer: int) -> MeanRope:
        inv_freq, dim = self.weights.inv_freq(layer), self.weights.sizes(layer, "k")[1]
        key = (dim, *inv_freq.tolist())
        if key not in self._ropes:
            interleaved, device = self.weights.interleaved, self.device
            self._ropes[key] = MeanRope(inv_freq, dim, interleaved, device)
        return self._ropes[key]
