"""tightkv plan: bytes of a model's KV cache under every preset, and what fits a budget."""

import argparse
import difflib
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tightkv import __version__
from tightkv.config import PRESETS, KVQuantConfig
from tightkv.files.atomic import whole_file
from tightkv.files.tensor_file import safetensors_files
from tightkv.fit.key_check import CheckedConfig, KeyCheck, raised_layers
from tightkv.model_shape import ModelShape, is_local, planner, read_model_shape, skip_reason
from tightkv.model_shape.planner import GPUS, CachePlan, Weights
from tightkv.tools.cli.plan import hub, report
from tightkv.tools.cli.plan.page import plan_page
from tightkv.tools.cli.shared.options import Commands, add_options
from tightkv.tools.cli.shared.output import add_output_options, emit, parse_bytes
from tightkv.tools.cli.shared.progress import QUICK_SECONDS, Working

DEFAULT_CONTEXT = 32768
DEFAULT_UTILIZATION = 0.9
_MOST = 1 << 40  # tokens or requests: sizes beyond are no floats
# what the report says of a model, and of its layers of one kind
_MODEL_FIELDS = "name", "model_type", "num_layers", "num_heads", "hidden_size", "max_positions"
_LAYER_FIELDS = (
    *("kind", "num_kv_heads", "head_dim", "value_head_dim", "latent_dim", "index_bytes"),
    *("window", "state_bytes"),
)


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "plan",
        description="Bytes of a model's KV cache in bf16, fp8, nvfp4 and every preset, and what "
        "fits. All numbers are those of one GPU.",
    )
    parser.add_argument(
        "model", nargs="?", help="folder with config.json, a config.json, or a hub id"
    )
    memory = parser.add_mutually_exclusive_group()
    add_options(
        memory,
        f"""
        --budget SIZE  memory for weights and cache, as 80GiB
        --gpu NAME  one of {", ".join(GPUS)}
        """,
    )
    add_options(
        parser,
        f"""
        --utilization UTILIZATION:float  share that may be used (default: 0.9 with --gpu, else 1)
        --weights-bytes SIZE  size of the weights, all ranks
        --weights-dtype {{{",".join(planner.WEIGHT_BITS)}}}  default: what the config says
        --context CONTEXT:int  tokens per request (default: the model's limit, at most
            {DEFAULT_CONTEXT})
        --batch=1 BATCH:int  requests at once (default: 1)
        --tp=1 TP:int  tensor-parallel ranks (default: 1)
        --presets={",".join(PRESETS)} PRESETS  names with commas (default: all)
        --config FILE ...  a config as a further row
        --sliding-windows  count sliding windows as the vLLM plugin's option of that name compresses
            them
        --html FILE  write the planner as an HTML page, without a model
        """,
    )
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.html is not None:
        return _write_page(args)
    if args.model is None:
        raise ValueError("which model? Give a folder with a config.json, or --html FILE alone")
    for name in ("context", "batch", "tp"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= _MOST:
            raise ValueError(f"--{name} {value}; it must be at least 1 and at most {_MOST}")
    source = args.model if is_local(args.model) else hub.load_hub_config(args.model)
    shape = read_model_shape(source)
    context = args.context or min(shape.max_positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    memory = _memory(args)
    weights = _weights(args, shape, source, needed=memory is not None)
    with Working("reading the weights of queries and keys", delay=QUICK_SECONDS):
        plans, notes = _plans(args, shape)
    left = None
    if memory is not None and weights is not None:
        left = memory["cache_bytes"] = max(0, memory["budget_bytes"] - weights.bytes)
    data = {  # docs/plan.md
        "schema": 1,
        "tightkv": __version__,
        "model": _model_part(shape, args.tp),
        "context": context,
        "batch": args.batch,
        "tp": args.tp,
        "weights": weights and asdict(weights),
        "memory": memory,
        "rows": [_row(plan, plans[0], context, args.batch, left) for plan in plans],
        "notes": [*_notes(shape, context, memory, weights), *notes],
    }
    emit(args, data, report.as_text(data))
    return 0


def _write_page(args: argparse.Namespace) -> int:
    if args.model is not None:
        raise ValueError(f"--html writes a page for all models; leave out {args.model!r}")
    path = Path(args.html)
    with whole_file(path) as temporary:
        temporary.write_text(plan_page(DEFAULT_CONTEXT, DEFAULT_UTILIZATION), encoding="utf-8")
    emit(args, {"schema": 1, "html": str(path)}, f"wrote {path}")
    return 0


def _memory(args: argparse.Namespace) -> dict[str, Any] | None:
    """What one GPU has for weights and cache."""
    share = args.utilization
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--utilization {share}; it must be above 0 and at most 1")
    if args.gpu is not None:
        name, share = _gpu_name(args.gpu), share or DEFAULT_UTILIZATION
        size = GPUS[name] * 2**20
    elif args.budget is not None:
        name, share, size = None, share or 1.0, parse_bytes(args.budget)
    else:
        return None
    return {"budget_bytes": int(size * share), "gpu": name, "utilization": share}


def _gpu_name(text: str) -> str:
    """The entry of GPUS that `text` means: 'rtx 4090', 'NVIDIA H100', 'a100'."""

    def plain(name: str) -> str:
        return re.sub("nvidia|amd|geforce|[ _-]", "", name.lower())

    names = {plain(name): name for name in GPUS}
    names |= {"a100": "A100-80GB", "h100sxm": "H100", "h10080gb": "H100", "rtxa6000": "A6000"}
    names |= {plain(name).removeprefix("rtx"): name for name in GPUS if name.startswith("RTX")}
    if plain(text) in names:
        return names[plain(text)]
    near = difflib.get_close_matches(plain(text), names, n=1)
    hint = f"; did you mean {names[near[0]]!r}?" if near else ""
    raise ValueError(f"unknown GPU {text!r}{hint} (known: {', '.join(GPUS)}; or give --budget)")


def _weights(
    args: argparse.Namespace, shape: ModelShape, source: Any, needed: bool
) -> Weights | None:
    if args.weights_bytes is not None:
        size = parse_bytes(args.weights_bytes)
        return Weights(-(-size // args.tp), args.weights_dtype, "given")
    weights = planner.plan_weights(shape, args.weights_dtype, args.tp)
    if weights is not None or not needed:
        return weights
    parameters = hub.count_parameters(shape.folder or source)
    if parameters is None:
        raise ValueError(
            f"the weights of {shape.name} (model_type {shape.model_type!r}) have an unknown size: "
            f"no files next to the config, and no estimate for this family; set --weights-bytes"
        )
    return planner.count_weights(parameters, shape, args.weights_dtype, args.tp)


def _plans(args: argparse.Namespace, shape: ModelShape) -> tuple[list[CachePlan], list[str]]:
    """The rows, and what is to be said about them."""
    configs = {}
    for name in filter(None, args.presets.replace(",", " ").split()):
        configs[name] = KVQuantConfig.preset(name)
    for path in args.config:
        cfg = KVQuantConfig.parse(path)
        label = Path(path).stem if path.endswith(".json") else "config"
        name = f"{label} ({cfg.name})"
        alike = sum(known == name or known.startswith(f"{name} ") for known in configs)
        configs[f"{name} {alike + 1}" if alike else name] = cfg
    plans = [planner.baseline_plan(name, shape, args.tp) for name in planner.BASELINES]
    check = None
    if shape.folder is not None and safetensors_files(shape.folder):
        check = KeyCheck(shape.folder)
    raised: dict[str, list[str]] = {}
    for name, cfg in configs.items():
        checked = CheckedConfig(cfg) if check is None else check.protect(cfg)
        if checked.raised:
            name += "+"
            raised.setdefault(raised_layers(cfg, checked.config), []).append(name)
        plan = planner.config_plan(name, shape, checked.config, args.tp, args.sliding_windows)
        plans.append(plan)
    notes = planner.latent_notes(plans, shape)
    if args.sliding_windows:
        notes += _window_notes(plans, shape)
    notes += [
        f"{', '.join(names)}: {layers}, whose weights would make scores too noisy otherwise; "
        "protect_keys=false turns this off"
        for layers, names in raised.items()
    ]
    if check is not None and check.reason is not None:
        notes.append(f"not checked whether keys of some layers need more bits: {check.reason}")
    return plans, notes


def _model_part(shape: ModelShape, ranks: int) -> dict[str, Any]:
    groups = []
    for count, layer in shape.groups():
        own = layer.shard(ranks)
        fields = {name: getattr(own, name) for name in _LAYER_FIELDS}
        reason = planner.kept_reason(own)
        groups.append(
            {**fields, "count": count, "compressed": reason is None, "skip_reason": reason}
        )
    fields = {name: getattr(shape, name) for name in _MODEL_FIELDS}
    return {**fields, "dtype": str(shape.dtype).removeprefix("torch."), "layers": groups}


def _row(
    plan: CachePlan, bf16: CachePlan, context: int, batch: int, left: int | None
) -> dict[str, Any]:
    total, per_token = plan.total_bytes(context, batch), plan.bytes_per_token
    return {
        "name": plan.name,
        "key_bits": plan.config and plan.config.key_bits,
        "value_bits": plan.config and plan.config.value_bits,
        "bytes_per_token_per_layer": plan.bytes_per_token_per_layer,
        "bytes_per_token": per_token,
        "ratio": bf16.bytes_per_token / per_token if per_token else None,
        "total_bytes": total,
        "total_ratio": bf16.total_bytes(context, batch) / total if total else None,
        "max_tokens": None if left is None else plan.max_tokens(left),
        "max_requests": None if left is None else plan.max_requests(left, context),
    }


def _notes(
    shape: ModelShape, context: int, memory: dict[str, Any] | None, weights: Weights | None
) -> list[str]:
    notes = list(shape.notes)
    if shape.dtype == torch.float32:
        notes.append("the config says float32; the cache is planned as if the model ran in bf16")
    if shape.max_positions is not None and context > shape.max_positions:
        notes.append(f"context {context} is beyond the model's limit of {shape.max_positions}")
    if all(planner.kept_reason(layer) is not None for layer in shape.layers):
        notes.append("no layer of this model can be compressed: every preset is the same as bf16")
    # those that TightCache compresses and the vLLM plugin does not
    kept = [skip_reason(layer, "vllm") for layer in shape.layers if skip_reason(layer) is None]
    notes += [
        f"vLLM leaves {count} layer{'s' * (count > 1)} more uncompressed ({reason})"
        for reason, count in Counter(kept).items()
        if reason is not None
    ]
    if weights is not None and weights.source == "estimated" and shape.composite:
        notes.append("the estimate of the weights covers the language model only")
    if memory is not None and weights is not None and weights.bytes >= memory["budget_bytes"]:
        notes.append("the weights alone exceed the budget: nothing fits")
    return notes


def _window_notes(plans: list[CachePlan], shape: ModelShape) -> list[str]:
    """In which rows sliding windows are compressed."""
    count = sum(layer.kind == "sliding" for layer in shape.layers)
    if not count:
        return ["--sliding-windows: this model has none"]
    found: dict[int, list[str]] = {}
    for plan in plans[len(planner.BASELINES) :]:
        windows = [layer for layer in plan.layers if layer.shape.kind == "sliding"]
        found.setdefault(sum(x.layout is not None for x in windows), []).append(plan.name)
    return [
        f"{', '.join(names)}: {many or 'none'} of {count} sliding windows compressed (vLLM with "
        "sliding_windows)"
        for many, names in found.items()
    ]
