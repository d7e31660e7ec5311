"""TightCache beside other compressed caches for transformers: quality, bytes, decoding speed.

    python benchmarks/compare_caches.py --out benchmarks/results/comparison.jsonl

Measures every cache whose package is installed; none of them is a dependency of tightkv.
Caches that the file already has rows of are not measured again. See docs/comparison.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    DynamicLayer,
    QuantizedCache,
)

from tightkv import KVQuantConfig, TightCache
from tightkv.tools.cli.shared.config_flags import label
from tightkv.tools.cli.shared.output import format_table
from tightkv.tools.eval.forward import CacheRun, exact_attention
from tightkv.tools.eval.results import model_facts, text_facts, with_transformers
from tightkv.tools.eval.tasks.quality import Schedule, Scores, compare
from tightkv.tools.eval.text import default_texts
from tightkv.tools.eval.windows import Windows, cut_windows
from tightkv.tools.model_loading.bundled import BUNDLED_NAME, bundled_folder
from tightkv.tools.rows import append_rows

CONTEXTS = (256, 1024, 4096)
FAR = (2049, 4097)  # even prompts and one decoded token: some caches pack two tokens
WARM_STEPS, TIMED_STEPS = 3, 20

MakeAny = Callable[[Any], Any]  # model -> an empty cache


# --- the caches --------------------------------------------------------------------------------
def contenders() -> dict[str, tuple[str, MakeAny]]:
    """Name -> (the package it comes from, how to make one), of the packages installed here."""
    found: dict[str, tuple[str, MakeAny]] = {
        "dynamic": ("transformers", lambda model: DynamicCache(config=model.config))
    }
    for name, cfg in _tight_configs().items():
        found[f"tightkv {name}"] = ("tightkv", lambda m, c=cfg: TightCache(c, model=m))
    for bits in _if_installed("optimum-quanto"):
        found[f"quanto {bits}"] = ("optimum-quanto", lambda m, n=bits: _quantized("quanto", m, n))
    for bits in _if_installed("hqq"):
        # hqq's authors advise axis 1; transformers' default is 0
        found[f"hqq {bits}"] = ("hqq", lambda m, n=bits: _quantized("hqq", m, n, axis=1))
    if _if_installed("hqq"):
        found["hqq 4 axis=0"] = ("hqq", lambda m: _quantized("hqq", m, 4))
    for bits in (4, 2):
        found[f"kivi-style {bits}"] = ("tightkv", lambda m, n=bits: _kivi(m, n))
    for bits in _if_installed("turbokv"):
        found[f"turbokv {bits}"] = ("turbokv", lambda m, n=bits: _turbokv(m, n))
    for bits in _if_installed("turboquant-hf"):
        found[f"turboquant-hf {bits}"] = ("turboquant-hf", lambda m, n=bits: _turboquant_hf(m, n))
    return found


def _tight_configs() -> dict[str, KVQuantConfig]:
    """Presets, and two with fewer exact tokens: at most 128, as the other caches, and 64."""
    k4v4, k2v2, k3v3 = (KVQuantConfig.preset(name) for name in ("k4v4", "k2v2", "k3v3"))
    fewer = [
        k4v4.replace(exact_pages=128 // k4v4.page_size),
        k2v2.replace(exact_pages=128 // k2v2.page_size),
        k2v2.replace(exact_pages=64 // k2v2.page_size),
    ]
    return {label(cfg): cfg for cfg in (k4v4, k2v2, k3v3, *fewer)}


def _if_installed(package: str) -> tuple[int, ...]:
    """The bits to measure: none without the package."""
    try:
        version(package)
    except PackageNotFoundError:
        return ()
    return (4, 2)


def _quantized(backend: str, model: Any, bits: int, axis: int = 0) -> Any:
    return QuantizedCache(backend, model.config, nbits=bits, axis_key=axis, axis_value=axis)


def _turbokv(model: Any, bits: int) -> Any:
    from turboquant.cache import TurboQuantCache

    return TurboQuantCache(model.config, nbits=bits, device=str(model.device))


def _turboquant_hf(model: Any, bits: int) -> Any:
    from turboquant.kv_cache import TurboQuantKVCache

    store = TurboQuantKVCache(key_bits=bits, value_bits=bits)
    layers = range(model.config.num_hidden_layers)
    return Cache(layers=[_PassingLayer(store, index) for index in layers])


def _kivi(model: Any, bits: int) -> Any:
    return Cache(layers=[_KiviLayer(bits) for _ in range(model.config.num_hidden_layers)])


class _KiviLayer(DynamicLayer):
    """As KIVI (arXiv 2402.02750) stores a layer: keys by channel, values by token, newest exact.

    Groups have 32 elements with a least value and a step each. The newest 128 to 159 tokens are
    exact, and so is what a prompt attends to. This is no code of KIVI's authors.
    """

    GROUP, EXACT = 32, 128

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits, self.tokens = bits, 0
        self.stored: list[list[Tensor]] = [[], []]  # of keys, of values: codes, least, step
        self.recent: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        new = [keys, values]
        if self.recent:
            new = [torch.cat(both, 2) for both in zip(self.recent, new, strict=True)]
        self.recent = whole = new
        self.tokens += keys.shape[2]
        if self.stored[0]:
            whole = [torch.cat([self._decode(i), new], 2) for i, new in enumerate(self.recent)]
        leaving = (self.recent[0].shape[2] - self.EXACT) // self.GROUP * self.GROUP
        if leaving > 0:
            for side, tensor in enumerate(self.recent):
                self._encode(side, tensor[:, :, :leaving])
            self.recent = [tensor[:, :, leaving:].clone() for tensor in self.recent]
        return whole[0], whole[1]

    def _encode(self, side: int, tensor: Tensor) -> None:
        """Groups of tokens for keys, of channels for values, are the last dimension."""
        groups = tensor.unflatten(2 if side == 0 else 3, (-1, self.GROUP))
        groups = groups.transpose(3, 4) if side == 0 else groups
        least, most = groups.amin(-1, True), groups.amax(-1, True)
        step = ((most - least) / (2**self.bits - 1)).to(torch.float16)
        least = least.to(torch.float16)
        safe = step.float().clamp_min(1e-8)
        codes = ((groups.float() - least.float()) / safe).round().clamp(0, 2**self.bits - 1)
        places = codes.to(torch.uint8).unflatten(-1, (-1, 8 // self.bits))
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=tensor.device)
        packed = (places << shifts).sum(-1, dtype=torch.uint8)
        new = [packed, least, step]
        old = self.stored[side]
        self.stored[side] = [torch.cat(p, 2) for p in zip(old, new, strict=True)] if old else new

    def _decode(self, side: int) -> Tensor:
        packed, least, step = self.stored[side]
        shifts = torch.arange(0, 8, self.bits, dtype=torch.uint8, device=packed.device)
        codes = ((packed[..., None] >> shifts) & (2**self.bits - 1)).flatten(-2)
        groups = codes * step.float() + least.float()
        tensor = groups.transpose(3, 4).flatten(2, 3) if side == 0 else groups.flatten(3, 4)
        return tensor.to(self.recent[side].dtype)

    def get_seq_length(self) -> int:
        return self.tokens


class _PassingLayer(DynamicLayer):
    """Hands one layer's keys and values to a store that is no transformers cache."""

    def __init__(self, store: Any, index: int) -> None:
        super().__init__()
        self.store, self.index, self.tokens = store, index, 0

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kw: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.tokens += keys.shape[-2]
        all_keys, all_values = self.store.update(self.index, keys, values)
        return all_keys.to(keys.dtype), all_values.to(values.dtype)

    def get_seq_length(self) -> int:
        return self.tokens


def open_run(model: Any, make: MakeAny) -> CacheRun:
    """A new cache with the attention it is made for: all but TightCache are read with sdpa."""
    run = CacheRun(model, make(model))
    if not isinstance(run.cache, TightCache):
        run.attention = exact_attention(model)
    return run


# --- bytes -------------------------------------------------------------------------------------
def tensors(root: Any) -> Iterator[Tensor]:
    """Every plain tensor an object reaches; wrapper tensors are opened, modules left out."""
    seen: dict[int, Any] = {}  # holds the objects, so that no id is used twice
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (torch.nn.Module, type, str)):
            continue
        seen[id(item)] = item
        if isinstance(item, Mapping):
            todo += item.values()
        elif isinstance(item, (list, tuple, set)):
            todo += item
        elif isinstance(item, Tensor) and not hasattr(item, "__tensor_flatten__"):
            yield item
        else:
            todo += getattr(item, "__dict__", {}).values()
            slots = getattr(type(item), "__slots__", ())
            todo += [getattr(item, name) for name in slots if hasattr(item, name)]


def sizes(cache: Any) -> dict[tuple[int, int], int]:
    """Bytes of all a cache's tensors by where they lie: the same memory counts once."""
    return {(t.data_ptr(), t.numel()): t.numel() * t.element_size() for t in tensors(cache)}


def bytes_held(cache: Any, beside: Any = None) -> int:
    """Of all a cache's tensors, but for those that it shares with the cache `beside` it."""
    own = sizes(cache)
    return sum(own[place] for place in own.keys() - sizes(beside).keys())


def bytes_by_context(
    model: Any, make: MakeAny, contexts: Sequence[int]
) -> tuple[dict[str, int | str], int]:
    """Bytes after a prompt and one decoded token, at 16 bits; the error of a cache that fails.

    And the bytes that all caches of a model share. Only the shape of keys and values matters, so
    a narrow model of the same shape is fed.
    """
    narrow = _narrow(model.config)
    held: dict[str, int | str] = {}
    shared = 0
    for tokens in contexts:
        runs = [open_run(narrow, make) for _ in range(2)]
        try:
            for run in runs:
                run.feed(torch.ones(1, tokens - 1, dtype=torch.long), last_only=True)
                run.feed(torch.ones(1, 1, dtype=torch.long), last_only=True)
            held[str(tokens)] = own = bytes_held(runs[0].cache, beside=runs[1].cache)
            shared = bytes_held(runs[0].cache) - own
        except RuntimeError as error:
            held[str(tokens)] = str(error)
    return held, shared


def bytes_per_token(model: Any, make: MakeAny) -> float | None:
    """Of a further token in a long context; None if the cache fails."""
    held, _ = bytes_by_context(model, make, FAR)
    short, long = held.values()
    if isinstance(short, str) or isinstance(long, str):
        return None
    return (long - short) / (FAR[1] - FAR[0])


def _narrow(config: Any) -> Any:
    """Random weights, the same layers, KV heads and head_dim, little else."""
    config = copy.deepcopy(config)
    config.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    config.num_attention_heads = config.num_key_value_heads
    config.hidden_size, config.intermediate_size, config.vocab_size = 32, 32, 32
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    return AutoModelForCausalLM.from_config(config).to(torch.float16).eval()


# --- quality and speed -------------------------------------------------------------------------
class Reference:
    """The uncompressed cache, and the log-probabilities [1, T, V] it gives on each window."""

    def __init__(self, model: Any, windows: Windows, schedule: Schedule) -> None:
        schedule.check_window(windows.ids.shape[1])
        self.model, self.windows, self.schedule = model, windows, schedule
        self.log_p: list[Tensor] = []
        for row in range(len(windows)):
            self.run = CacheRun(model)
            self.log_p.append(self._feed(self.run, row).float().log_softmax(-1))

    def _feed(self, run: CacheRun, row: int) -> Tensor:
        """A window through a cache; the logits [1, T, V] of all after the prefill."""
        ids, prefill, chunk = self.windows.ids[[row]], self.schedule.prefill, self.schedule.chunk
        run.feed(ids[:, :prefill], last_only=True)
        last = ids.shape[1] - 1  # only a target
        starts = range(prefill, last, chunk)
        return torch.cat([run.feed(ids[:, i : min(last, i + chunk)]) for i in starts], 1)

    def measure(self, make: MakeAny, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
        """Quality over all windows, decoding speed at the end of the last one, bytes."""
        scores = []
        for row, log_p in enumerate(self.log_p):
            run = open_run(self.model, make)
            targets = self.windows.ids[[row], self.schedule.prefill + 1 :]
            scores.append(compare(log_p, self._feed(run, row), targets))
        held, shared = bytes_by_context(self.model, make, contexts)
        names = ("nll", "reference_nll", "kl", "same_top")
        whole = Scores(**{name: torch.cat([getattr(s, name) for s in scores]) for name in names})
        return {
            **asdict(whole.summary()),
            "kl_by_window": [own.summary().kl for own in scores],
            "decode": self._speed(run),
            "bytes": held,
            "bytes_of_all_caches": shared,
            "bytes_per_token": bytes_per_token(self.model, make),
        }

    def _speed(self, run: CacheRun) -> dict[str, Any]:
        """Seconds of single-token steps, taken in turn with the uncompressed cache."""
        taken: dict[CacheRun, list[float]] = {run: [], self.run: []}
        context = run.cache.get_seq_length()
        for step in range(WARM_STEPS + TIMED_STEPS):
            for each, seconds in taken.items():
                start = time.perf_counter()
                each.feed(self.windows.ids[-1:, [step]], last_only=True)
                seconds.append(time.perf_counter() - start)
        self.run.cache.crop(-(WARM_STEPS + TIMED_STEPS))
        own, plain = (seconds[WARM_STEPS:] for seconds in taken.values())
        return {
            "context": context,
            "tokens_s": 1 / statistics.median(own),
            "ratio": statistics.median(plain) / statistics.median(own),
            "seconds": own,
            "seconds_uncompressed": plain,
        }


# --- rows and table ----------------------------------------------------------------------------
def settings(windows: Windows, schedule: Schedule) -> dict[str, Any]:
    count, tokens = windows.ids.shape
    return {"windows": count, "window": tokens, **asdict(schedule)}


def read_rows(path: Path, **facts: Any) -> list[dict[str, Any]]:
    """The rows of this script in a file that may have others, which have these facts."""
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    rows = [row for line in lines if "package" in (row := json.loads(line))]
    return [row for row in rows if facts.items() <= row.items()]


def measure_all(
    reference: Reference,
    caches: Mapping[str, tuple[str, MakeAny]],
    out: Path,
    facts: Mapping[str, Any],
    contexts: Sequence[int] = CONTEXTS,
) -> None:
    """Append a row to `out` for each cache that has none there of the same model and settings."""
    used = settings(reference.windows, reference.schedule)
    same = {"settings": used, "model": facts["model"]}
    done = {row["cache"] for row in read_rows(out, **same)}
    for name in [name for name in caches if name not in done]:
        package, make = caches[name]
        sys.stderr.write(f"{name} ...\n")
        row = {
            "cache": name,
            "package": package,
            "version": version(package),
            **reference.measure(make, contexts),
            "settings": used,
            **facts,
            **with_transformers(),
        }
        append_rows(out, [row])


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    plain = {row["cache"]: row for row in rows}["dynamic"]["bytes"]
    heads = [f"at {tokens}" for tokens in plain]
    lines = [
        [
            row["cache"],
            f"{row['kl']:.4f}",
            f"{row['top1']:.3f}",
            f"{100 * (row['perplexity'] / row['reference_perplexity'] - 1):+.2f}%",
            *(_share(row["bytes"][tokens], plain[tokens]) for tokens in plain),
            f"{row['decode']['ratio']:.2f}",
        ]
        for row in rows
    ]
    return format_table(["cache", "KL", "top-1", "perplexity", *heads, "decode"], lines)


def _share(held: int | str, plain: int) -> str:
    return "fails" if isinstance(held, str) else f"{held / plain:.2f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="folder of a transformers model; bundled if none")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file, appended to")
    parser.add_argument(
        "--only", default="", help="measure 'dynamic' and the caches whose name begins so"
    )
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--window", type=int, default=1040, help="tokens a window")
    parser.add_argument("--prefill", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=16)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    folder = args.model or bundled_folder(lambda line: None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = default_texts()
    windows = cut_windows(AutoTokenizer.from_pretrained(folder), texts, args.window, args.windows)
    name = BUNDLED_NAME if args.model is None else Path(args.model).name
    facts = {
        "model": model_facts(model, name),
        "texts": text_facts(texts),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "threads": torch.get_num_threads(),
    }
    reference = Reference(model, windows, Schedule(args.prefill, args.chunk, batch=1))
    chosen = {  # the table has shares of the uncompressed cache's bytes
        name: own
        for name, own in contenders().items()
        if name == "dynamic" or name.startswith(args.only)
    }
    measure_all(reference, chosen, args.out, facts)
    used = settings(windows, reference.schedule)
    sys.stdout.write(table(read_rows(args.out, settings=used, model=facts["model"])) + "\n")


if __name__ == "__main__":
    main()
