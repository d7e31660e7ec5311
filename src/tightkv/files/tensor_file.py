"""Safetensors files from anywhere: those of a model, single tensors of them, and whole files.

Sizes are checked against the file's before memory is taken for them. Unlike safetensors' own
reader this one maps nothing: a file that changes while it is read cannot change checked values,
and one that is cut off cannot end the process.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from tightkv.files.strict_json import Field, parse_json

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = {**_FLOATS, "U8": torch.uint8, "I8": torch.int8, "I64": torch.int64}
_OURS = ("U8", "I8", "I64", "F16", "BF16", "F32")  # in files that tightkv writes
_OUR_HEADER, _ANY_HEADER = 32 << 20, 100_000_000  # bytes of JSON; what safetensors accepts
_OUR_RANK, _ANY_RANK = 8, 64  # what torch accepts
_MAX_SIZE = 1 << 40


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor in a file, which is not read yet and may be too short."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte in the file
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
        """The tensor, or every `step`-th row of it, beginning with the first."""
        if not self.is_float:
            raise ValueError(f"{self.name} is of dtype {self.dtype}; read: {', '.join(_FLOATS)}")
        if not self.bytes:
            raise ValueError(f"{self.name} of shape {list(self.shape)} is empty")
        if self.start + self.bytes > self.path.stat().st_size:
            raise ValueError(f"{self.path} ends before {self.name} does")
        with self.path.open("rb", buffering=0) as file:
            if step == 1 or not self.shape:
                return self.read_from(file)
            rows = (self.rows(i, 1) for i in range(0, self.shape[0], step))
            return torch.cat([row.read_from(file) for row in rows])

    def read_from(self, file: BinaryIO) -> Tensor:
        """The whole tensor from its open file, whose size was checked."""
        data = torch.empty(self.bytes, dtype=torch.uint8, device="cpu")
        part, done = data.numpy().data, 0
        file.seek(self.start)
        while done < len(part):
            count = file.readinto(part[done:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"it ends within tensor {self.name!r}")
            done += count  # a raw read may stop short of a large part
        return data.view(_DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of any safetensors file, without reading them."""
    try:
        with path.open("rb") as file:
            return _header(file, path, _ANY_HEADER)[1]
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor a folder would load, by name; none where it has no safetensors files."""
    headers = map(read_header, safetensors_files(folder))
    return {name: tensor for header in headers for name, tensor in header.items()}


def safetensors_files(folder: Path) -> list[Path]:
    """What transformers would load: the indexed shards, else model.safetensors, else any."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            found = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            names = {str(name) for name in found}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(f"{index} is not an index of safetensors files") from None
        files = [folder / name for name in sorted(names)]
        # an index without its shards: nothing to measure
        return files if all(path.is_file() for path in files) else []
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a whole file, of the types that tightkv writes."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{os.fspath(path)!r} is not a file")
    try:
        with open(path, "rb") as file:
            metadata, tensors, end = _header(file, Path(path), _OUR_HEADER)
            for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.bytes)):
                _check_ours(tensor, end)
                end += tensor.bytes
            size = os.fstat(file.fileno()).st_size
            if end != size:
                raise ValueError(f"its tensors end at byte {end}, the file at {size}")
            return metadata, {name: tensor.read_from(file) for name, tensor in tensors.items()}
    except ValueError as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}") from None


def checksum(text: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over a header and every tensor: finds damage, not intent."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        data = tensors[name].contiguous().flatten().view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def _header(
    file: BinaryIO, path: Path, longest: int
) -> tuple[dict[str, str], dict[str, StoredTensor], int]:
    """Metadata, tensors, and the byte at which these begin."""
    length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
    if size < 8 or length > min(size - 8, longest):
        raise ValueError(f"its header has {length} bytes of {size}; allowed: {longest}, all there")
    entries = Field(parse_json(file.read(length).decode()), "").record_of_any()
    metadata = entries.pop("__metadata__", Field({}, "__metadata__")).record_of_any()
    tensors = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    return {name: field.text() for name, field in metadata.items()}, tensors, 8 + length


def _tensor(path: Path, name: str, entry: Field, base: int) -> StoredTensor:
    fields = entry.record("dtype", "shape", "data_offsets")
    dtype = fields["dtype"].text()
    shape = tuple(size.integer(0, _MAX_SIZE) for size in fields["shape"].items())
    offsets = [at.integer(0, _MAX_SIZE) for at in fields["data_offsets"].items()]
    if len(shape) > _ANY_RANK or math.prod(size or 1 for size in shape) > _MAX_SIZE:
        raise fields["shape"].wrong(f"{_ANY_RANK} sizes, {_MAX_SIZE} elements")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fields["data_offsets"].wrong("two numbers, the smaller one first")
    size, count = offsets[1] - offsets[0], math.prod(shape)
    # An element of a dtype that is not known here has a bit at least.
    if size != count * _DTYPES[dtype].itemsize if dtype in _DTYPES else count > 8 * size:
        raise fields["data_offsets"].wrong(f"as far apart as {count} elements of {dtype} are long")
    return StoredTensor(path, name, dtype, shape, base + offsets[0], size)


def _check_ours(tensor: StoredTensor, begin: int) -> None:
    if tensor.dtype not in _OURS or len(tensor.shape) > _OUR_RANK:
        raise ValueError(
            f"tensor {tensor.name[:99]!r} has {tensor.dtype[:20]} of {len(tensor.shape)} "
            f"dimensions; allowed: {', '.join(_OURS)} of up to {_OUR_RANK}"
        )
    if tensor.start != begin:
        raise ValueError(
            f"tensor {tensor.name[:99]!r} begins at byte {tensor.start}; allowed: {begin}, where "
            "the one before ends"
        )
