"""Decode steps on the CPU: native kernels against torch's attention and the reference."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tightkv.config import KVQuantConfig
from tightkv.kernels.cpu import library
from tightkv.paged.attention import attend
from tightkv.paged.cache import PagedKV
from tightkv.paged.sequences import SequenceTable
from tightkv.pages.layout import PageLayout
from tightkv.tools.bench.inputs import Shape
from tightkv.tools.rows import cpu_name, provenance

SHAPES = (Shape(1, 8192), Shape(1, 32768), Shape(1, 4096, query_heads=9, kv_heads=3, head_dim=64))
_SLOW = 10  # contenders whose steps take as many times the fastest one's take three


class Milliseconds(NamedTuple):
    """Of one step, and of its attention alone."""

    step: float
    attention: float


def decode_rows(
    cfg: KVQuantConfig, shapes: Sequence[Shape] = SHAPES, repeats: int = 15
) -> Iterator[dict[str, Any]]:
    """A row for each shape: median milliseconds of a step of one layer, and ratios to ours."""
    facts = {**provenance(torch.device("cpu")), **machine()}
    for shape in shapes:
        times = interleaved(_contenders(cfg, shape, repeats), cfg.page_size, repeats)
        yield {
            "bench": "decode",
            "shape": asdict(shape),
            "preset": cfg.name,
            "kernels": "cpu",
            "ms": {name: round(ms.step, 4) for name, ms in times.items()},
            "attention_ms": {name: round(ms.attention, 4) for name, ms in times.items()},
            "ratios": ratios(times),
            **facts,
        }


def ratios(times: Mapping[str, Milliseconds]) -> dict[str, float]:
    """How many times faster our step is than each other's, and our attention than torch's."""
    ours = times["tightkv"]
    step, attention = map(
        min, zip(*(ms for name, ms in times.items() if "sdpa" in name), strict=True)
    )
    return {
        **{n: round(ms.step / ours.step, 3) for n, ms in times.items() if n != "tightkv"},
        "fastest sdpa": round(step / ours.step, 3),
        "fastest sdpa, attention alone": round(attention / ours.attention, 3),
        "append share": round(1 - ours.attention / ours.step, 4),
    }


def interleaved(
    contenders: Mapping[str, Contender], page_size: int, repeats: int
) -> dict[str, Milliseconds]:
    """Medians over windows of as many steps as a page has tokens, so that sealing has its share.

    Contenders take steps in turn: what else the machine does hits all, and each finds the
    processor's caches full of the others' bytes, as a layer of a model does. Slow ones take a
    step in each of the first windows only: whoever follows many milliseconds of other work finds
    not even the interpreter in the caches, and whoever follows that one does.
    """
    windows: dict[str, list[Milliseconds]] = {name: [] for name in contenders}
    first = {name: _step(contender) for name, contender in contenders.items()}
    fastest = min(ms.step for ms in first.values())
    slow = {name for name, ms in first.items() if ms.step > _SLOW * fastest}
    for number in range(repeats):
        steps: dict[str, list[Milliseconds]] = {name: [] for name in contenders}
        for turn in range(page_size):
            for name, contender in contenders.items():
                if name not in slow or (turn == 0 and number < 3):
                    steps[name].append(_step(contender))
        for name, found in steps.items():
            if found:
                windows[name].append(Milliseconds(*map(statistics.mean, zip(*found, strict=True))))
    return {
        name: Milliseconds(*map(statistics.median, zip(*found, strict=True)))
        for name, found in windows.items()
    }


def _step(contender: Contender) -> Milliseconds:
    start = perf_counter()
    contender.append()
    appended = perf_counter()
    contender.attend()
    end = perf_counter()
    return Milliseconds(1e3 * (end - start), 1e3 * (end - appended))


def _contenders(cfg: KVQuantConfig, shape: Shape, repeats: int) -> dict[str, Contender]:
    """Ours, the reference, and torch's attention in float32 and bfloat16.

    They begin with so many tokens that the last step has all of the shape's.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")

    b, d = shape.batch, shape.head_dim
    steps = repeats * cfg.page_size + 1
    if steps >= shape.tokens:
        raise ValueError(
            f"tokens={shape.tokens}; {repeats} rounds of {cfg.page_size} steps need more than "
            f"{steps}: take fewer --repeats"
        )
    before = shape.tokens - steps
    key, value = random(b, before, shape.kv_heads, d), random(b, before, shape.kv_heads, d)
    query = random(b, 1, shape.query_heads, d)
    contenders: dict[str, Contender] = {
        "tightkv": Compressed(cfg, query, key, value, "cpu"),
        "reference": Compressed(cfg, query, key, value, "reference"),
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        contenders[f"sdpa {name}"] = Plain(query, key, value, dtype, shape.tokens, False)
        contenders[f"sdpa {name} packed"] = Plain(query, key, value, dtype, shape.tokens, True)
    return contenders


class Compressed:
    """A layer of ours, with a table of its own (which the layers of a model share)."""

    def __init__(
        self, cfg: KVQuantConfig, query: Tensor, key: Tensor, value: Tensor, kernels: str
    ) -> None:
        batch, tokens, heads, d = key.shape
        table = SequenceTable(cfg, encode_partial_page=False)
        self.query, self.rows = query, table.add_rows([0] * batch)
        self.cache = PagedKV(PageLayout(cfg, heads, d, key.dtype), table, "cpu", kernels)
        self.cache.append(table.append(self.rows, [tokens] * batch), key, value)
        self.key, self.value = key[:, :1], value[:, :1]

    def append(self) -> None:
        plan = self.cache.table.append(self.rows, [1] * len(self.rows))
        self.cache.append(plan, self.key, self.value)

    def attend(self) -> Tensor:
        return attend(self.cache, self.query)[0]


class Plain:
    """torch's attention over keys and values [B, Hkv, room, D], written in place.

    Packed: the query heads of a key head are query tokens, which reads each key once; else torch
    is asked with enable_gqa.
    """

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, room: int, packed: bool
    ) -> None:
        batch, self.length, heads, d = key.shape
        self.key, self.value = (
            torch.zeros(batch, heads, room, d, dtype=dtype, device="cpu") for _ in range(2)
        )
        for cache, x in ((self.key, key), (self.value, value)):
            cache[:, :, : self.length] = x.transpose(1, 2)
        self.new = tuple(x[:, :1].transpose(1, 2).to(dtype).contiguous() for x in (key, value))
        self.query = query.transpose(1, 2).to(dtype).contiguous()  # [B, Hq, 1, D]
        if packed:
            self.query = self.query.view(batch, heads, -1, d)
        self.gqa = not packed

    def append(self) -> None:
        for cache, new in zip((self.key, self.value), self.new, strict=True):
            cache[:, :, self.length : self.length + 1] = new
        self.length += 1

    def attend(self) -> Tensor:
        key, value = self.key[:, :, : self.length], self.value[:, :, : self.length]
        return scaled_dot_product_attention(self.query, key, value, enable_gqa=self.gqa)


# A cache of one layer that grows by a token of each sequence and is attended to.
Contender: TypeAlias = Compressed | Plain


def machine() -> dict[str, Any]:
    """The processor, its threads, and the instruction set of our kernels."""
    isa = library.chosen(library.load())
    return {"cpu": cpu_name(), "threads": torch.get_num_threads(), "isa": isa}
