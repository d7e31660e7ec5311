"""What is measured in every vLLM engine, and the arguments that engines differ in."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tightkv.config import PRESETS
from tightkv.files.strict_json import parse_json
from tightkv.tools.bench.loads import Load

OWN = "auto"  # vLLM's cache in the model's dtype: what the ratios are to
VLLM_CACHES = (
    OWN, "fp8", "nvfp4", "int4_per_token_head", "int8_per_token_head",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
)  # fmt: skip
CACHES = (*VLLM_CACHES, *PRESETS)
# Ragged loads stand beside equal ones that hold as many tokens.
SIZES = {
    device: tuple(map(Load.parse, sizes.split()))
    for device, sizes in {
        "cuda": "32x8k 32x6k-10k 128x2k 128x1k-3k 256x1k 256x512-1536 8x32k 1x32k",
        "cpu": "1x512 1x2k 8x512 8x256-768",
    }.items()
}
# Models whose config.json is enough for random weights.
SHAPES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted(Path(__file__).with_name("models").glob("*.json"))
}
_MOST_MIXED = 256  # requests of a mixed load that run at a time, as vLLM's servers allow
_ROUND = 512  # a multiple of every block, so that no cache loses tokens to a half-used one


def options_of(kv: str) -> dict[str, Any] | None:
    """The plugin's options, of a preset's name or as JSON; None for a cache of vLLM's own."""
    if kv in VLLM_CACHES:
        return None
    if kv in PRESETS:
        return {"preset": kv}
    try:
        options = parse_json(kv)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        supported = f"supported: {', '.join(CACHES)}, or options of tightkv as a JSON object"
        raise ValueError(f"KV cache {kv!r}; {supported}")
    return options


def write_shape(name: str, folder: Path) -> Path:
    """A model folder with nothing but a config.json."""
    if name not in SHAPES:
        raise ValueError(f"shape {name!r}; supported: {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=1), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class MixedLoad:
    """Requests that all arrive at once, of lengths between (and with) two bounds each."""

    requests: int
    prompt: tuple[int, int]
    answer: tuple[int, int]

    def __post_init__(self) -> None:
        if self.requests < 1:
            raise ValueError(f"mixed requests: {self.requests}; there must be at least 1")
        for name in ("prompt", "answer"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ValueError(f"mixed {name} lengths {low}-{high}; give 1 <= LOW <= HIGH")


@dataclass(frozen=True)
class EnginePlan:
    """What is measured in every engine; what the engines share."""

    model: str | None = None
    shape: str | None = None  # a name of `SHAPES`, in place of a model: random weights
    sizes: Sequence[Load] = ()  # of each measurement of decoding
    prefill: Sequence[int] = ()
    new_lengths: bool = False
    """Measure the first prompt of a length as well, near each of `prefill`."""
    mixed: MixedLoad | None = None
    decode_tokens: int = 64
    repeats: int = 3
    device: str = "cpu"
    dtype: str | None = None
    kv_memory: int | None = None
    """Bytes for the KV cache; None leaves it to vLLM's own measurement of the memory."""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 3600.0

    def __post_init__(self) -> None:
        if (self.model is None) == (self.shape is None):
            raise ValueError("give either a model or --shape")
        numbers = {"decode tokens": self.decode_tokens, "repeats": self.repeats}
        numbers |= {f"prefill of {tokens}": tokens for tokens in self.prefill}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name}: {number}; it must be at least 1")
        if not (self.sizes or self.prefill or self.mixed):
            raise ValueError(
                "nothing to measure: give a size (batch x context), a prefill or a mixed load"
            )

    @property
    def name(self) -> str:
        """Of the model or the shape."""
        return str(self.shape or self.model)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def engine_arguments(plan: EnginePlan, kv: str, model: str) -> dict[str, Any]:
    """Arguments of vllm.LLM; the same for every cache but for the cache."""
    batches = [load.batch for load in plan.sizes] or [1]
    lengths = [load.longest + plan.decode_tokens + 1 for load in plan.sizes]
    lengths += [tokens + 1 for tokens in plan.prefill]
    if plan.mixed is not None:
        most = min(_MOST_MIXED, plan.mixed.requests)
        batches += [most, *range(8, most, 8)]
        lengths.append(plan.mixed.prompt[1] + plan.mixed.answer[1])
    options = options_of(kv)
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": plan.dtype or ("bfloat16" if plan.on_gpu else "float32"),
        "kv_cache_dtype": kv if options is None else OWN,
        "max_model_len": -(-max(lengths) // _ROUND) * _ROUND,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": True,
    }
    if plan.on_gpu:
        arguments["gpu_memory_utilization"] = 0.85
        arguments["max_num_batched_tokens"] = 16384
        arguments["compilation_config"] = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": sorted({1, *batches}),
        }
    else:
        arguments["enforce_eager"] = True
    if plan.kv_memory is not None:
        arguments["kv_cache_memory_bytes"] = plan.kv_memory
    given = dict(plan.engine_args)
    # False: TIGHTKV_* variables must not compress what is compared with
    cache = {"tightkv": False if options is None else options}
    additional = {**given.pop("additional_config", {}), **cache}
    return {**arguments, **given, "additional_config": additional}


def what_is_measured(row: Mapping[str, Any]) -> str:
    """The same text for every cache."""
    size = Load.of_row(row) if "batch" in row else row.get("tokens")
    return {
        "capacity": "capacity, tokens",
        "prefill": f"prefill of {size}, tokens/s",
        "new_lengths": f"first prefill of a length near {size}, tokens/s",
        "tpot": f"TPOT {size}, ms",
        "mixed": f"{row.get('load', {}).get('requests')} mixed requests, tokens/s",
    }[row["measure"]]
