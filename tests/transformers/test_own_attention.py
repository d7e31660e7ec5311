"""Models that do not call attention as Llama does: right answers, or a clear refusal."""

import copy
import sys
import types
from typing import Any

import pytest
import torch
import transformers as hf

from models import prompt
from tightkv import KVQuantConfig, TightCache
from tightkv.integrations.transformers.attention import has_own_attention, tightkv_attention

FINE = KVQuantConfig.preset("k8v8", window_bits=16)
SIZE = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZE, "num_key_value_heads": 2, "intermediate_size": 96}
GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}
CONFIGS = {
    "bloom": lambda: hf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=2, n_head=4),
    "codegen": lambda: hf.CodeGenConfig(**GPT),
    "diffllama": lambda: hf.DiffLlamaConfig(**LLAMA),
    "gpt_neox_japanese": lambda: hf.GPTNeoXJapaneseConfig(**SIZE, intermediate_multiple_size=2),
    "mpt": lambda: hf.MptConfig(vocab_size=97, d_model=64, n_layers=2, n_heads=4),
}


def model_of(config, implementation):
    torch.manual_seed(0)
    config = copy.deepcopy(config)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.15)
    return model.eval()


@torch.no_grad()
def in_pieces(model, cache, ids, mask):
    out, at = [], 0
    for cut in (90, 150, 157, 158, ids.shape[1]):
        step = model(ids[:, at:cut], past_key_values=cache, attention_mask=mask[:, :cut])
        out.append(step.logits)
        at = cut
    return torch.cat(out, 1)


@pytest.mark.parametrize("padded", [0, 37])
@pytest.mark.parametrize("family", CONFIGS)
def test_models_with_attention_of_their_own(family, padded):
    config, ids = CONFIGS[family](), prompt(2, 180)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    model = model_of(config, "tightkv")
    assert model.config._attn_implementation == "tightkv"
    got = in_pieces(model, TightCache(FINE, model=model), ids, mask)
    exact = in_pieces(model_of(config, "eager"), hf.DynamicCache(config=config), ids, mask)
    difference = ((got - exact) * mask[:, :, None]).norm() / exact.norm()
    assert difference < 0.002


def test_whose_attention_is_known():
    for model in (hf.CodeGenForCausalLM, hf.GitForCausalLM, hf.FalconForCausalLM):
        assert has_own_attention(model.config_class())
    # PaliGemma's text model is Gemma, whose code is imported with it
    imported = (hf.LlamaForCausalLM, hf.GemmaForCausalLM)
    for model in (*imported, hf.PaliGemmaForConditionalGeneration):
        assert not has_own_attention(model.config_class())


@pytest.mark.parametrize("option", ["position_bias", "indices", "block_indices"])
def test_what_changes_scores_and_is_not_known_is_refused(option):
    x = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match=f'"tightkv" has no {option}; use "sdpa"'):
        tightkv_attention(torch.nn.Module(), x, x, x, None, **{option: torch.zeros(1)})


def test_a_model_whose_code_is_not_found_counts_as_one_with_its_own(monkeypatch):
    """A full mask is right for all. Once the code is there, it decides."""
    config = type(
        "OwnConfig", (hf.PreTrainedConfig,), {"__module__": "somewhere.configuration_own"}
    )
    assert has_own_attention(config())
    found: Any = types.ModuleType("somewhere.modeling_own")
    found.ALL_ATTENTION_FUNCTIONS = None
    monkeypatch.setitem(sys.modules, found.__name__, found)
    assert not has_own_attention(config())
