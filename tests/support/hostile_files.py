"""Cache files as an attacker would write them: changed in structure, with right checksums.

A program, so that it can run under AddressSanitizer (test_hostile_files.py). Case i depends on the
seed and i alone; `python hostile_files.py --first i --count 1` plays one again and tells which.
"""

import argparse
import copy
import hashlib
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.layer import TightLayer
from tightkv.kernels.cpu import library
from tightkv.paged.cache import PagedKV

HOSTILE: list[Any] = [
    *(
        -1,
        0,
        1,
        2,
        31,
        32,
        33,
        255,
        1000,
        2**16,
        2**31 - 1,
        2**31,
        2**32,
        2**63 - 1,
        2**63,
        -(2**63),
    ),
    *(0.0, 0.5, -1.5, 1e308, float("nan"), float("inf"), True, False, None),
    *("", "0", "device", "torch.float16", "torch.float64", "TightLayer", "TightHybridLayer"),
    *("DynamicLayer", "StaticLayer", "QuantizedLayer", "Cache", "logger", "__class__", "x" * 9999),
    *([], {}, [[]], [0], [-1], [2**40], [0] * 3000, list(range(500)), {"0": None}, {"": {}}),
]
NAMES = ("__class__", "kv", "shared", "update", "keys", "crop", "device", "", "0", "cfg", "step")
TEXTS = (
    '{"rows": [], "rows": []}',
    '{"format_version": NaN}',
    '{"format_version": 1e999}',
    "[" * 100000,
    '{"a":' * 50000,
    '{"format_version": ' + "9" * 6000 + "}",
    "",
    "null",
    "[]",
    '"\\ud800"',
)
DTYPES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}


# --- files to begin with ---
def caches():
    """Name, model and cache: every kind of layer, small."""
    small = {"page_size": 32, "sinks": 2, "exact_pages": 1}
    two = {"num_hidden_layers": 2}
    windows = {**two, "layer_types": ["sliding_attention", "full_attention"]}
    linear = {**two, "layer_types": ["linear_attention", "full_attention"]}
    group = {**small, "key_method": "group", "value_method": "group", "group_size": 16}
    for name, quant, family, changes in (
        ("llama", {"preset": "k4v4", **small}, "llama", two),
        ("short", {"preset": "k4v4", **small}, "llama", two),
        ("2 bits", {"preset": "k2v2", **small, "protected_first": 1}, "llama", two),
        ("8 bits", {"preset": "k8v8", **small, "mean_bits": 8}, "qwen2", two),
        ("groups", {"preset": "k4v4", **group}, "llama", two),
        ("windows", {"preset": "k3v2", **small}, "gemma3", windows),
        ("linear", {"preset": "k4v3", **small}, "qwen3_next", linear),
        ("hybrid", {"preset": "k4v4", **small}, "falcon_h1", two),
        ("plain", {"preset": "k4v4", **small, **PROTECTED}, "llama", two),
    ):
        model = tiny(family, **changes)
        cache = TightCache(KVQuantConfig.from_dict(quant), model=model)
        tokens = 60 if name == "short" else 203  # no pages, or some
        mask = torch.ones(2, tokens, dtype=torch.long)
        mask[0, :9] = 0
        with torch.no_grad():
            model(prompt(2, tokens), past_key_values=cache, attention_mask=mask)
            cache.reorder_cache(torch.tensor([1, 0]))
        yield name, model, cache


PROTECTED = {"protected_first": 1, "protected_bits": 16}


class Seed:
    """A file of one cache, in parts."""

    def __init__(self, name, model, cache, folder):
        self.name, self.model = name, model
        self.weight = 0.2 if name == "groups" else 1.0  # slow: not in native code
        path = folder / "seed.safetensors"
        cache.save(path)
        self.data = path.read_bytes()
        with safe_open(path, framework="pt") as file:
            self.text = file.metadata()["tightkv"]
            self.tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
        self._blobs = {id(x): to_bytes(x) for x in self.tensors.values()}

    def blob(self, x):
        return self._blobs.get(id(x)) or to_bytes(x)


def to_bytes(x):
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes()


# --- changes ---
def places(node, path=()):
    """Paths of every value below `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def parent_of(node, path):
    for key in path[:-1]:
        node = node[key]
    return node


def change_header(rng, header):
    """Change one thing; returns what."""
    paths = list(places(header))
    if rng.random() < 0.6:  # configs have most fields; the others matter more
        paths = [path for path in paths if "quant" not in path] or paths
    path = rng.choice(paths)
    parent, key = parent_of(header, path), path[-1]
    how = rng.choice(("set", "set", "set", "nudge", "nudge", "swap", "drop", "add", "grow"))
    if how == "nudge" and type(parent[key]) is int:
        parent[key] += rng.choice((-64, -32, -2, -1, 1, 2, 32, 64, parent[key]))
    elif how == "swap":
        other = rng.choice(paths)
        parent[key] = copy.deepcopy(parent_of(header, other)[other[-1]])
    elif how == "drop":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        key = rng.choice(NAMES)
        parent[key] = copy.deepcopy(rng.choice(HOSTILE))
    elif how == "grow" and isinstance(parent, list):
        parent += copy.deepcopy(parent[: rng.randint(1, 3)])
    else:
        how = "set"
        parent[key] = copy.deepcopy(rng.choice(HOSTILE))
    return f"{how} {'.'.join(map(str, (*path[:-1], key)))}"


def change_together(rng, header):
    """What an attacker who knows the relations would do: the same change everywhere."""
    if rng.random() < 0.5:
        name, value = rng.choice(
            [("page_size", p) for p in (32, 64, 256)]
            + [("sinks", n) for n in (0, 1, 3, 32)]
            + [("exact_pages", n) for n in (1, 2, 3, 1000, 2**40)]
            + [("key_bits", b) for b in (2, 3, 4, 8, 16)]
            + [("mean_bits", 8), ("key_centering", "none"), ("seed", 2**62), ("rotation", "haar")]
        )
        for quant in quants(header):
            quant[name] = value
        return f"everywhere {name}={value}"
    by = rng.choice((-103, -64, -33, -32, -8, -7, -1, 1, 24, 25, 32, 64, 10**6))
    for row in header["rows"]:
        row["length"] += by
        if rng.random() < 0.5:
            row[rng.choice(("start", "exact_start", "ring_start"))] += by
    for layer in header["layers"]:
        if "tight" in layer:
            layer["tight"]["length"] += by
        if "cumulative_length" in layer.get("state", {}):
            layer["state"]["cumulative_length"] += by
    return f"lengths {by:+}"


def quants(header):
    tight = [layer["tight"]["quant"] for layer in header["layers"] if "tight" in layer]
    return [header["quant"], *tight]


def change_tensor(rng, tensors):
    name = rng.choice(sorted(tensors))
    x = tensors[name]
    how = rng.choice(("dtype", "cut", "drop", "rank", "empty", "swap", "repeat", "new", "bytes"))
    if how == "dtype":
        tensors[name] = x.to(rng.choice(list(DTYPES)))
    elif how in ("cut", "empty") and x.dim():
        dim = rng.randrange(x.dim())
        tensors[name] = x.narrow(dim, 0, 0 if how == "empty" else max(0, x.shape[dim] - 1))
    elif how == "drop":
        del tensors[name]
    elif how == "rank":
        tensors[name] = rng.choice((x.flatten(), x[None], x.transpose(0, -1) if x.dim() else x))
    elif how == "swap":
        tensors[name] = tensors[rng.choice(sorted(tensors))]
    elif how == "repeat" and x.dim():
        tensors[name] = torch.cat([x, x], rng.randrange(x.dim()))
    elif how == "new":
        name = rng.choice((*NAMES, "layers.9.pages", "layers.0.state.keys", "layers.00.pages"))
        tensors[name] = torch.zeros(rng.choice(((), (0,), (2, 2), (0, 2**30, 2**30))))
    else:
        return change_bytes(rng, tensors, [name])
    return f"{how} tensor {name}"


def change_bytes(rng, tensors, names=None):
    """Shapes stay; some bytes become random, all ones, NaN or infinity in float16."""
    names = names or [name for name in sorted(tensors) if rng.random() < 0.7]
    how = rng.choice(("random", "ones", "nan", "inf", "some"))
    for name in names:
        data = tensors[name].contiguous().flatten().view(torch.uint8).clone()
        if how == "random":
            data.copy_(
                torch.frombuffer(bytearray(rng.randbytes(len(data) + 1)), dtype=data.dtype)[:-1]
            )
        elif how == "ones":
            data.fill_(0xFF)
        elif how == "some":
            for _ in range(20 if len(data) else 0):
                data[rng.randrange(len(data))] = rng.choice((0, 0x7F, 0x80, 0xFF, 0x7C, 0xFC))
        else:
            data[1::2] = 0x7E if how == "nan" else rng.choice((0x7C, 0xFC))
            data[0::2] = 0
        tensors[name] = data.view(tensors[name].dtype).view(tensors[name].shape)
    return f"{how} bytes in {', '.join(names)}"


def change_raw(rng, data):
    """Bytes of the file, checksum or not; half of the time in the first part, the JSON."""
    data = bytearray(data)
    begin = int.from_bytes(data[:8], "little") + 8
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(begin if rng.random() < 0.5 else len(data))
        how = rng.choice(("flip", "set", "cut", "insert"))
        if how == "flip":
            data[at] ^= 1 << rng.randrange(8)
        elif how == "set":
            data[at : at + 8] = rng.randbytes(8)
        elif how == "insert":
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            del data[at:]
            break
    return bytes(data), "raw bytes"


def change_container(rng, data):
    """safetensors' own header: dtypes, shapes, offsets, metadata."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    what = [change_header(rng, header) for _ in range(rng.randint(1, 2))]
    text = json.dumps(header).encode()
    claimed = rng.choice((len(text),) * 8 + (0, 2**63, 2**64 - 1, len(text) + 1))
    return claimed.to_bytes(8, "little") + text + data[8 + length :], f"container: {what}"


def mutate(rng, seed):
    """A hostile file and what it is."""
    kind = rng.choices(("header", "together", "tensors", "bytes", "raw", "container", "text"),
                       (40, 15, 15, 15, 8, 6, 1))[0]  # fmt: skip
    if kind == "raw":
        return change_raw(rng, seed.data)
    if kind == "container":
        return change_container(rng, seed.data)
    header, tensors = json.loads(seed.text), dict(seed.tensors)
    text, what = None, []
    if kind == "header":
        what = [
            change_header(rng, header) for _ in range(rng.choice((1, 1, 1, 2, 3)) if header else 0)
        ]
    elif kind == "together":
        what = [change_together(rng, header)]
    elif kind == "tensors":
        what = [change_tensor(rng, tensors) for _ in range(rng.choice((1, 1, 2)))]
    elif kind == "bytes":
        what = [change_bytes(rng, tensors)]
    else:
        text = rng.choice(TEXTS)
        what = [f"text {text[:30]!r}"]
    if rng.random() < 0.7 and kind in ("header", "together"):
        try:
            header["fingerprint"] = KVQuantConfig.from_dict(header["quant"]).fingerprint()
        except Exception:  # what is not a config has no fingerprint
            what.append("no config")
    text = json.dumps(header) if text is None else text
    return serialize(seed, text, tensors), f"{kind}: {what}"


def serialize(seed, text, tensors):
    """A safetensors file with the right checksum; safetensors' own writer takes longer."""
    blobs = {name: seed.blob(x) for name, x in tensors.items()}
    digest = hashlib.sha256(text.encode())
    for name in sorted(blobs):
        digest.update(name.encode() + blobs[name])
    header = {"__metadata__": {"tightkv": text, "checksum": digest.hexdigest()}}
    end = 0
    for name, x in tensors.items():
        offsets = [end, end := end + len(blobs[name])]
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": offsets}
    start = json.dumps(header).encode()
    return b"".join([len(start).to_bytes(8, "little"), start, *blobs.values()])


# --- use ---
@torch.no_grad()
def use(cache, rng):
    """Decode, prefill, beams and a page to seal, in every layer that holds something.

    Kernels with sanitizers take most of the time of a case: most prefills are short.
    """
    for count in (1, rng.choice((2, 2, 3, 3, 3, 20))):
        for layer in cache.layers:
            use_layer(layer, count)
    rows = cache.shared.table.rows
    if rows and all(type(layer) is TightLayer for layer in cache.layers):
        cache.crop(-rng.randint(1, 60))
        cache.reorder_cache(torch.zeros(len(rows), dtype=torch.long))
        for layer in cache.layers:
            use_layer(layer, 33, attend=rng.random() < 0.2)
        for layer in cache.layers:
            use_layer(layer, 1)


def use_layer(layer, count, attend=True):
    """New tokens of the shape it holds; what they are matters less."""
    for name in ("conv", "recurrent"):
        for i, x in getattr(layer, f"{name}_states", {}).items():
            if x is not None:
                getattr(layer, f"update_{name}_state")(x[..., :1] if name == "conv" else x + 0, i)
    if isinstance(layer, TightLayer):
        if layer.kv is None:
            return
        heads, dim, dtype = layer.kv.layout.num_kv_heads, layer.kv.layout.head_dim, layer.dtype
        new = noise(len(layer.shared.table), heads, count, dim).to(dtype)
        key, _ = layer.update(new, -new)
        if attend:
            layer.attend(key.step, noise(len(new), count, 2 * heads, dim).to(dtype))  # type: ignore[attr-defined]
        layer.commit()
    elif getattr(layer, "keys", None) is not None:
        layer.update(*(noise(*x.shape[:2], count, x.shape[3]) for x in (layer.keys, layer.values)))


def guard_views():
    """Tensors that kernels see get memory of malloc's, of the exact size, one by one.

    torch may have an allocator of its own, whose blocks AddressSanitizer does not know.
    """
    plain_view = PagedKV.view

    def guarded(x):
        if not isinstance(x, torch.Tensor) or hasattr(x, "guarded") or not x.numel():
            return x
        copy = torch.from_numpy(np.empty(x.numel() * x.element_size(), dtype=np.uint8))
        copy = copy.view(x.dtype).view(x.shape).copy_(x)
        copy.guarded = True  # type: ignore[attr-defined]
        return copy

    def view(self, *args, **kwargs):
        plain_view(self, *args, **kwargs)  # makes them large enough
        for name in ("pages", "ring_key", "ring_value", "sink_key", "sink_value"):
            setattr(self, name, guarded(getattr(self, name)))
        found = plain_view(self, *args, **kwargs)
        return type(found)(**{name: guarded(x) for name, x in vars(found).items()})

    PagedKV.view = view


def noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def run(args):
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    seeds = [Seed(*found, folder=folder) for found in caches()]
    path, loaded, refused = folder / "case.safetensors", 0, 0
    try:
        for i in range(args.first, args.first + args.count):
            rng = random.Random(f"{args.seed} {i}")
            seed = rng.choices(seeds, [seed.weight for seed in seeds])[0]
            data, what = mutate(rng, seed)
            os.pwrite(args.progress, f"{i:9}".encode(), 0) if args.progress else None
            path.write_bytes(data)
            model = seed.model if rng.random() < 0.5 else None
            try:
                cache = TightCache.load(path, model=model)
            except ValueError as error:
                if len(str(error)) > 2000 or str(path) not in str(error):
                    sys.exit(f"case {i} ({seed.name}; {what}): unclear error: {str(error)[:500]}")
                refused += 1
                continue
            except Exception as error:
                sys.exit(f"case {i} ({seed.name}; {what}): load raised {error!r:.500}")
            loaded += 1
            try:
                use(cache, rng)
                if rng.random() < 0.3:
                    cache.save(path)
            except Exception as error:
                sys.exit(f"case {i} ({seed.name}; {what}): use raised {error!r:.500}")
            if args.count == 1:
                sys.stdout.write(f"case {i} ({seed.name}; {what}) loads\n")
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    sys.stdout.write(f"{loaded} loaded, {refused} refused\n")
    sys.stdout.flush()


def break_a_table():
    """What the checks prevent: a page that is not there. Under AddressSanitizer this must end."""
    _, _, cache = next(caches())
    cache.shared.table.rows[0].pages[0] = len(cache.layers[0].kv.pages)
    cache.shared.table._forget_tensors()
    use_layer(cache.layers[0], 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", default="tightkv")
    parser.add_argument("--library", help="a build of the native CPU kernels")
    parser.add_argument("--progress", help="file that has the number of the case at hand")
    parser.add_argument("--break-a-table", action="store_true", help="after the cases")
    args = parser.parse_args()
    if args.library:
        library.find = lambda: Path(args.library)
        guard_views()
    library.load()
    args.progress = args.progress and os.open(args.progress, os.O_WRONLY | os.O_CREAT)
    run(args)
    if args.break_a_table:
        break_a_table()


if __name__ == "__main__":
    main()
