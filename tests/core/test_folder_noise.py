"""Noise of coded keys from a checkpoint's folder: against loaded weights, and on broken files."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from models import FAMILIES, SHAPE
from tightkv import KVQuantConfig
from tightkv.files.tensor_file import StoredTensor
from tightkv.fit import key_noise
from tightkv.fit.attention_weights import NOT_READABLE, AttentionWeights
from tightkv.fit.key_check import KeyCheck
from tightkv.fit.key_noise import LayerScores, Vectors, read_scores
from tightkv.model_shape import read_model_shape
from tiny_folder import plant_key_bias, write_model

HEADS, KV_HEADS, PAGE = 4, 2, 64


def inv_freq(dim: int, theta: float = 10000.0) -> torch.Tensor:
    return theta ** (-torch.arange(0, dim, 2) / dim)


def layer_noise_of_folder(folder: Path, page_size: int) -> dict[int, float] | str:
    """The noise of each layer's worst head by the layer's number; a reason where it is unknown."""
    try:
        found = read_scores(read_model_shape(folder))
        return {layer: scores.worst_noise(page_size) for layer, scores in found.items()}
    except NOT_READABLE as error:
        return str(error)


def noise_of(folder: Path, page_size: int = PAGE) -> dict[int, float]:
    found = layer_noise_of_folder(folder, page_size)
    assert isinstance(found, dict), found
    return found


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers with biases, that of the keys large in layer 2."""
    folder = write_model(tmp_path_factory.mktemp("noise") / "qwen2", hf.Qwen2Config(**SHAPE))
    plant_key_bias(folder, layer=2)
    return folder


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def change(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace or remove tensors of layer 1's attention block."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        name = "model.layers.1.self_attn." + name.replace("__", ".")
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, path)
    return folder


def test_the_noise_is_that_of_the_loaded_weights(qwen2: Path) -> None:
    model = hf.AutoModelForCausalLM.from_pretrained(qwen2)
    for index, layer in enumerate(model.model.layers):
        norm = layer.input_layernorm.weight.data.float()
        query, key = (
            Vectors(
                (side.weight.data.float() * norm).view(heads, -1).square().sum(1),
                side.bias.data.float().view(heads, 16),
            )
            for side, heads in (
                (layer.self_attn.q_proj, HEADS),
                (layer.self_attn.k_proj, KV_HEADS),
            )
        )
        expected = LayerScores(query, key, inv_freq(16), 16**-0.5).noise(PAGE).max()
        assert noise_of(qwen2)[index] == pytest.approx(float(expected), rel=1e-4)


def test_a_planted_bias_stands_out(qwen2: Path) -> None:
    noise = noise_of(qwen2)
    assert list(noise) == [0, 1, 2, 3]
    assert noise.pop(2) > 1000 * max(noise.values())


@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k2v2"])
def test_a_check_raises_that_layer_alone_and_says_so(qwen2: Path, preset: str) -> None:
    cfg = KVQuantConfig.preset(preset)
    checked = KeyCheck(qwen2).protect(cfg)
    assert checked.raised and checked.config == cfg.replace(layer_bits=f"2=k8v{cfg.value_bits}")
    assert checked.line is not None
    for part in (f"tightkv {preset}: 8-bit keys in layer 2", "(limit 12)", "protect_keys=false"):
        assert part in checked.line


def test_bytes_in_the_line(qwen2: Path) -> None:
    line = KeyCheck(qwen2).protect(KVQuantConfig()).line or ""
    # 2 heads of 16: codes 8 + 8, scales 2 + 2 and a 64th of a mean's 32 bytes, in 4 layers
    assert 4 * 2 * (8 + 8 + 2 + 2 + 32 / 64) == 164
    assert "180 bytes per token instead of 164" in line  # 8 more for each head of one layer


@pytest.mark.parametrize(
    "options", [{"protect_keys": False}, {"layer_bits": "2=k4v4"}, {"key_bits": 8}]
)
def test_what_a_user_sets_stays(qwen2: Path, options: dict[str, Any]) -> None:
    cfg = KVQuantConfig(**options)
    checked = KeyCheck(qwen2).protect(cfg)
    assert checked.config == cfg and checked.line is None and not checked.raised


def test_rows_are_sampled_where_matrices_are_large(
    qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, read = noise_of(qwen2), StoredTensor.read
    steps = set()

    def spy(tensor: StoredTensor, step: int = 1) -> torch.Tensor:
        steps.add(step)
        return read(tensor, step)

    monkeypatch.setattr(key_noise, "READ_BYTES", 1)
    monkeypatch.setattr(StoredTensor, "read", spy)
    sampled = noise_of(qwen2)
    assert steps == {1, 2}  # 8 of 16 rows of a head, whole biases
    for layer, noise in whole.items():
        assert sampled[layer] != noise and sampled[layer] == pytest.approx(noise, rel=0.4)


def test_every_second_row_is_every_second_row(tmp_path: Path) -> None:
    from tightkv.files.tensor_file import stored_tensors

    tensor = torch.randn(6, 5).bfloat16()
    save_file({"a": torch.zeros(3), "w": tensor}, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path)["w"]
    assert torch.equal(stored.read(), tensor)
    assert torch.equal(stored.read(2), tensor[::2])


def test_one_fused_matrix(tmp_path: Path) -> None:
    """Phi-3 keeps queries, keys and values in one."""
    shape = {**SHAPE, "pad_token_id": 0}
    folder = write_model(tmp_path / "phi3", hf.Phi3Config(**shape, rope_theta=500.0))
    fused, config = noise_of(folder), json.loads((folder / "config.json").read_text())
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if "qkv_proj" in name]:
        parts = stored.pop(name).split([HEADS * 16, KV_HEADS * 16, KV_HEADS * 16])
        for side, part in zip("qkv", parts, strict=True):
            stored[name.replace("qkv_proj", f"{side}_proj")] = part.contiguous()
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    assert noise_of(folder) == pytest.approx(fused)


@pytest.mark.parametrize(
    ("family", "layers"), [("qwen3", [0, 1, 2, 3]), ("qwen3_5", [1, 3]), ("gemma3", [1, 3])]
)
def test_under_norms_of_their_own(family: str, layers: list[int], tmp_path: Path) -> None:
    """Fresh norms multiply by one: every query and key has the energy head_dim."""
    config = FAMILIES[family]()
    noise = noise_of(write_model(tmp_path / family, config))
    scale = getattr(config, "query_pre_attn_scalar", config.head_dim) ** -0.5
    assert noise == pytest.approx(dict.fromkeys(layers, scale**2 * config.head_dim))


def test_a_norm_after_the_projection_takes_the_size_of_a_bias_away(tmp_path: Path) -> None:
    config = hf.Qwen3Config(**SHAPE, head_dim=16, attention_bias=True)
    folder = write_model(tmp_path / "qwen3", config)
    norm = 1 + torch.randn(16, generator=torch.Generator().manual_seed(9)).abs()
    change(folder, k_proj__bias=torch.full((32,), 1000.0), k_norm__weight=norm)
    expected = float(norm.square().sum()) / 16  # of queries: 16, as of keys without that norm
    assert noise_of(folder) == pytest.approx({0: 1.0, 1: expected, 2: 1.0, 3: 1.0})


def test_a_norm_of_all_heads(tmp_path: Path) -> None:
    noise = noise_of(write_model(tmp_path / "olmo2", hf.Olmo2Config(**SHAPE)))
    assert noise == pytest.approx(dict.fromkeys(range(4), 1.0))


def test_a_norms_own_bias_is_one_of_the_keys(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "starcoder2", hf.Starcoder2Config(**SHAPE))
    before = noise_of(folder)
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.input_layernorm.bias"
    stored[name] = torch.full_like(stored[name], 100.0)
    save_file(stored, folder / "model.safetensors")
    after = noise_of(folder)
    assert after.pop(1) > 1e4 * before.pop(1)
    assert after == before


def test_quantized_matrices_leave_the_biases(qwen2: Path, tmp_path: Path) -> None:
    folder = copy(qwen2, tmp_path)
    stored = load_file(folder / "model.safetensors")
    for name in [n for n in stored if "self_attn" in n and n.endswith("weight")]:
        stored[name.replace("weight", "qweight")] = stored.pop(name).to(torch.int32)
    save_file(stored, folder / "model.safetensors")
    whole, bound = noise_of(qwen2), noise_of(folder)
    assert all(bound[i] < whole[i] for i in whole)
    assert bound[2] > 100 and max(bound[i] for i in (0, 1, 3)) < 1


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"k_proj__weight": None, "k_proj__bias": None}, "k_proj.weight"),
        ({"k_proj__bias": torch.zeros(31)}, r"k_proj.bias has the shape [31] instead of [32]"),
        ({"q_proj__weight": torch.zeros(64, 32)}, "q_proj.weight has the shape [64, 32]"),
        ({"q_proj__weight": torch.zeros(64, 64).to(torch.int8), "q_proj__bias": None}, "quantized"),
        ({"k_proj__bias": torch.full((32,), torch.nan)}, "not finite"),
        ({"k_proj__bias": torch.full((32,), 3e38)}, "not finite, or too large"),
        ({"k_rescale__weight": torch.ones(1)}, "k_rescale.weight is not understood"),
        ({"k_norm__bias": torch.ones(16)}, "k_norm.bias is not understood"),
        ({"k_norm__weight": torch.ones(5)}, "k_norm.weight has the shape [5]"),
    ],
)
def test_what_is_not_understood_is_not_checked(
    tensors: dict[str, Any], reason: str, qwen2: Path, tmp_path: Path
) -> None:
    folder = change(copy(qwen2, tmp_path), **tensors)
    found = layer_noise_of_folder(folder, PAGE)
    assert isinstance(found, str) and reason in found
    checked = KeyCheck(folder).protect(KVQuantConfig())
    assert checked.config == KVQuantConfig() and not checked.raised
    assert checked.line is not None and ": not checked whether" in checked.line


def test_names_are_not_looked_through_for_each_layer() -> None:
    looks = 0

    class Name(str):
        def startswith(self, *args: Any) -> bool:
            nonlocal looks
            looks += 1
            return super().startswith(*args)

        def removeprefix(self, prefix: str) -> str:
            nonlocal looks
            looks += 1
            return super().removeprefix(prefix)

    count = 100
    shape = read_model_shape(hf.Qwen2Config(**{**SHAPE, "num_hidden_layers": count}))
    tensors = {}
    for i in range(count):
        name = Name(f"model.layers.{i}.self_attn.q_proj.weight")
        tensors[name] = StoredTensor(Path(), name, "F32", (64, 64), 0, 4 * 64 * 64)
    weights = AttentionWeights(shape, list(range(count)), tensors)
    for i in range(count):
        weights.refuse_unknown(i)
        assert weights.projection(i, "q").matrix is not None
    assert looks <= 10 * count


@pytest.mark.parametrize("names", [["model.safetensors"], ["model.safetensors", "config.json"]])
def test_a_folder_without_files_is_not_checked(
    names: list[str], qwen2: Path, tmp_path: Path
) -> None:
    folder = copy(qwen2, tmp_path)
    for name in names:
        (folder / name).unlink()
    assert isinstance(layer_noise_of_folder(folder, PAGE), str)
    assert "not checked" in (KeyCheck(folder).protect(KVQuantConfig()).line or "")


def test_pipes_among_the_weights_are_not_read(qwen2: Path, tmp_path: Path) -> None:
    """Who opens one waits for its writer."""
    folder = copy(qwen2, tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    assert isinstance(layer_noise_of_folder(folder, PAGE), dict)


HOSTILE: tuple[Any, ...] = (
    -1, 0, 1, 7, 2**31, 2**63, 10**400, 0.5, 1e308, None, True, "", "F32", "BF16", [], {},
)  # fmt: skip


def hostile_header(header: dict[str, Any], choose: random.Random) -> bytes:
    """One entry of a header changed, in what it says or in what it is."""
    entries = [name for name in header if "self_attn" in name or "layernorm" in name]
    name, value = choose.choice(entries), choose.choice(HOSTILE)
    part = choose.choice(["dtype", "shape", "data_offsets", "entry", "offset", "extent", "gone"])
    if part == "entry":
        header[name] = value
    elif part == "gone":
        header[name].pop(choose.choice(["dtype", "shape", "data_offsets"]))
    elif part in ("offset", "extent"):
        numbers = header[name]["data_offsets" if part == "offset" else "shape"]
        numbers[choose.randrange(len(numbers))] = value
    else:
        header[name][part] = value
    return json.dumps(header).encode()


def test_hostile_headers_are_not_checked_and_never_crash(qwen2: Path, tmp_path: Path) -> None:
    data = (qwen2 / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, tensors = json.loads(data[8 : 8 + length]), data[8 + length :]
    folder, choose, refused = copy(qwen2, tmp_path), random.Random(0), 0
    for _ in range(300):
        text = hostile_header(json.loads(json.dumps(header)), choose)
        file = struct.pack("<Q", len(text)) + text + tensors
        (folder / "model.safetensors").write_bytes(file)
        refused += isinstance(layer_noise_of_folder(folder, PAGE), str)
    assert 200 < refused < 300  # some change nothing that is read


def test_truncated_files_are_not_checked(qwen2: Path, tmp_path: Path) -> None:
    folder = copy(qwen2, tmp_path)
    data = (qwen2 / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    # in the length, the header and the first tensors; the last ones may be nobody's keys
    for size in (0, 7, 8, 9, length, 8 + length, 8 + length + 100, len(data) // 3):
        (folder / "model.safetensors").write_bytes(data[:size])
        assert isinstance(layer_noise_of_folder(folder, PAGE), str), size


@pytest.mark.parametrize(
    "config", [{"rope_theta": 10**400}, {"layer_types": 5}, {"head_dim": -1}, {"dtype": []}]
)
def test_hostile_configs_are_not_checked(
    config: dict[str, Any], qwen2: Path, tmp_path: Path
) -> None:
    folder = copy(qwen2, tmp_path)
    whole = json.loads((folder / "config.json").read_text())
    whole.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps(whole | config))
    assert isinstance(layer_noise_of_folder(folder, PAGE), str)
