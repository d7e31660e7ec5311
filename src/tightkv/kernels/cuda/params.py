"""The arguments of the CUDA kernels, as ctypes structures with the fields that csrc declares."""

import ctypes
import re
from pathlib import Path

CSRC = Path(__file__).parent / "csrc"
_NUMBERS = {"int": ctypes.c_int, "long long": ctypes.c_longlong, "float": ctypes.c_float}


def _fields(struct: str, file: str) -> list[tuple[str, type]]:
    """The fields of a struct of pointers and numbers: declarations are `type name, *name;`."""
    text = re.sub(r"//.*", "", (CSRC / file).read_text(encoding="utf-8"))
    found = re.search(rf"\bstruct {struct} {{(.*?)}};", text, re.DOTALL)
    assert found is not None, f"{file} has no struct {struct}"
    fields: list[tuple[str, type]] = []
    for declaration in found[1].split(";"):
        kind = re.match(r"\s*(?:const )?(long long|\w+)", declaration)
        for star, name in re.findall(r"(\*?)(\w+)\s*(?:,|$)", declaration):
            assert kind is not None
            fields.append((name, ctypes.c_void_p if star else _NUMBERS[kind[1]]))
    return fields


class DecodeParams(ctypes.Structure):
    _fields_ = _fields("DecodeParams", "include/decode_params.cuh")


class PlanParams(ctypes.Structure):
    _fields_ = _fields("PlanParams", "split_plan.cu")


class AppendParams(ctypes.Structure):
    _fields_ = _fields("AppendParams", "include/encode.cuh")


class SealParams(ctypes.Structure):
    _fields_ = _fields("SealParams", "include/sealed_layers.cuh")


class StepParams(ctypes.Structure):
    _fields_ = _fields("StepParams", "static_step.cu")
