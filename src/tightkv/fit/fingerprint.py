"""Which model it is: its shape, and the weights of its layers' norms.

Norms stay floats in every quantized format, so a quantized model is known by them as well.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping

import torch

from tightkv.files.tensor_file import stored_tensors
from tightkv.fit.attention_weights import LANGUAGE_PARTS, WeightTensor
from tightkv.model_shape.reader import read_model_shape
from tightkv.model_shape.shape import ModelShape

_NORM = re.compile(r"layers\.(\d+)\.([\w.]*norm[\w.]*)\.weight", re.ASCII)


def folder_fingerprint(folder: str | os.PathLike[str]) -> str:
    """Of a folder with safetensors files; ValueError or OSError where it has none."""
    shape = read_model_shape(folder)
    if shape.folder is None:
        raise ValueError("it has no folder")
    return model_fingerprint(shape, stored_tensors(shape.folder))


def model_fingerprint(shape: ModelShape, tensors: Mapping[str, WeightTensor]) -> str:
    """32 hex digits, the same for a folder and for the model that was loaded from it.

    Norms count as bf16, in which most checkpoints have them.
    """
    norms = _norms(tensors)
    if not norms:
        raise ValueError("it has no tensors layers.N.*norm.weight to know it by")
    layers = [[layer.kind, layer.num_kv_heads, layer.head_dim] for layer in shape.layers]
    digest = hashlib.sha256(json.dumps([shape.num_heads, layers]).encode())
    for (layer, name), tensor in sorted(norms.items()):
        if not tensor.is_float:
            raise ValueError(f"its tensor {tensor.name} cannot be read")
        numbers = tensor.read().to("cpu", torch.bfloat16).contiguous()
        digest.update(json.dumps([layer, name, list(tensor.shape)]).encode())
        digest.update(numbers.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def _norms(tensors: Mapping[str, WeightTensor]) -> dict[tuple[int, str], WeightTensor]:
    """By layer and name, those of the language model alone: towers of images have layers too."""
    for part in LANGUAGE_PARTS:
        found = {
            (int(match[1]), match[2]): tensor
            for name, tensor in tensors.items()
            if name.startswith(part) and (match := _NORM.fullmatch(name[len(part) :]))
        }
        if found:
            return found
    return {}
