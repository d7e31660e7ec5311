"""attn_implementation="tightkv": attention over compressed pages, keys never materialized."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, prepare_padding_mask, sdpa_mask

from tightkv.config import KVQuantConfig
from tightkv.fit.key_noise import NOISE_LIMIT, needed_key_bits
from tightkv.integrations.transformers.states import CompressedStates
from tightkv.integrations.transformers.steps import Padding, left_padding, note_padding
from tightkv.math.codebook import get_codebook

NAME = "tightkv"
# What some models give to attention beside a mask: a bias, or the only keys that a query sees.
_CHANGE_SCORES = ("position_bias", "indices", "block_indices")
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what models look an implementation up in
_TABLES = "_SELF_ATTENTION_CLASSES"  # attention classes by implementation, without others
_LEAST_TOKENS = 32  # that a first look at keys needs
_MOST_PAGES = 4


def register() -> None:
    """Make "tightkv" an attention implementation of transformers."""
    AttentionInterface.register(NAME, tightkv_attention)
    AttentionMaskInterface.register(NAME, tightkv_mask)


@contextmanager
def use_attention(model: Any, name: str) -> Iterator[None]:
    """The model uses this attention implementation inside; its parts may have different ones."""
    models = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    configs = {id(each): each for part in models for each in _with_parts(part.config)}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, own in before:  # a whole before its parts, which it sets too
            config._attn_implementation = own


def _with_parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for name in config.sub_configs:
        if (part := getattr(config, name, None)) is not None:
            yield from _with_parts(part)


def tightkv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    q_offset: int = 0,
    kv_offset: int = 0,
    allow_is_causal_skip: bool = True,
    **given: Any,
) -> Tensor | None:
    """The mask sdpa would get; None where it is causal and aligned to the end.

    A model that computes attention itself gets the mask that is added to scores.
    """
    own = has_own_attention(given.get("config"))
    local_size, attention_mask = given.get("local_size"), given.get("attention_mask")
    padding = None
    if (
        not own
        and allow_is_causal_skip
        and kv_offset == 0
        and q_offset + q_length == kv_length
        and (local_size is None or kv_length <= local_size)
    ):
        padding = Padding((0,) * batch_size, causal=True)
        if attention_mask is not None:
            visible = prepare_padding_mask(attention_mask, kv_length, kv_offset)
            padding = left_padding(visible[:, :kv_length].bool())
        if padding.causal and not any(padding.starts):
            return None
    sizes, offsets = (batch_size, q_length, kv_length), (q_offset, kv_offset)
    make = eager_mask if own else sdpa_mask
    mask: Tensor = make(*sizes, *offsets, allow_is_causal_skip=False, **given)
    if padding is not None and padding.causal:
        note_padding(mask, padding)
    return mask


def has_own_attention(config: Any) -> bool:
    """Whether the model of this config computes attention in its own code (CodeGen, BLOOM).

    transformers has no such property. A model that calls it has the interface in its module; of
    modules that cannot be found nothing is known, and they count as models that do not.
    """
    if config is None:
        return False
    bases = type(config.get_text_config(decoder=True)).__mro__
    # The module of PreTrainedConfig itself says nothing of a model.
    for module in [base.__module__ for base in bases if base is not PreTrainedConfig]:
        for name in (module.replace("configuration_", "modeling_"), module):
            calls = _calls_interface(name) if name in sys.modules else None
            if calls is not None:
                return not calls
    return True


@lru_cache
def _calls_interface(name: str) -> bool | None:
    """Whether models of a module that is imported do; None of one that has no models."""
    names = vars(sys.modules[name])
    if _INTERFACE in names:
        return not any(other.endswith(_TABLES) for other in names)
    return False if "modeling_" in name else None


def tightkv_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, Hq, Lq, D] -> output [B, Lq, Hq, D]; transformers' attention signature."""
    if kwargs.get("output_attentions"):
        _warn_no_weights()
    for option in _CHANGE_SCORES:
        if kwargs.get(option) is not None:
            raise ValueError(f'attn_implementation="tightkv" has no {option}; use "sdpa"')
    if attention_mask is not None and attention_mask.dim() != 4:
        raise ValueError(
            f"attention mask of shape {tuple(attention_mask.shape)}; "
            "expected [batch, heads or 1, queries, keys]"
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if isinstance(key, CompressedStates) and not key.is_pair_with(value):  # made of the values
        key = key.step.without_gradient(key.whole(), query) if key.step.past else key.whole()
    exact = attention_mask, scaling, causal, softcap, s_aux, dropout
    if not isinstance(key, CompressedStates):  # a layer that stays uncompressed
        return _exact(module, query, key, value, *exact), None
    step, layer = key.step, key.step.layer
    if layer.centers is not None and (softcap is not None or s_aux is not None):
        raise ValueError(
            "this layer's scores have a soft cap or a sink logit, and its cache holds keys "
            "relative to a center, which changes them; leave the calibration out"
        )
    query = layer.scaled(query)
    padding_alone = layer.follow(step, attention_mask)
    if not step.past:  # the first prefill attends exactly
        if layer.shared.watch:
            noise = measured_noise(query, step.new_key, scaling, layer.cfg.page_size)
            warn_of_noise(layer.cfg, getattr(module, "layer_idx", -1), noise)
        out = _exact(module, query, step.new_key, step.new_value, *exact)
        layer.commit()
        return layer.add_center(out), None
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout:g} over a TightCache that holds tokens; call "
            "model.eval(), or train without a cache (use_cache=False)"
        )
    if padding_alone and attention_mask is not None:  # the cache knows it: kernels need no mask
        attention_mask, causal = None, True
    out, lse = layer.attend(
        step,
        query.transpose(1, 2),
        scale=scaling,
        causal=causal and attention_mask is None,
        softcap=softcap,
        mask=attention_mask,
    )
    out = step.without_gradient(out, query)
    return (out if s_aux is None else _with_sink(out, lse, s_aux)), None


@lru_cache(maxsize=1)
def _warn_no_weights() -> None:
    warnings.warn(
        'attn_implementation="tightkv" does not support output_attentions=True: there are no '
        'attention weights in its output; load the model with attn_implementation="eager"',
        stacklevel=2,
    )


def _exact(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    causal: bool,
    softcap: float | None,
    s_aux: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention over exact keys [B, Hkv, N, D]: torch's, or spelled out where it cannot."""
    lq, n = query.shape[2], key.shape[2]
    plain = softcap is None and s_aux is None
    if mask is None and causal and not (plain and lq in (1, n)):
        mask = torch.ones(lq, n, dtype=torch.bool, device=query.device).tril(n - lq)[None, None]
    if plain:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scale, is_causal=causal
        )
        return out
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1).float() for x in (key, value))
    scores = query.float() @ key.transpose(-1, -2)
    scores = scores * (scale if scale is not None else query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.float()
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None])
    weights = torch.nn.functional.dropout(weights, dropout)
    out = (weights @ value).transpose(1, 2).to(query.dtype)
    return out if s_aux is None else _with_sink(out, lse.transpose(1, 2), s_aux)


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """A learned logit [Hq] that takes part in the softmax and has no value (GPT-OSS)."""
    return (out.float() * torch.sigmoid(lse - sink.float())[..., None]).to(out.dtype)


# --- an alarm at the first keys of a model whose weights have said nothing about them ---
class KeyBitsWarning(UserWarning):
    """Keys got more bits than the config says, or would need them; the message has the way out."""


def measured_noise(query: Tensor, key: Tensor, scale: float | None, page_size: int) -> float | None:
    """`LayerScores.noise` of the worst head, from queries and keys [B, H, T, D] of a prompt.

    Its last pages are looked at: no padding, no sinks. None where it is too short.
    """
    tokens, d = key.shape[2], key.shape[3]
    page = min(page_size, tokens)
    if tokens < _LEAST_TOKENS:
        return None
    count = min(tokens // page, _MOST_PAGES) * page
    pages = key[:, :, -count:].float().unflatten(2, (-1, page))
    rest = (pages - pages.mean(3, keepdim=True)).square().sum(-1).mean((0, 2, 3))  # [Hkv]
    queries = query[:, :, -count:].float().square().sum(-1).mean((0, 2))  # [Hq]
    grouped = queries.unflatten(0, (key.shape[1], -1)).mean(1)
    factor = 1 / d if scale is None else scale * scale
    return float((factor / d * grouped * rest).max())


def warn_of_noise(cfg: KVQuantConfig, layer: int, noise: float | None) -> None:
    """Say that a layer's keys need more bits than it has, before anything is stored."""
    if noise is None or cfg.key_bits == 16 or cfg.key_method != "mse":
        return
    needed = needed_key_bits(cfg, noise)
    if needed <= cfg.key_bits:
        return
    value = 16 if needed == 16 else cfg.value_bits
    variance = noise * get_codebook("fp8", cfg.key_bits).distortion
    warnings.warn(
        f"tightkv {cfg.name}: keys of layer {layer} need more bits: codes put noise of variance "
        f"{variance:,.0f} into its attention scores (limit {NOISE_LIMIT:g}); make a new cache with "
        f'layer_bits="{layer}=k{needed}v{value}", or TightCache(..., model=model) so that the '
        "weights decide; protect_keys=False accepts it",
        KeyBitsWarning,
        stacklevel=2,
    )
