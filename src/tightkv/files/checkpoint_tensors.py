"""Tensors in safetensors files, found by their headers and read one at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_MOST_HEADER = 100_000_000  # bytes; what safetensors itself accepts
_MOST_RANK = 64  # what torch itself accepts


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. Nothing of it has been read, and its file may be too short."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    bytes: int

    @property
    def is_float(self) -> bool:
        """Whether `read` can read it: 16, 32 or 64 bits and not quantized."""
        return self.dtype in _FLOATS

    def rows(self, first: int, count: int) -> StoredTensor:
        """A part of its first dimension, unread."""
        row = self.bytes // self.shape[0]
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, start=self.start + first * row, bytes=count * row)

    def read(self, step: int = 1) -> Tensor:
        """Every `step`-th of its first dimension, from the first on."""
        if not self.is_float:
            raise ValueError(f"{self.name} is of dtype {self.dtype}; read: {', '.join(_FLOATS)}")
        dtype = _FLOATS[self.dtype]
        if math.prod(self.shape) * dtype.itemsize != self.bytes or not self.bytes:
            raise ValueError(f"{self.name} of shape {list(self.shape)} has {self.bytes} bytes")
        count = -(-self.shape[0] // step) if self.shape else 1
        row = self.bytes // (self.shape[0] if self.shape else 1)
        if self.start + self.bytes > self.path.stat().st_size:
            raise ValueError(f"{self.path} ends before {self.name} does")
        data = bytearray(count * row)
        view = memoryview(data)
        with self.path.open("rb", buffering=0) as file:
            for index in range(count) if step > 1 else range(1):
                part = view[index * row : (index + 1) * row] if step > 1 else view
                file.seek(self.start + index * step * row)
                _fill(file, part, self.path)
        return torch.frombuffer(data, dtype=dtype).view(count, *self.shape[1:])


def _fill(file: Any, part: memoryview, path: Path) -> None:
    done = 0
    while done < len(part):
        count = file.readinto(part[done:])  # a raw read may stop short of a large part
        if not count:
            raise ValueError(f"{path} ends too early")
        done += count


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor a folder would load, by name; none where it has no safetensors files."""
    return {
        name: tensor
        for path in safetensors_files(folder)
        for name, tensor in read_header(path).items()
    }


def safetensors_files(folder: Path) -> list[Path]:
    """What transformers would load: the indexed shards, else model.safetensors, else any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = {str(name) for name in found}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{index} is not an index of safetensors files") from None
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            return []  # an index without its shards: nothing to measure
        return [folder / name for name in sorted(names)]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, without reading them."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(f"{path} is not a safetensors file: it has {len(start)} bytes")
        (length,) = struct.unpack("<Q", start)
        if length > path.stat().st_size:
            raise ValueError(f"{path} is not a whole safetensors file: its header is cut off")
        if length > _MOST_HEADER:
            raise ValueError(f"{path} is not a safetensors file: its header has {length} bytes")
        try:
            header: Mapping[str, Any] = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a safetensors file: its header is no JSON") from None
    try:
        return {
            name: _tensor(path, name, entry, 8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        raise ValueError(f"{path} is not a safetensors file: its header is not one") from None


def _tensor(path: Path, name: str, entry: Mapping[str, Any], base: int) -> StoredTensor:
    dtype, shape, (first, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    numbers = [*shape, first, end - first]
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise ValueError(name)
    if len(shape) > _MOST_RANK or math.prod(shape) > 8 * (end - first):  # an element has a bit
        raise ValueError(name)
    return StoredTensor(path, name, dtype, tuple(shape), base + first, end - first)
