"""Faults in files of TightCache.save: each is refused with its name, or is the cache it was.

`benchmarks/faults.py` runs these and writes their rows.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hostile_files import to_bytes
from models import prompt, tiny
from tightkv import TightCache
from tightkv.files.tensor_file import read_file

QUANT = {"key_bits": 4, "value_bits": 4, "page_size": 32, "exact_pages": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2},
    "gemma3": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "falcon_h1": {"num_hidden_layers": 2},
}
KILLED = 0.2  # share of killed writers among all faults


@dataclass(frozen=True)
class Part:
    """A tensor of a file: its name and where its bytes are."""

    name: str
    begin: int
    end: int


@dataclass
class Saved:
    """Files of two conversations, of another model, and of this one's twin with other weights."""

    choose: random.Random
    data: bytes
    other_text: bytes
    other_weights: bytes
    other_shape: bytes

    def parts(self) -> list[Part]:
        size = int.from_bytes(self.data[:8], "little")
        header = json.loads(self.data[8 : 8 + size])
        header.pop("__metadata__")
        begin = 8 + size
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        return [Part(name, begin + a, begin + b) for name, (a, b) in places.items() if b > a]


def cut(s: Saved) -> bytes:
    return s.data[: s.choose.randrange(len(s.data))]


def extend(s: Saved) -> bytes:
    return s.data + s.choose.randbytes(s.choose.choice((1, 32, 4096)))


def flip(s: Saved) -> bytes:
    return flipped(s.choose, s.data)


def flipped(choose: random.Random, data: bytes, least: int = 1) -> bytes:
    changed = bytearray(data)
    for at in choose.sample(range(len(changed)), min(choose.choice((least, 8, 64)), len(changed))):
        changed[at] ^= 1 << choose.randrange(8)
    return bytes(changed)


def zero(s: Saved) -> bytes:
    data = bytearray(s.data)
    begin = s.choose.randrange(0, len(data), 512)
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    return bytes(data)


def exchange_tensors(s: Saved) -> bytes:
    """Two of the same size, of two layers or of one."""
    one, two = _alike(s)
    data = bytearray(s.data)
    data[one.begin : one.end] = s.data[two.begin : two.end]
    data[two.begin : two.end] = s.data[one.begin : one.end]
    return bytes(data)


def other_layer(s: Saved) -> bytes:
    one, two = _alike(s)
    data = bytearray(s.data)
    data[one.begin : one.end] = s.data[two.begin : two.end]
    return bytes(data)


def _alike(s: Saved) -> tuple[Part, Part]:
    parts = s.parts()
    pairs = [
        (a, b)
        for a in parts
        for b in parts
        if a.name < b.name
        and a.end - a.begin == b.end - b.begin
        and s.data[a.begin : a.end] != s.data[b.begin : b.end]
    ]
    return s.choose.choice(pairs)


def splice(s: Saved) -> bytes:
    """The beginning of this file and the end of another, as after two writers at a time."""
    other = s.choose.choice((s.other_text, s.other_weights))
    at = s.choose.randrange(1, min(len(other), len(s.data)))
    return s.data[:at] + other[at:]


FAULTS: dict[str, Callable[[Saved], bytes | None]] = {
    "cut": cut,
    "extend": extend,
    "flip": flip,
    "zero": zero,
    "exchange_tensors": exchange_tensors,
    "other_layer": other_layer,
    "splice": splice,
    "foreign_weights": lambda s: s.other_weights,
    "foreign_shape": lambda s: s.other_shape,
    "delete": lambda s: None,
}


def saved_bytes(model: Any, tokens: int, path: Path, seed: int = 1) -> bytes:
    cache = cache_of(model, tokens, seed)
    cache.save(path)
    return path.read_bytes()


@torch.no_grad()
def cache_of(model: Any, tokens: int, seed: int = 1) -> Any:
    cache = TightCache(QUANT, model=model)
    model(prompt(1, tokens, seed), past_key_values=cache)
    return cache


def state_of(path: Path) -> tuple[str, dict[str, Any]]:
    metadata, tensors = read_file(path)
    return metadata["tightkv"], tensors


def same_state(path: Path, known: tuple[str, dict[str, Any]], model: Any) -> bool:
    """Whether the cache of a file, once loaded, is this one to the bit."""
    again = path.with_name("again")
    TightCache.load(path, model=model).save(again)
    text, tensors = state_of(again)
    equal = (to_bytes(x) == to_bytes(known[1][name]) for name, x in tensors.items())
    return text == known[0] and tensors.keys() == known[1].keys() and all(equal)


def outcome(path: Path, known: list[tuple[str, dict[str, Any]]], model: Any) -> str:
    try:
        return "right" if any(same_state(path, one, model) for one in known) else "wrong"
    except (ValueError, FileNotFoundError) as error:
        return "refused" if str(path) in str(error) else "wrong"


def run_saved(job: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By kind of fault: how many, and what came of them."""
    folder = Path(job["folder"]) / job["case"]
    folder.mkdir()
    changes = MODELS[job["case"]]
    model, path = tiny(job["case"], **changes), folder / "saved"
    twin = tiny(job["case"], seed=1, **changes)
    stranger = tiny("qwen2", num_hidden_layers=2)
    choose = random.Random(f"saved {job['seed']}")
    other_text = saved_bytes(model, 150, path, seed=2)
    known_other = state_of(path)
    saved = Saved(
        choose,
        other_text=other_text,
        other_weights=saved_bytes(twin, 150, path),
        other_shape=saved_bytes(stranger, 150, path),
        data=saved_bytes(model, 150, path),
    )
    known = state_of(path)
    if not same_state(path, known, model):
        raise AssertionError("a whole file is not the cache that was saved")
    tallies: dict[str, Counter[str]] = {}
    for kind, data in faults(saved, job["faults"]):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        tallies.setdefault(kind, Counter()).update(["faults", outcome(path, [known], model)])
    caches = cache_of(model, 150), cache_of(model, 150, seed=2)
    for _ in range(round(KILLED * job["faults"])):
        path.write_bytes(saved.data)
        kill_at_work(choose, save_again, caches, path)
        found = outcome(path, [known, known_other], model)
        tallies.setdefault("killed_save", Counter()).update(["faults", found])
    shutil.rmtree(folder)
    return {kind: {**tally, "answers": tally["faults"]} for kind, tally in tallies.items()}


def faults(saved: Saved, count: int) -> Iterator[tuple[str, bytes | None]]:
    for _ in range(round((1 - KILLED) * count)):
        kind = saved.choose.choice(list(FAULTS))
        yield kind, FAULTS[kind](saved)


def kill_at_work(choose: random.Random, work: Callable[..., None], *given: Any) -> None:
    """A process that works until it is killed; `work` says when it has begun."""
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    process = context.Process(target=work, args=(begun, *given))
    process.start()
    if not begun.wait(60):
        raise AssertionError("the process that was to be killed did not begin")
    time.sleep(choose.uniform(0, 0.02))
    process.kill()
    process.join()


def save_again(begun: Any, caches: tuple[Any, Any], path: Path) -> None:
    """Each cache over the other, again and again."""
    while True:
        for cache in caches:
            cache.save(path)
        begun.set()
