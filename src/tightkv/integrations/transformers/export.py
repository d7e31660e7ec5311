"""ExportableModel: a decoder with its compressed caches inside, for torch.export."""

import copy
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from tightkv.config import KVQuantConfig
from tightkv.export import StaticKV
from tightkv.integrations.transformers.cache import TightCache
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.integrations.transformers.recorder import AttentionCall, recording
from tightkv.pages.codec import Codec
from tightkv.pages.layout import exact_dtype, page_layout

NAME = "tightkv_static"


class ExportError(ValueError):
    """A model that cannot be exported, and why."""


@dataclass
class Step:
    """The caches and places of one forward pass, which a model hands to attention by keyword."""

    caches: nn.ModuleList
    position: Tensor  # int64 [T]
    left_pad: Tensor | None  # int64 [B]


def static_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [B, Hq, T, D] -> output [B, T, Hq, D]."""
    _check_call(module, attention_mask, options)
    layer: Any = module.layer_idx
    step: Step = options["static_step"]
    new, more = (query, key, value, step.position), {"scale": scaling, "softcap": softcap}
    return step.caches[layer](*new, left_pad=step.left_pad, **more), None


def _check_call(module: nn.Module, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    name = type(module).__name__
    if "static_step" not in options:
        raise ExportError(f"{name} does not hand keywords to its attention; it cannot be exported")
    if any(x is not None for x in (mask, options.get("s_aux"), options.get("position_bias"))):
        raise ExportError(f"{name} has a learned sink, a bias or a mask of its own: not supported")


AttentionInterface.register(NAME, static_attention)  # with no mask: the caches know the padding


class ExportableModel(nn.Module):
    """forward(input_ids [B, T], cache_position [T]) -> logits; tokens are remembered inside.

    Sequences have at most `max_tokens` tokens. Layers are compressed as a TightCache of the same
    `quant` and model does it; sliding windows stay exact, in rings. With `batch` above 1
    forward takes left_pad [B] too. `last_only` gives the logits of the last token alone. The model
    itself is not changed; its weights are shared.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quant: KVQuantConfig | str | Mapping[str, Any] | None = None,
        *,
        max_tokens: int,
        batch: int = 1,
        last_only: bool = True,
    ) -> None:
        super().__init__()
        if model.device.type not in ("cpu", "cuda"):
            raise ExportError(f"the model is on {model.device}; supported: the CPU and NVIDIA GPUs")
        text = model.config.get_text_config(decoder=True)
        if getattr(text, "num_kv_shared_layers", 0):
            raise ExportError("layers that share keys and values cannot be exported")
        if getattr(text, "attention_chunk_size", None):
            raise ExportError("chunked attention cannot be exported")
        self.max_tokens, self.batch, self.last_only = max_tokens, batch, last_only
        cache = TightCache(quant, model)
        calls = _calls(model, len(cache.layers))
        self.caches = nn.ModuleList(
            _static_cache(layer, calls[i], model, max_tokens, batch)
            for i, layer in enumerate(cache.layers)
        )
        self.model = _with_static_attention(model)

    def forward(
        self, input_ids: Tensor, cache_position: Tensor, left_pad: Tensor | None = None
    ) -> Tensor:
        position_ids = cache_position[None]
        if left_pad is not None:
            position_ids = (position_ids - left_pad[:, None]).clamp_min(0)
        out = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=False,
            logits_to_keep=1 if self.last_only else 0,
            static_step=Step(self.caches, cache_position, left_pad),
        )
        logits: Tensor = out.logits
        return logits

    def cache_bytes(self) -> int:
        """Bytes of every cache, all allocated from the start."""
        return sum(x.numel() * x.element_size() for x in self.caches.buffers())

    def kernel_file(self) -> bytes:
        """What the operator needs beside the model on a GPU (`tightkv_load_kernels`)."""
        from tightkv.export.cuda_programs import kernel_file_of

        caches = [cache for cache in self.caches if isinstance(cache, StaticKV)]
        return kernel_file_of(cache.kernels for cache in caches)

    def program(self) -> torch.export.ExportedProgram:
        """The graph of `forward`, of any number of tokens up to `max_tokens`."""
        if self.max_tokens < 2:
            raise ExportError(f"max_tokens={self.max_tokens}; a graph needs room for 2 or more")
        tokens = torch.export.Dim("tokens", min=1, max=self.max_tokens)
        example, device = min(8, self.max_tokens), self.model.device
        inputs: tuple[Tensor, ...] = (
            torch.zeros(self.batch, example, dtype=torch.int64, device=device),
            torch.arange(example, device=device),
        )
        shapes: tuple[Any, ...] = ({1: tokens}, {0: tokens})
        if self.batch > 1:
            inputs += (torch.zeros(self.batch, dtype=torch.int64, device=device),)
            shapes += (None,)
        with torch.no_grad():
            return torch.export.export(self.eval(), inputs, dynamic_shapes=shapes, strict=False)


def _with_static_attention(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the model's modules with the same weights, which attends with our operator.

    `torch.compile` cannot trace `set_attn_implementation` in every version of torch.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    copied.set_attn_implementation(NAME)
    return copied


def _calls(model: PreTrainedModel, layers: int) -> dict[int, AttentionCall]:
    """What the attention of each layer is given for one token."""
    calls: dict[int, AttentionCall] = {}

    def note(call: AttentionCall) -> Tensor:
        _check_call(call.module, call.mask, call.options)
        key, value, layer = call.key.shape, call.value.shape, call.layer
        assert layer is not None
        if layer in calls or key != value:
            raise ExportError(
                f"layer {layer} has keys {list(key)} and values {list(value)}, or attends twice; "
                "only layers with one attention of like keys and values are exported"
            )
        calls[layer] = call
        return call.query.transpose(1, 2)

    with torch.no_grad(), recording(model, note):
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device),
            position_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device),
            use_cache=False,
            static_step=None,
        )
    if missing := sorted(set(range(layers)) - set(calls)):
        raise ExportError(
            f"layer {missing[0]} of {type(model).__name__} has no attention over keys and values; "
            "models with linear attention or convolutions cannot be exported"
        )
    return calls


def _static_cache(
    layer: Any, call: AttentionCall, model: PreTrainedModel, max_tokens: int, batch: int
) -> StaticKV:
    """The StaticKV that takes the place of a cache layer, whose attention is called like this."""
    _, heads, _, head_dim = call.key.shape
    device, dtype = model.device, model.dtype
    if device.type != "cpu" and dtype not in (torch.float16, torch.bfloat16):
        raise ExportError(f"the model is in {dtype}; GPUs have float16 and bfloat16: use --dtype")
    options: dict[str, Any] = {
        "batch": batch,
        "device": device,
        "query_heads": call.query.shape[1],
        "softcap": call.options.get("softcap") or None,
    }
    if type(layer) is TightLayer:
        layout = page_layout(layer.cfg, heads, head_dim, exact_dtype(dtype))
        factors = None
        if layer.metric is not None:
            factors = Codec(layout).feedback_factors(layer.metric, device)
        return StaticKV(
            layout,
            max_tokens,
            feedback=factors,
            centers=None if layer.centers is None else layer.centers.on(dtype, device),
            key_scale=None if layer.scale is None else layer.scale.on(dtype, device),
            **options,
        )
    if type(layer) is DynamicSlidingWindowLayer:
        window = min(layer.sliding_window, max_tokens)  # a longer one never slides
        return StaticKV.exact_window(window, heads, head_dim, dtype, max_tokens, **options)
    raise ExportError(
        f"layer {call.layer} keeps its cache in a {type(layer).__name__}, which cannot be exported"
    )
