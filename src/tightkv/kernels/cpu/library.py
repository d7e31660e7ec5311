"""The shared library of C kernels: where it is, what it can run, and its structs."""

import ctypes
import os
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from tightkv.kernels.constants import ROTATIONS, SCALE_MODES
from tightkv.math.feedback import gain
from tightkv.math.quantize import TurboQuantMSE
from tightkv.math.rotation import Rotation
from tightkv.pages.codec import Codec
from tightkv.pages.layout import PageLayout

ISA_VARIABLE = "TIGHTKV_CPU_ISA"
ISAS = (
    *("portable", "neon", "dotprod"),
    *("avx2_float", "avx2", "avxvnni", "avx512", "avx512_vnni", "vnni"),
)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}


class Side(ctypes.Structure):
    """struct side of native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bits", "codes", "scales", "scale_mode", "rotation")),
        *((name, ctypes.c_void_p) for name in ("signs", "matrix")),
        *((name, ctypes.c_void_p) for name in ("centroids", "thresholds", "levels")),
        *((name, ctypes.c_double) for name in ("unit", "gain")),
    )


class Layer(ctypes.Structure):
    """struct layer of native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("dim", "heads", "page_size", "record_bytes")),
        *((name, ctypes.c_int64) for name in ("centered", "mean_bits", "mean")),
        ("key", Side),
        ("value", Side),
    )
    keep: list[Tensor]  # what the pointers point into


class LibraryError(RuntimeError):
    """The library is missing, or cannot run the set that TIGHTKV_CPU_ISA names."""


def find() -> Path:
    """The library that the install built."""
    folder = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = folder / f"_native{suffix}"
        if path.is_file():
            return path
    raise LibraryError(
        "not built: the install found no C compiler; install one (gcc or clang), then tightkv again"
    )


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """The library with its functions declared; it runs on torch's threads."""
    try:
        library = ctypes.CDLL(str(find()))
    except OSError as error:
        raise LibraryError(f"cannot be loaded: {error}") from None
    for name in ("tightkv_attend", "tightkv_append"):
        function = getattr(library, name)
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_int
    library.tightkv_put.argtypes, library.tightkv_put.restype = (ctypes.c_char_p,), ctypes.c_int
    library.tightkv_supported.restype = library.tightkv_chosen.restype = ctypes.c_char_p
    library.tightkv_use.argtypes, library.tightkv_use.restype = (ctypes.c_char_p,), ctypes.c_int
    library.tightkv_share_threads.argtypes = (ctypes.c_void_p,)
    library.tightkv_share_threads.restype = None
    library.tightkv_share_threads(_torch_parallel())
    use(library, os.environ.get(ISA_VARIABLE))
    return library


def supported(library: ctypes.CDLL) -> list[str]:
    """Instruction sets that are built and that this machine has, best first."""
    names: bytes = library.tightkv_supported()
    return names.decode().split(",")


def use(library: ctypes.CDLL, isa: str | None) -> str:
    """Choose an instruction set; None takes the best. Returns its name."""
    can_run = supported(library)
    isa = can_run[0] if isa is None else isa
    if isa not in ISAS:
        raise LibraryError(f"{ISA_VARIABLE}={isa!r}; supported: {', '.join(ISAS)}")
    if library.tightkv_use(isa.encode()):
        raise LibraryError(f"{ISA_VARIABLE}={isa!r}; this machine runs {', '.join(can_run)}")
    return isa


def chosen(library: ctypes.CDLL) -> str:
    """The instruction set in use."""
    name: bytes = library.tightkv_chosen()
    return name.decode()


def _torch_parallel() -> ctypes.c_void_p | None:
    """GOMP_parallel of the OpenMP runtime torch is linked to, where it has that entry.

    One pool for both: two would spin against each other on the same cores.
    """
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError):
        return None


@lru_cache(maxsize=1024)
def describe(layout: PageLayout) -> Layer:
    """What the kernels need to know of a layout. Hold it for as long as C uses its address."""
    codec, cfg = Codec(layout), layout.cfg
    assert isinstance(codec.key, TurboQuantMSE) and isinstance(codec.value, TurboQuantMSE)
    layer = Layer(
        dim=layout.head_dim,
        heads=layout.num_kv_heads,
        page_size=layout.page_size,
        record_bytes=layout.record_bytes,
        centered=cfg.centered,
        mean_bits=cfg.mean_bits,
        mean=layout.mean_offset,
    )
    layer.keep = []
    for name, quantizer in (("key", codec.key), ("value", codec.value)):
        setattr(layer, name, _side(codec, name, quantizer, layer.keep))
    return layer


def _side(codec: Codec, name: str, quantizer: TurboQuantMSE, keep: list[Tensor]) -> Side:
    tables = side_tables(quantizer)
    keep += tables.values()
    return Side(
        bits=quantizer.bits,
        codes=codec.layout.planes[name, "codes"].offset,
        scales=codec.layout.planes[name, "scale"].offset,
        scale_mode=SCALE_MODES[quantizer.scale_mode],
        rotation=ROTATIONS[quantizer.rotation.kind],
        unit=quantizer.codebook.unit,
        gain=gain(quantizer.bits) if codec.cfg.takes_feedback and name == "key" else 1.0,
        **{key: _address(tensor) for key, tensor in tables.items()},
    )


def side_tables(quantizer: TurboQuantMSE) -> dict[str, Tensor]:
    """What the pointers of struct side point to, by name."""
    book = quantizer.codebook
    centroids = book.table("cpu")
    return {
        **_rotation_constants(quantizer.rotation),
        "centroids": centroids,
        "thresholds": torch.tensor(book.thresholds, dtype=torch.float32, device="cpu"),
        "levels": (centroids.double() / book.unit).round().float(),
    }


def _rotation_constants(rotation: Rotation) -> dict[str, Tensor]:
    if rotation.kind == "hadamard":
        return {"signs": rotation.table(torch.device("cpu"))}
    if rotation.kind == "haar":
        return {"matrix": rotation.matrix().double().contiguous()}
    return {}


def _address(x: Tensor) -> int:
    """The address of a tensor for C, which reads host memory alone."""
    assert x.device.type == "cpu" and x.is_contiguous()
    return x.data_ptr()
