"""Decode attention on the CPU: native kernels against torch's attention and the reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tightkv.attention import attend
from tightkv.bench.problems import Shape
from tightkv.bench.rows import provenance
from tightkv.cache import PagedKV
from tightkv.config import KVQuantConfig
from tightkv.kernels.cpu import library
from tightkv.layout import PageLayout
from tightkv.sequences import SequenceTable

SHAPES = (
    Shape(1, 8192),
    Shape(1, 32768),
    Shape(1, 4096, query_heads=9, kv_heads=3, head_dim=64),
)
_SLOW_SECONDS = 0.5  # a call longer than this is measured with fewer repeats

Call = Callable[[], object]


def decode_rows(
    cfg: KVQuantConfig, shapes: Sequence[Shape] = SHAPES, repeats: int = 15
) -> Iterator[dict[str, Any]]:
    """A row for each shape: median milliseconds of one layer, and ratios to ours.

    Every contender runs in turn in each round, so that what else the machine does hits all.
    """
    facts = {**provenance(torch.device("cpu")), **_machine()}
    for shape in shapes:
        times = interleaved_ms(_contenders(cfg, shape), repeats)
        yield {
            "bench": "decode",
            "shape": asdict(shape),
            "preset": cfg.name,
            "kernels": "cpu",
            "ms": {name: round(ms, 4) for name, ms in times.items()},
            "ratios": ratios(times),
            **facts,
        }


def ratios(times: Mapping[str, float]) -> dict[str, float]:
    """How many times faster attention is than each other; append as a share of attention."""
    ours = times["tightkv"]
    others = {n: ms for n, ms in times.items() if n not in ("tightkv", "append")}
    sdpa = [ms for name, ms in others.items() if name.startswith("sdpa")]
    return {
        **{name: round(ms / ours, 3) for name, ms in others.items()},
        "fastest sdpa": round(min(sdpa) / ours, 3),
        "append share": round(times["append"] / ours, 4),
    }


def interleaved_ms(calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call, all called in turn; slow ones three times only."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    slow = {name for name, call in calls.items() if _seconds(call) > _SLOW_SECONDS}
    for turn in range(repeats):
        for name, call in calls.items():
            if turn < 3 or name not in slow:
                times[name].append(1e3 * _seconds(call))
    return {name: statistics.median(found) for name, found in times.items()}


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _contenders(cfg: KVQuantConfig, shape: Shape) -> dict[str, Call]:
    """Ours, the reference, and torch's attention in float32 and bfloat16.

    torch is asked in two ways: with enable_gqa, and with the query heads of a key head as query
    tokens, which reads each key once.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    b, n, d = shape.batch, shape.tokens, shape.head_dim
    key, value = random(b, n, shape.kv_heads, d), random(b, n, shape.kv_heads, d)
    query = random(b, 1, shape.query_heads, d)
    caches = {name: _filled(cfg, key, value, name) for name in ("cpu", "reference")}
    grown = caches["cpu"]

    def append() -> None:
        plan = grown.table.append(range(b), [1] * b)
        grown.append(plan, key[:, :1], value[:, :1])

    calls: dict[str, Call] = {
        "tightkv": lambda: attend(caches["cpu"], query),
        "append": append,
        "reference": lambda: attend(caches["reference"], query),
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        q, k, v = (x.transpose(1, 2).to(dtype).contiguous() for x in (query, key, value))
        packed = q.view(b, shape.kv_heads, -1, d)
        calls[f"sdpa {name}"] = _sdpa(q, k, v, enable_gqa=True)
        calls[f"sdpa {name} packed"] = _sdpa(packed, k, v, enable_gqa=False)
    return calls


def _sdpa(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> Call:
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=enable_gqa)


def _filled(cfg: KVQuantConfig, key: Tensor, value: Tensor, kernels: str) -> PagedKV:
    table = SequenceTable(cfg, open_codes=False)
    table.add_rows([0] * len(key))
    layout = PageLayout(cfg, key.shape[2], key.shape[3], key.dtype)
    cache = PagedKV(layout, table, "cpu", kernels)
    cache.append(table.append(range(len(key)), [key.shape[1]] * len(key)), key, value)
    return cache


def _machine() -> dict[str, Any]:
    lib = library.load()
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "isa": library.chosen(lib),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {name.strip(): text.strip() for name, text in fields.items()}
    arm = f"ARM implementer {fields.get('CPU implementer')} part {fields.get('CPU part')}"
    return fields.get("model name") or arm
