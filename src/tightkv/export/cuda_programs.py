"""KernelSet: machine code of a static cache on a GPU, and how each step launches it.

The launches are those of `kernels.cuda`, recorded for every number of new tokens. The operator
(cuda_operator.cpp) launches them again with the operands of a call, so it needs neither Python nor
the layout. `kernel_file.cpp` reads what `KernelSet.to_bytes` writes.
"""

import functools
import hashlib
import struct
from collections.abc import Iterable, Iterator

import torch

from tightkv.export.operator import add_kernels
from tightkv.export.recorder import APPEND, ATTEND_NEW, COUNT, SCALE, STEP, Recorder, Relocation
from tightkv.export.static_shape import StaticShape
from tightkv.kernels.cuda import backend
from tightkv.kernels.cuda.driver import Launch
from tightkv.pages.layout import RING_SLACK

MAGIC = b"TIGHTKVG"
VERSION = 2
_made: dict[int, bytes] = {}  # sets of this process by their keys


class KernelSet:
    """The kernels of layers of one shape on one kind of GPU."""

    def __init__(self, shape: StaticShape, device: torch.device) -> None:
        self.shape = shape
        self.arch = torch.cuda.get_device_capability(device)
        recorder = Recorder(shape, device)
        self.programs = [recorder.program(STEP, tokens) for tokens in range(1, RING_SLACK + 1)]
        prefill = list(_prefill_tokens(shape.max_tokens))
        self.programs += [recorder.program(APPEND, tokens) for tokens in prefill]
        if prefill and (shape.window or shape.softcap):
            self.programs.append(recorder.program(ATTEND_NEW, RING_SLACK))
        self.constants = recorder.constants

    def to_bytes(self) -> bytes:
        """The set as the operator reads it, without its key."""
        shape, layout = self.shape, self.shape.layout
        data = _Writer()
        codes = layout.cfg.window_bits == 8
        data.numbers(*self.arch, (layout.dtype == torch.bfloat16) | codes << 1, shape.batch)
        data.numbers(shape.query_heads, layout.num_kv_heads, layout.head_dim, layout.ring_tokens)
        data.numbers(layout.cfg.sinks, shape.pages, layout.record_bytes, shape.max_tokens)
        data.numbers(int(shape.feedback), shape.window or 0)
        data.data += struct.pack("<d", shape.softcap or 0.0)
        launches = [launch for program in self.programs for launch, _ in program.launches]
        cubins = list(dict.fromkeys(launch.cubin for launch in launches))
        data.blocks(cubins)
        data.blocks(self.constants)
        data.numbers(len(self.programs))
        for program in self.programs:
            data.numbers(program.kind, program.tokens, len(program.scratch))
            data.numbers(*program.scratch, len(program.launches))
            for launch, relocations in program.launches:
                data.numbers(cubins.index(launch.cubin), *launch.grid, launch.threads)
                data.numbers(launch.shared)
                data.blocks([launch.name.encode(), *_without_addresses(launch, relocations)])
                data.numbers(len(relocations))
                for r in relocations:
                    data.numbers(r.argument, r.at, r.what, r.offset)
        return bytes(data.data)


@functools.cache
def known_kernels(shape: StaticShape, device: torch.device) -> int:
    """Compile a set, give it to the operator, return its key."""
    if reason := backend.unavailable(device.type, asked=True) or backend.unsupported(shape.layout):
        raise ValueError(f"{shape.layout.cfg.name} cannot run on a GPU: {reason}")
    if (dim := shape.layout.head_dim) & (dim - 1):  # they cannot seal with feedback
        raise ValueError(f"head_dim={dim} cannot be exported to a GPU; powers of two can")
    data = KernelSet(shape, device).to_bytes()
    add_kernels(kernel_file([data]))
    _made[key_of(data)] = data
    return key_of(data)


def kernel_file_of(keys: Iterable[int]) -> bytes:
    """The file to ship beside a model whose layers have these kernels."""
    return kernel_file([_made[key] for key in dict.fromkeys(keys)])


def key_of(data: bytes) -> int:
    """A positive number that says which set of kernels is meant."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1 or 1


def kernel_file(sets: list[bytes]) -> bytes:
    """A file of several sets, each under its key."""
    data = _Writer()
    data.data += MAGIC
    data.numbers(VERSION, len(sets))
    for one in sets:
        data.numbers(key_of(one))
        data.blocks([one])
    return bytes(data.data)


class _Writer:
    """Numbers of 8 bytes, and blocks of bytes padded to as many."""

    def __init__(self) -> None:
        self.data = bytearray()

    def numbers(self, *values: int) -> None:
        self.data += struct.pack(f"<{len(values)}q", *values)

    def blocks(self, blocks: list[bytes]) -> None:
        self.numbers(len(blocks))
        for block in blocks:
            self.numbers(len(block))
            self.data += block + bytes(-len(block) % 8)


def _prefill_tokens(max_tokens: int) -> Iterator[int]:
    """Programs that append many tokens: powers of two, up to the whole cache."""
    tokens = 2 * RING_SLACK
    while tokens < max_tokens:
        yield tokens
        tokens *= 2
    if max_tokens > RING_SLACK:
        yield max_tokens


def _without_addresses(launch: Launch, relocations: list[Relocation]) -> list[bytes]:
    """The arguments, zero where a call puts its own: they and the key are the same everywhere."""
    arguments = [bytearray(bytes(x)) for x in launch.args]
    for r in relocations:
        size = 4 if r.what in (COUNT, SCALE) else 8
        arguments[r.argument][r.at : r.at + size] = bytes(size)
    return [bytes(x) for x in arguments]
