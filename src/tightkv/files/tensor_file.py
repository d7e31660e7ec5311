"""A safetensors file from anywhere: metadata and tensors, read once and written whole.

Sizes are checked against the file's before memory is taken for them. Unlike safetensors' own
reader this one maps nothing: a file that changes while it is read cannot change checked values,
and one that is cut off cannot end the process.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tightkv.files.strict_json import Field, parse_json

MAX_HEADER = 32 << 20  # bytes of JSON
_MAX_RANK = 8
_MAX_SIZE = 1 << 40
_DTYPES = {
    "U8": torch.uint8,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


class _Place(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file of the types that tightkv writes."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{os.fspath(path)!r} is not a file")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _read_exactly(file, 8, size)
            length = int.from_bytes(header, "little")
            if length > min(size - 8, MAX_HEADER):
                raise ValueError(f"its header has {length} bytes; allowed: {MAX_HEADER}, all there")
            fields = Field(parse_json(_read_exactly(file, length, size).decode()), "")
            metadata, places = _check(fields, size - 8 - length)
            return metadata, {place.name: _read_tensor(file, place) for place in places}
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


def _check(header: Field, size: int) -> tuple[dict[str, str], list[_Place]]:
    entries = header.record_of_any()
    metadata = entries.pop("__metadata__", Field({}, "__metadata__")).record_of_any()
    places = sorted((_place(*entry) for entry in entries.items()), key=lambda p: (p.begin, p.end))
    end = 0
    for place in places:
        if place.begin != end:
            raise ValueError(f"tensor {place.name!r} begins at {place.begin}; allowed: {end}")
        end = place.end
    if end != size:
        raise ValueError(f"its tensors have {end} bytes, the file has {size} for them")
    return {name: field.text() for name, field in metadata.items()}, places


def _place(name: str, entry: Field) -> _Place:
    fields = entry.record("dtype", "shape", "data_offsets")
    dtype = _DTYPES[fields["dtype"].one_of(*_DTYPES)]
    shape = [size.integer(0, _MAX_SIZE) for size in fields["shape"].items()]
    offsets = [at.integer(0, _MAX_SIZE) for at in fields["data_offsets"].items()]
    if len(shape) > _MAX_RANK or math.prod(size or 1 for size in shape) > _MAX_SIZE:
        raise fields["shape"].wrong(f"{_MAX_RANK} sizes, {_MAX_SIZE} elements")
    size = math.prod(shape) * dtype.itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise fields["data_offsets"].wrong(f"two numbers, {size} bytes apart for shape {shape}")
    return _Place(name, dtype, shape, *offsets)


def _read_tensor(file: io.BufferedReader, place: _Place) -> Tensor:
    """The next bytes of the file: tensors follow each other."""
    data = torch.empty(place.end - place.begin, dtype=torch.uint8, device="cpu")
    if file.readinto(data.numpy().data) != len(data):
        raise ValueError(f"it ends within tensor {place.name!r}")
    return data.view(place.dtype).reshape(place.shape)


def _read_exactly(file: io.BufferedReader, count: int, size: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        raise ValueError(f"it ends after {size} bytes")
    return data
