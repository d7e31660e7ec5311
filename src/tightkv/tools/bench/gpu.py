"""decode on a GPU: our kernels against other caches, in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.step.step_sealing import SealQueue
from tightkv.kernels.backend import Backend, is_late_sealing
from tightkv.kernels.registry import select
from tightkv.kernels.view import AppendOptions, AttendOptions, SealedLayer
from tightkv.math.feedback import QueryMetric
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench.inputs import Layer, Shape, layers_for, random_bf16, ring_bounds
from tightkv.tools.bench.rivals import RIVALS, Rival, measure_rivals, ratios
from tightkv.tools.bench.timing import graph_ms, graph_times, spread
from tightkv.tools.rows import provenance

# Odd lengths: the newest page is neither empty nor full, as most of the time.
# Where they differ they are in any phase of a page, beside equal ones of as many tokens.
DECODE_SHAPES = (
    Shape(8, 32731),
    Shape(32, 8155),
    Shape(32, 10240, shortest=6144),
    Shape(128, 2043),
    Shape(128, 3072, shortest=1024),
    Shape(256, 1019),
    Shape(256, 1536, shortest=512),
    Shape(1, 131035),
    Shape(1, 32731),
)
CONSECUTIVE = 64  # steps, or as many as a page has tokens


def decode_rows(
    shapes: Sequence[Shape],
    presets: Sequence[str],
    kernels: Sequence[str],
    device: torch.device,
    rivals: Mapping[str, Rival] = RIVALS,
) -> Iterator[dict[str, Any]]:
    """A row for each shape and preset: a whole decode step of one layer, and its parts."""
    facts = provenance(device)
    for shape in shapes:
        others = measure_rivals(shape, device, rivals)
        for preset in presets:
            cfg = KVQuantConfig.preset(preset)
            layout = PageLayout(cfg, shape.kv_heads, shape.head_dim, torch.bfloat16)
            for name in kernels:
                module = select(name, device, layout)
                layers = layers_for(layout, shape, module, device)
                times = _decode_times(module, layers, shape)
                steps = spread(_consecutive_times(module, layers, shape))
                consecutive = ratios(others["others_ms"], steps["p50"])
                yield {
                    "bench": "decode",
                    "shape": asdict(shape),
                    "preset": preset,
                    "kernels": module.NAME,
                    "ms": times,
                    **others,
                    **ratios(others["others_ms"], times["step"]),
                    "consecutive_ms": steps,
                    **{f"consecutive_{name}": ratio for name, ratio in consecutive.items()},
                    **facts,
                }
                del layers
                torch.cuda.empty_cache()


class _Steps:
    """Appends and attentions of one new token per sequence, the same in every layer."""

    def __init__(self, module: Backend, shape: Shape, device: torch.device) -> None:
        self.module = module
        self.query = random_bf16(device, shape.batch, shape.query_heads, shape.head_dim)
        self.key, self.value = (
            random_bf16(device, shape.batch, shape.kv_heads, shape.head_dim) for _ in range(2)
        )

    def append(self, layer: Layer, in_vllm: bool = False) -> None:
        """In vLLM a token is coded at once."""
        options = AppendOptions(layer.cu_seqlens, layer.ring_valid_from, 1, in_vllm)
        self.module.append(layer.codec, layer.view, self.key, self.value, options)

    def attend(self, layer: Layer) -> None:
        options = AttendOptions(max_queries=1)
        self.module.attend(layer.codec, self.query, layer.view, layer.cu_seqlens, options)

    def step(self, layer: Layer, in_vllm: bool = False) -> None:
        self.append(layer, in_vllm)
        # in vLLM the host does not know that all lengths are the same
        unknown = {"same_length": None} if in_vllm else {}
        self.attend(_with_view(layer, overlaps_append=True, **unknown))  # as vLLM launches it


def _fed_back(layers: Sequence[Layer]) -> list[Layer]:
    """Whose keys are sealed with error feedback, if they can be."""
    codec, device = layers[0].codec, layers[0].view.pages.device
    if not codec.cfg.takes_feedback:
        return list(layers)
    metric = torch.eye(codec.layout.head_dim, dtype=torch.float32, device="cpu")
    metric = metric.expand(codec.layout.num_kv_heads, -1, -1)
    factors = codec.feedback_factors(QueryMetric(metric), device)
    return [_with_view(layer, feedback=factors) for layer in layers]


def _decode_times(module: Backend, layers: Sequence[Layer], shape: Shape) -> dict[str, float]:
    """Milliseconds of append and attend together and of each alone, and as in vLLM.

    In vLLM a token is coded at once, and keys are sealed with error feedback where they can be.
    """
    of = _Steps(module, shape, layers[0].view.pages.device)
    in_vllm = partial(of.step, in_vllm=True)

    calls: dict[str, tuple[Callable[..., None], Sequence[Layer]]] = {
        "step": (of.step, layers),
        "append": (of.append, layers),
        "attend": (of.attend, layers),
        "vllm_step": (in_vllm, layers),
    }
    if layers[0].codec.cfg.takes_feedback:
        calls["vllm_step_with_feedback"] = (in_vllm, _fed_back(layers))
    return {name: graph_ms(_calls(call, on)) for name, (call, on) in calls.items()}


def _consecutive_times(module: Backend, layers: Sequence[Layer], shape: Shape) -> list[float]:
    """Milliseconds of a layer's step, as in vLLM, in each of many steps one after another.

    All sequences grow by a token per step, from half as many steps below their lengths on. Pages
    are sealed where they end: those of all layers by one launch per step, if kernels can do that.
    """
    layout = layers[0].codec.layout
    count = max(CONSECUTIVE, layout.page_size)
    lengths = (layers[0].view.lengths - count // 2).clamp_(min=1)
    bounds = ring_bounds(layout, lengths)
    growing = [
        replace(
            _with_view(layer, lengths=lengths, ring_read_from=bounds[0], same_length=None),
            ring_valid_from=bounds[1],
        )
        for layer in _fed_back(layers)
    ]
    late = _late_seals(module, growing, count)
    if late is not None:
        growing = [_with_view(layer, seals_later=True) for layer in growing]
    calls = _calls(partial(_Steps(module, shape, lengths.device).step, in_vllm=True), growing)
    if late is not None:
        calls[0] = partial(_in_turn, late.launch, calls[0])
    numbers = iter(range(count))

    def grow() -> None:
        lengths.add_(1)
        for bound, value in zip(bounds, ring_bounds(layout, lengths), strict=True):
            bound.copy_(value)
        if late is not None:
            late.chosen.copy_(late.values[next(numbers)])

    return graph_times(calls, count, grow)


def _in_turn(*calls: Callable[[], None]) -> None:
    for call in calls:
        call()


class _LateSeals(NamedTuple):
    """A launch that seals pages of all layers, what chooses them, and that before each step."""

    launch: Callable[[], None]
    chosen: Tensor
    values: Tensor


def _late_seals(module: Backend, layers: Sequence[Layer], count: int) -> _LateSeals | None:
    """Before each of `count` steps those pages are sealed that the steps before have completed.

    As many at once as in vLLM. None where the append of a token seals.
    """
    view, codec = layers[0].view, layers[0].codec
    cfg, device = codec.cfg, view.lengths.device
    if not cfg.exact_pages or not is_late_sealing(module):
        return None
    if not module.seals_later(codec.layout, view.feedback is not None):
        return None
    budget = SealQueue(cfg, 1, 0, "cpu").budget(view.batch)
    lengths, table = view.lengths.tolist(), view.block_table.tolist()
    values = torch.zeros(count, view.batch + 1, 4, dtype=torch.int32, device="cpu")
    waiting: list[tuple[int, int, int, int]] = []
    for step, value in enumerate(values):
        ready, waiting = waiting[:budget], waiting[budget:]
        value[0, 0] = len(ready)
        value[1 : 1 + len(ready)] = torch.tensor(ready, device="cpu").view(-1, 4)
        for row, length in enumerate(n + step + 1 for n in lengths):
            if length % cfg.page_size == 0:  # all of its tokens are in the ring
                at = length - cfg.page_size
                waiting.append((row, at, table[row][at // cfg.page_size], at))
    views = [layer.view for layer in layers]
    sealed = [
        SealedLayer(x.pages, x.ring_key, x.ring_value, view.feedback, x.ring_scales) for x in views
    ]
    chosen = torch.zeros_like(values[0], device=device)
    launch = partial(module.seal_layers, codec, module.sealed_layers(sealed), chosen)
    return _LateSeals(launch, chosen, values.to(device))


def _calls(call: Callable[..., None], layers: Sequence[Layer]) -> list[Callable[[], None]]:
    """Of layers as of one model: what kernels found out about lengths is kept for all of them."""
    plans: dict[object, Tensor] = {}
    return [partial(call, _with_view(layer, plans=plans)) for layer in layers]


def _with_view(layer: Layer, **changes: Any) -> Layer:
    return replace(layer, view=replace(layer.view, **changes))
