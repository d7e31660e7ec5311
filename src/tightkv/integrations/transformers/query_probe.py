"""The metric of a model's queries, and scales of its keys, from one short pass of the model.

Random tokens serve nearly as well as text: what shapes H = E[q q^T] are the weights and the mean
of the hidden states, which every token has. So no data is needed, and the codes of a sequence
depend on the model alone, not on its batch or on how its prompt is cut.
"""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tightkv.integrations.transformers.recorder import AttentionCall, PerModel, recording
from tightkv.math.feedback import QueryMetric
from tightkv.math.key_scale import KeyScale, balanced_scale

PROBE_SHAPE = 4, 64  # rows, tokens
_SPAN = 2048  # positions that rows are spread over: RoPE turns queries with them
_FIRST = 4  # whose queries are left out: first tokens are unlike all others


@dataclass(frozen=True)
class Probed:
    """By the number of an attention layer. Metrics are in the model's own frame."""

    metrics: dict[int, QueryMetric] = field(default_factory=dict)
    scales: dict[int, KeyScale] = field(default_factory=dict)
    problem: str | None = None  # why nothing was measured, if so


class FeedbackWarning(UserWarning):
    """Keys are coded without feedback; the message has the way out."""


def _probe_if_possible(model: PreTrainedModel) -> Probed:
    try:
        return probe(model, probe_tokens(model))
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return Probed(
            problem=f"tightkv: {type(model).__name__} could not be run on random tokens, so its "
            f'keys are coded without feedback ({error}); feedback="off" skips the attempt'
        )


probed = PerModel(_probe_if_possible)
"""What was measured, once for a model; empty for one that cannot run on plain tokens."""


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """Random token ids of PROBE_SHAPE, always the same for a size of vocabulary."""
    generator = torch.Generator("cpu").manual_seed(0)
    size = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(size, PROBE_SHAPE, generator=generator, device="cpu")


def spread_positions(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Positions of tokens [B, N]: rows begin at equal distances within what the model serves."""
    rows, tokens = ids.shape
    config = model.config.get_text_config(decoder=True)
    span = min(_SPAN, getattr(config, "max_position_embeddings", _SPAN)) - tokens
    starts = torch.arange(rows, device="cpu") * (max(span, 0) // max(rows - 1, 1))
    return starts[:, None] + torch.arange(tokens, device="cpu")


@torch.no_grad()
def probe(model: PreTrainedModel, ids: Tensor) -> Probed:
    """Mean q q^T of each layer after RoPE, over tokens [B, N] and the queries of each KV head.

    Rows are taken for pieces of long sequences (`spread_positions`), and for pages of keys.
    """
    decoder: Any = model.get_decoder()
    training = [module for module in model.modules() if module.training]
    inputs = {"input_ids": ids.to(model.device), "use_cache": False}
    if "position_ids" in inspect.signature(decoder.forward).parameters:
        inputs["position_ids"] = spread_positions(model, ids).to(model.device)
    sums: dict[int, Tensor] = {}  # by layer: q q^T over the queries of a KV head [Hkv, D, D]
    rests: dict[int, Tensor] = {}  # and the energy of keys less their page's mean [Hkv, D]

    def add(call: AttentionCall) -> Tensor:
        if call.layer is not None:
            heads = call.key.shape[1]
            q = call.query[:, :, _FIRST:].float().unflatten(1, (heads, -1)).flatten(2, 3)
            sums[call.layer] = (q.mT @ q).sum(0)  # q [B, Hkv, G * N, D]
            keys = call.key[:, :, _FIRST:].float()
            rests[call.layer] = (keys - keys.mean(2, keepdim=True)).square().mean((0, 2))
        return call.attend()

    with recording(model, add):
        try:
            model.eval()
            decoder(**inputs)
        finally:
            for module in training:  # each for itself: parts of a model may be frozen
                module.training = True
    count = ids.shape[0] * (ids.shape[1] - _FIRST)
    finite = {n: total / count for n, total in sums.items() if total.isfinite().all()}
    scales = {n: balanced_scale(rests[n]) for n in finite}
    return Probed(
        {n: QueryMetric(mean.cpu()) for n, mean in finite.items()},  # devices have factors alone
        {n: scale for n, scale in scales.items() if scale is not None},
    )
