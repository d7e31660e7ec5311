"""What coding each layer's keys or values would cost, from one exact pass and its gradients.

To second order, an error d in a layer's attention output changes the next token's distribution
by a KL of E[(g.d)^2] / 2, where g is the gradient of log p(y) with respect to that output and y
is drawn from p (the Fisher information; docs/doctor.md). One backward pass gives g for all
layers, so every choice of bits costs a layer's attention and no pass through the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from tightkv.config import KVQuantConfig
from tightkv.fit.calibration import Costs
from tightkv.integrations.transformers import TightCache
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.integrations.transformers.recorder import AttentionCall, recording
from tightkv.kernels.reference import dequantize, seal
from tightkv.math.centers import Centers
from tightkv.math.codebook import get_codebook
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import KeyScale
from tightkv.pages.codec import Codec
from tightkv.pages.layout import page_layout, window_step
from tightkv.pages.window import RingTokens
from tightkv.tools.eval.forward import last_logits

ESTIMATED_BITS = (2, 3, 4)  # eight cost what four do, times the ratio of their distortions


@dataclass
class Layer:
    """What attention of one layer was given, and how the model's output depends on its output."""

    query: Tensor  # [B, Hq, N, D]
    key: Tensor  # [B, Hkv, N, D]
    value: Tensor
    scale: float
    softcap: float | None
    sink: Tensor | None  # [Hq]
    added: Tensor  # zeros [B, N, Hq, D] on the output, whose gradient is wanted
    gradient: Tensor | None = None


@contextmanager
def _recording(model: Any, numbers: Sequence[int]) -> Iterator[dict[int, Layer]]:
    """Inside, the model's attention notes these layers, and no weight wants a gradient."""
    layers: dict[int, Any] = dict.fromkeys(numbers)

    def note(call: AttentionCall) -> Tensor:
        out = call.attend()
        if call.layer not in layers:
            return out
        options, added = call.options, torch.zeros_like(out, requires_grad=True)
        scale = options.get("scaling")
        scale = call.query.shape[-1] ** -0.5 if scale is None else scale
        softcap, sink = options.get("softcap"), options.get("s_aux")
        query, key, value = (x.detach() for x in (call.query, call.key, call.value))
        layers[call.layer] = Layer(query, key, value, scale, softcap, sink, added)
        return out + added

    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        with recording(model, note), torch.enable_grad():
            yield layers
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def compressible(model: Any) -> list[int]:
    """Numbers of the layers that a cache of this model compresses."""
    layers = TightCache(KVQuantConfig(protect_keys=False), model=model).layers
    return [i for i, layer in enumerate(layers) if isinstance(layer, TightLayer)]


def observe(model: Any, ids: Tensor, numbers: Sequence[int]) -> dict[int, Layer]:
    """One exact pass over a window [1, N]; the layers have no gradient."""
    with _recording(model, numbers) as layers, torch.no_grad():
        _logits(model, ids, 1)
    return layers


def record(
    model: Any, ids: Tensor, numbers: Sequence[int], first: int
) -> tuple[dict[int, Layer], Tensor]:
    """One exact pass over a window [1, N] and one back.

    Returns the layers, and the log-probabilities [1, N - 1 - first, V] after the tokens from
    `first` on.
    """
    with _recording(model, numbers) as layers:
        log_p = _log_p(model, ids, first)
        generator = torch.Generator("cpu").manual_seed(0)
        drawn = torch.multinomial(log_p.detach()[0].exp().cpu(), 1, generator=generator)
        score = log_p[0].gather(-1, drawn.to(log_p.device)).sum()
        gradients = torch.autograd.grad(score, [layer.added for layer in layers.values()])
    for layer, gradient in zip(layers.values(), gradients, strict=True):
        layer.gradient = gradient
    return layers, log_p.detach()


def _log_p(model: Any, ids: Tensor, first: int) -> Tensor:
    keep = ids.shape[1] - first
    return _logits(model, ids, keep)[:, -keep:-1].float().log_softmax(-1)


exact_log_p = torch.no_grad()(_log_p)
"""The log-probabilities that `record` returns, without its gradients."""


def _logits(model: Any, ids: Tensor, keep: int) -> Tensor:
    """Of an exact pass over a window, for its last `keep` tokens or all."""
    ids, cache = ids.to(model.device), DynamicCache(config=model.config)
    logits: Tensor = model(ids, past_key_values=cache, **last_logits(model, keep)).logits
    return logits


class Coding(NamedTuple):
    """What keys and values are coded by, besides a config."""

    metric: QueryMetric | None = None  # of the keys' queries
    centers: Centers | None = None
    scale: KeyScale | None = None  # of the keys' channels


PLAIN = Coding()


def coded(
    cfg: KVQuantConfig, key: Tensor, value: Tensor, how: Coding = PLAIN
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hkv, N, D] as sealed pages give them back; N is a whole of pages."""
    metric, centers, scale = how
    if centers is not None:
        middle = [center[:, None] for center in centers.on(key.dtype, key.device)]
        relative = key - middle[0], value - middle[1]
        keys, values = coded(cfg, *relative, Coding(metric, scale=scale))
        return keys + middle[0], values + middle[1]
    if scale is not None:
        s = scale.on(key.dtype, key.device)[:, None]
        scaled = None if metric is None else metric.scaled(scale)
        keys, values = coded(cfg, key / s, value, Coding(scaled))
        return keys * s, values
    b, heads, n, d = key.shape
    layout = page_layout(cfg, heads, d, torch.float32)
    codec, pages = Codec(layout), layout.new_pages(b * n // cfg.page_size, key.device)
    keys, values = (
        x.transpose(1, 2).reshape(-1, cfg.page_size, heads, d).contiguous() for x in (key, value)
    )
    none = torch.zeros(len(pages), dtype=torch.long, device=key.device)
    feedback = None if metric is None else codec.feedback_factors(metric, key.device)
    which = torch.arange(len(pages), device=key.device)
    seal(codec, pages, which, RingTokens(keys, values, None), none, none, feedback)
    found = []
    for y, side in zip(dequantize(codec, pages), (codec.key, codec.value), strict=True):
        x = side.rotation.inverse(y).transpose(1, 2)  # [pages, page, Hkv, D]
        found.append(x.reshape(b, n, heads, d).transpose(1, 2))
    return found[0], found[1]


def estimate(
    layer: Layer, cfgs: Sequence[KVQuantConfig], first: int, how: Coding = PLAIN
) -> tuple[dict[int, float], dict[int, float]]:
    """KL in nats, summed over the positions from `first` on, of coded keys and of coded values.

    The configs differ in their bits alone. Tokens that the cache would not read from pages
    (sinks and the window) stay exact. Errors at different positions are taken as independent.
    """
    page, end = cfgs[0].page_size, layer.query.shape[2]
    n = layer.key.shape[2] // page * page
    key, value = layer.key.float(), layer.value.float()
    hats = [coded(cfg, key[:, :, :n], value[:, :, :n], how) for cfg in cfgs]
    wrong = torch.cat([v - value[:, :, :n] for _, v in hats], -1)  # [B, Hkv, n, configs * D]
    by_key, by_value = [0.0] * len(cfgs), [0.0] * len(cfgs)
    for start, stop, sinks, coded_end in _coded_spans(cfgs[0], first, end):
        here = _Queries(layer, start, stop)
        weights = here.weights(key[:, :, :stop])
        exact = weights @ value[:, :, :stop]
        moved = (weights[..., sinks:coded_end] @ wrong[:, :, sinks:coded_end]).chunk(len(cfgs), -1)
        for i, (hat, _) in enumerate(hats):
            parts = key[:, :, :sinks], hat[:, :, sinks:coded_end], key[:, :, coded_end:stop]
            changed = here.weights(torch.cat(parts, 2)) @ value[:, :, :stop]
            by_key[i] += here.kl(changed - exact)
            by_value[i] += here.kl(moved[i])
    bits = [cfg.key_bits for cfg in cfgs]
    return dict(zip(bits, by_key, strict=True)), dict(zip(bits, by_value, strict=True))


@torch.no_grad()
def layer_costs(layer: Layer, base: KVQuantConfig, first: int, how: Coding = PLAIN) -> Costs:
    """KL per position at every number of bits, of configs like `base`.

    More bits never cost more: what an estimate says against it is noise.
    """
    cfgs = [base.replace(key_bits=b, value_bits=b) for b in ESTIMATED_BITS]
    ratio = get_codebook("fp8", 8).distortion / get_codebook("fp8", 4).distortion
    positions, sides = layer.query.shape[2] - 1 - first, list[dict[int, float]]()
    for sums in estimate(layer, cfgs, first, how):
        whole = [*sums.values(), sums[4] * ratio]
        least = accumulate((kl / positions for kl in whole), min)
        sides.append(dict(zip((*ESTIMATED_BITS, 8), least, strict=True)))
    return Costs(*sides)


@dataclass
class Moments:
    """Sums over what queries read as codes, float64. Of several windows they are added up."""

    metric: Tensor  # [Hkv, D, D]: q q^T of queries
    weight: Tensor  # [Hkv, 1], of keys and values
    key: Tensor  # [Hkv, D]
    value: Tensor

    def __add__(self, other: Moments) -> Moments:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(mine + theirs for mine, theirs in pairs))

    def centers(self) -> Centers:
        """The means of keys and of values; zero for a head whose queries read no codes."""
        whole = torch.where(self.weight > 0, self.weight, 1.0)
        return Centers(self.key / whole, self.value / whole)


@torch.no_grad()
def moments(layer: Layer, cfg: KVQuantConfig, first: int) -> Moments:
    """Of the queries from `first` on.

    With a_ij the attention of query i to a coded key j, an error e of that key moves i's output by
    a_ij (v_j - o_i) (q_i.e): q_i q_i^T has the weight sum_j a_ij (1 - a_ij). An error of value j
    moves it by a_ij e, and errors are in proportion to the length of what is coded: key and value
    of j have the weight sum_i a_ij^2, so their means leave the least to be coded.
    """
    end = layer.query.shape[2]
    key, value = layer.key.float(), layer.value.float()
    heads, dim = key.shape[1], key.shape[3]
    metric = torch.zeros(heads, dim, dim, dtype=torch.float64, device=key.device)
    attended = torch.zeros(*key.shape[:3], dtype=torch.float64, device=key.device)
    for start, stop, sinks, coded_end in _coded_spans(cfg, first, end):
        here = _Queries(layer, start, stop)
        read = here.weights(key[:, :, :stop])[..., sinks:coded_end]  # [B, Hkv, G * T, coded]
        matter = (read * (1 - read)).sum(-1, keepdim=True)
        metric += ((here.query * matter).mT @ here.query).double().sum(0)
        attended[:, :, sinks:coded_end] += read.square().sum(2)
    means = [torch.einsum("bhn,bhnd->hd", attended, x.double()) for x in (key, value)]
    return Moments(metric, attended.sum((0, 2))[:, None], *means)


def _coded_spans(cfg: KVQuantConfig, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Queries of one page each [start, stop) and the keys [sinks, coded_end) they read as codes."""
    page = cfg.page_size
    for start in (first, *range((first // page + 1) * page, end, page)):
        stop = min(end, (start // page + 1) * page)
        step = window_step(cfg)  # the window is that of the first query
        coded_end = max(0, (start // step + 1) * step - cfg.exact_pages * page)
        sinks = min(cfg.sinks, coded_end)
        if coded_end > sinks:
            yield start, stop, sinks, coded_end


class _Queries:
    """The queries of one page, grouped by KV head: [B, Hkv, G * T, D]."""

    def __init__(self, layer: Layer, start: int, stop: int) -> None:
        self.layer, self.start, self.stop = layer, start, stop
        self.heads, self.tokens = layer.key.shape[1], stop - start
        query = layer.query[:, :, start:stop].float() * layer.scale
        self.query = query.unflatten(1, (self.heads, -1)).flatten(2, 3)

    def weights(self, key: Tensor) -> Tensor:
        """Attention weights [B, Hkv, G * T, stop] over keys [B, Hkv, stop, D]."""
        scores, cap = self.query @ key.transpose(-1, -2), self.layer.softcap
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        later = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=key.device).triu(1)
        scores.unflatten(2, (-1, self.tokens))[..., self.start :].masked_fill_(later, -torch.inf)
        if self.layer.sink is None:
            return scores.softmax(-1)
        sink = self.layer.sink.float().repeat_interleave(self.tokens).view(self.heads, -1, 1)
        return torch.cat([scores, sink.expand(len(scores), -1, -1, -1)], -1).softmax(-1)[..., :-1]

    def kl(self, change: Tensor) -> float:
        """Of a change of the output [B, Hkv, G * T, D], summed over positions."""
        if self.layer.gradient is None:
            raise ValueError("this layer has no gradient")
        gradient = self.layer.gradient[:, self.start : self.stop].float()
        change = change.unflatten(2, (-1, self.tokens)).flatten(1, 2).transpose(1, 2)
        return float((gradient * change).sum((2, 3)).square().sum() / 2)
