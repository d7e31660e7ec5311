"""The metric of queries from weights alone, against queries of models with isotropic inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import tightkv.integrations.transformers  # noqa: F401 - registers attention "tightkv"
from models import MAMBA, MOE, SHAPE
from tightkv.files.tensor_file import StoredTensor
from tightkv.fit import Checkpoint, query_metric
from tightkv.fit.checkpoint import ByLayer
from tightkv.fit.query_metric import KNOWN, POSITIONS, normed
from tightkv.model_shape import families
from tiny_folder import write_model

TWO = {**SHAPE, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
FULL: dict[str, Any] = {"layer_types": ["full_attention"] * 2}
PAD = {"pad_token_id": 0}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 32, **MOE}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "arcee": lambda: hf.ArceeConfig(**TWO),
    "cohere": lambda: hf.CohereConfig(**TWO),
    "cohere2": lambda: hf.Cohere2Config(**TWO, **FULL, sliding_window=16),
    "ernie4_5": lambda: hf.Ernie4_5Config(**TWO),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(**TWO, moe_num_experts=4, moe_k=2),
    "falcon_h1": lambda: hf.FalconH1Config(**TWO, **MAMBA),
    "gemma": lambda: hf.GemmaConfig(**TWO, head_dim=32),
    "gemma2": lambda: hf.Gemma2Config(**TWO, **FULL, head_dim=32, sliding_window=16),
    "gemma3_text": lambda: hf.Gemma3TextConfig(**TWO, **FULL, head_dim=32, sliding_window=16),
    "glm": lambda: hf.GlmConfig(**TWO, **PAD, head_dim=32, partial_rotary_factor=0.5),
    "glm4": lambda: hf.Glm4Config(**TWO, **PAD, head_dim=32, partial_rotary_factor=0.5),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **TWO, head_dim=32, partial_rotary_factor=0.5, use_qk_norm=True, attention_bias=True
    ),
    "granite": lambda: hf.GraniteConfig(**TWO),
    "granitemoe": lambda: hf.GraniteMoeConfig(**TWO, **MOE, num_local_experts=4),
    "helium": lambda: hf.HeliumConfig(**TWO, head_dim=16),
    "lfm2": lambda: hf.Lfm2Config(**TWO, **FULL),
    "llama": lambda: hf.LlamaConfig(**TWO, head_dim=32),
    "mistral": lambda: hf.MistralConfig(**TWO, rope_theta=1e6),
    "mixtral": lambda: hf.MixtralConfig(**TWO, **MOE, num_local_experts=4),
    "nemotron": lambda: hf.NemotronConfig(**TWO, partial_rotary_factor=0.5),
    "olmo2": lambda: hf.Olmo2Config(**TWO),
    "olmo3": lambda: hf.Olmo3Config(**TWO, **FULL, sliding_window=16),
    "phi": lambda: hf.PhiConfig(**TWO, partial_rotary_factor=0.5),
    "phi3": lambda: hf.Phi3Config(**TWO, **PAD),
    "phimoe": lambda: hf.PhimoeConfig(**TWO, **MOE, num_local_experts=4),
    "qwen2": lambda: hf.Qwen2Config(**TWO),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**TWO, **EXPERTS),
    "qwen3": lambda: hf.Qwen3Config(**TWO, head_dim=32),
    "qwen3_5_moe_text": lambda: hf.Qwen3_5MoeTextConfig(
        **TWO, **FULL, **LINEAR, **EXPERTS, head_dim=32, shared_expert_intermediate_size=32
    ),
    "qwen3_5_text": lambda: hf.Qwen3_5TextConfig(**TWO, **FULL, **LINEAR, head_dim=32),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**TWO, **EXPERTS, head_dim=32),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **TWO, **FULL, **LINEAR, **EXPERTS, head_dim=32, shared_expert_intermediate_size=32
    ),
    "seed_oss": lambda: hf.SeedOssConfig(**TWO, head_dim=32, attention_bias=True),
    "smollm3": lambda: hf.SmolLM3Config(**TWO, **PAD, no_rope_layers=[0, 1]),
    "stablelm": lambda: hf.StableLmConfig(**TWO, partial_rotary_factor=0.25),
    "starcoder2": lambda: hf.Starcoder2Config(**TWO, use_bias=True),
}


def random_model(config: Any) -> Any:
    """Norms and biases are random too: fresh ones would hide mistakes."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="tightkv").eval()
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1 and "norm" in name:
            tensor.data += 0.5 * torch.rand_like(tensor)
        elif name.endswith("_proj.bias"):
            tensor.data.normal_(0, 0.3)
    return model


def query_metrics(folder: Path, layers: Collection[int] = (0, 1), **part: Any) -> ByLayer:
    return Checkpoint(folder, "it", **part).metrics(layers)


def key_energies(folder: Path, page_size: int, **part: Any) -> dict[int, Tensor]:
    return Checkpoint(folder, "it", **part).key_energies([0], page_size)[0]


class Recorded(Exception):
    """The metric of the first layer; the others need not run."""


@torch.no_grad()
def recorded_metric(model: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 32) -> Tensor:
    """The mean of q q^T in layer 0 over inputs without a preferred direction."""
    return recorded(model, monkeypatch, rows)[0]


def recorded(model: Any, monkeypatch: pytest.MonkeyPatch, rows: int = 32) -> tuple[Tensor, Tensor]:
    """That, and the variance of each channel of the keys."""
    text = model.config.get_text_config()

    def record(module: Any, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        grouped = query.unflatten(1, (key.shape[1], -1)).float()
        count = query.shape[0] * query.shape[2]
        energy = key.float().var(0).mean(1)  # of what is not the same in all inputs
        raise Recorded(torch.einsum("bkgtd,bkgte->kde", grouped, grouped) / count, energy)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "tightkv", record)
    positions = torch.arange(0, POSITIONS, 7)[None].expand(rows, -1)
    inputs = torch.randn(*positions.shape, text.hidden_size)
    with pytest.raises(Recorded) as raised:
        model(inputs_embeds=inputs, position_ids=positions, use_cache=False, logits_to_keep=1)
    metric, energy = raised.value.args
    return metric, energy


def relative(found: Tensor, wanted: Tensor) -> Tensor:
    """[heads]: distance of two metrics of unit size."""
    found, wanted = (x / x.flatten(1).norm(dim=1)[:, None, None] for x in (found, wanted))
    return (found - wanted).flatten(1).norm(dim=1)


def test_every_known_family_is_compared() -> None:
    assert sorted(CONFIGS) == list(KNOWN)


@pytest.mark.sampled
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_give_the_metric_of_isotropic_inputs(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(CONFIGS[family]())
    model.save_pretrained(tmp_path)
    found = query_metrics(tmp_path)
    assert found[1] is None and list(found[0]) == [0, 1]
    metric, energy = recorded(model, monkeypatch)
    # A mean over n queries is off by sqrt(dim / n), and some norms take a direction out.
    assert relative(found[0][0], metric).max() < 0.06
    keys = key_energies(tmp_path, page_size=1)[0]  # whose mean takes all that is constant
    keys, energy = (x / x.mean(1, keepdim=True) for x in (keys, energy))
    assert (keys - energy).norm() < 0.15 * energy.norm()


def test_energies_of_keys_have_what_pages_leave_of_a_bias(tmp_path: Path) -> None:
    """RoPE turns the first pairs within a page, and hardly the last ones."""
    model = random_model(hf.Qwen2Config(**TWO))
    attention = model.model.layers[0].self_attn
    dim = attention.head_dim
    attention.k_proj.bias.data.fill_(30.0)
    model.save_pretrained(tmp_path)
    with_bias, without = (key_energies(tmp_path, page_size=n)[0] for n in (64, 1))
    more = with_bias - without
    torch.testing.assert_close(more[:, : dim // 2], more[:, dim // 2 :])
    assert (more[:, 0] > 800).all() and (more[:, dim // 2 - 1] < 100).all()
    parts = [key_energies(tmp_path, 64, rank=i, ranks=2)[0] for i in range(2)]
    torch.testing.assert_close(torch.cat(parts), with_bias)
    assert key_energies(tmp_path / "none", 64) == {}


@pytest.mark.parametrize(("family", "interleaved"), [("llama", True), ("glm", False)])
def test_other_pairs_give_another_metric(
    family: str, interleaved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(CONFIGS[family]())
    model.save_pretrained(tmp_path)
    if interleaved:
        monkeypatch.setitem(families._ROWS[family], "interleaved_rope", True)
    else:
        monkeypatch.delitem(families._ROWS[family], "interleaved_rope")
    found = query_metrics(tmp_path)[0][0]
    assert relative(found, recorded_metric(model, monkeypatch)).min() > 0.15


def test_a_tensor_parallel_rank_gets_its_heads(tmp_path: Path) -> None:
    config = hf.Qwen2Config(**{**TWO, "hidden_size": 128, "num_attention_heads": 8})
    config.num_key_value_heads = 4
    random_model(config).save_pretrained(tmp_path)
    whole = query_metrics(tmp_path)[0][1]
    for ranks, heads in ((2, [[0, 1], [2, 3]]), (8, [[0], [0], [1], [1], [2], [2], [3], [3]])):
        for rank, mine in enumerate(heads):
            part = query_metrics(tmp_path, [1], rank=rank, ranks=ranks)[0]
            torch.testing.assert_close(part[1], whole[mine])


@pytest.mark.parametrize(("share", "heads"), [(2.0, 4), (1.0, 2), (0.01, 1)])
def test_of_large_matrices_some_heads_are_read(
    share: float, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers with two groups of four query heads; the share is of one layer's matrix."""
    model = random_model(hf.LlamaConfig(**{**TWO, "num_attention_heads": 8}, head_dim=16))
    model.save_pretrained(tmp_path)
    read, rows = StoredTensor.read, []

    def spy(tensor: StoredTensor, step: int = 1) -> Tensor:
        rows.append(tensor.shape[0] if "q_proj" in tensor.name else 0)
        return read(tensor, step)

    matrix = model.model.layers[0].self_attn.q_proj.weight
    with monkeypatch.context() as patched:
        patched.setattr(StoredTensor, "read", spy)
        patched.setattr(query_metric, "READ_BYTES", share * matrix.nbytes)
        found = query_metrics(tmp_path)[0][0]
    assert sum(rows) == 2 * 2 * heads * 16
    matrix.data.view(2, 4, 16, -1)[:, heads:] = 0
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(found, query_metrics(tmp_path)[0][0])


def test_norms_of_queries() -> None:
    sizes = torch.tensor([6.0, 3.0, 2.0] + [1.0] * 29)
    z = torch.randn(100_000, 32, generator=torch.Generator().manual_seed(0)) * sizes.sqrt()
    z = z / z.square().mean(1, keepdim=True).sqrt()
    found = normed(torch.diag(sizes))
    assert found.trace() == pytest.approx(32)
    first = torch.diag(sizes) * 32 / sizes.sum()  # what leaves the norm's own changes out
    real = z.mT @ z / len(z)
    assert (found - real).norm() < 0.5 * (first - real).norm()


def changed(folder: Path, name: str, tensor: Tensor | None) -> Path:
    """A llama whose layer 1 has another tensor, or none, of that name."""
    write_model(folder, hf.LlamaConfig(**TWO))
    path = folder / "model.safetensors"
    stored = load_file(path)
    stored.pop(f"model.layers.1.{name}", None)
    if tensor is not None:
        stored[f"model.layers.1.{name}"] = tensor
    save_file(stored, path)
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("self_attn.q_proj.weight", None, "no tensor model.layers.1.self_attn.q_proj.weight"),
        ("self_attn.q_proj.weight", torch.zeros(64, 64).to(torch.int8), "is quantized"),
        ("self_attn.q_proj.weight", torch.zeros(64, 32), "has the shape [64, 32]"),
        ("self_attn.q_proj.weight", torch.full((64, 64), math.nan), "not finite"),
        ("self_attn.q_proj.weight", torch.full((64, 64), 3e38), "not finite"),
        ("input_layernorm.weight", None, "no norm before"),
        ("self_attn.q_rescale.weight", torch.ones(1), "is not understood"),
    ],
)
def test_a_layer_that_is_not_understood_has_no_metric(
    name: str, tensor: Tensor | None, reason: str, tmp_path: Path
) -> None:
    found = query_metrics(changed(tmp_path, name, tensor))
    assert list(found[0]) == [0]
    assert found[1] is not None and found[1].startswith("layer 1: ")
    assert reason in found[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "unheard_of"}, "'unheard_of' are not known"),
        ({"num_attention_heads": 3, "head_dim": 16}, ""),
        ({"rope_theta": 10**400, "rope_parameters": None}, ""),
        ({"num_hidden_layers": 5}, "layers.2"),
    ],
)
def test_models_that_are_not_understood_have_none(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    write_model(tmp_path, hf.LlamaConfig(**TWO))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    layers = range(change.get("num_hidden_layers", 2))
    found = query_metrics(tmp_path, layers)
    assert set(found[0]) <= {0, 1} and found[1] is not None and reason in found[1]


def test_a_folder_without_files_has_none(tmp_path: Path) -> None:
    assert query_metrics(tmp_path)[1] and not query_metrics(tmp_path)[0]
