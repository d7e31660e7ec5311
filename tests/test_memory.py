import gc

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from models import prompt, tiny
from tightkv import KVQuantConfig, TightCache
from tightkv.model_shape import read_model_shape
from tightkv.planner import config_plan


def test_a_long_prefill_and_decode_hold_what_the_plan_says():
    """32k tokens at once, then decoding past several pages: within 5% of `tightkv plan`."""
    model = tiny(num_hidden_layers=2, dtype=torch.bfloat16, max_position_embeddings=40_000)
    quant = KVQuantConfig.preset("k4v4")
    cache = TightCache(quant, model=model)
    layer, tokens = cache.tight_layers[0], 32_768
    key = torch.randn(1, 2, tokens, 32, dtype=torch.bfloat16)
    for tight in cache.tight_layers:  # the cache alone: what the model would hand it
        tight.update(key, key)
        tight.commit()
    with torch.no_grad():
        for _ in range(3):
            for tight in cache.tight_layers:
                tight.update(key[:, :, :200], key[:, :, :200])
                tight.commit()
        model(prompt(1, 4), past_key_values=cache)
    shape = read_model_shape(model.config)
    planned = config_plan("k4v4", shape, quant).total_bytes(layer.length)
    held = cache.bytes_used()["compressed"]
    assert layer.length == tokens + 604
    assert abs(held - planned) / planned < 0.05, (held, planned)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
def test_the_peak_on_a_gpu_is_what_the_plan_says(preset):
    """Weights and cache, as the allocator sees them: a 32k prefill in chunks, then decoding."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=32, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, vocab_size=256, max_position_embeddings=40_000,
        attn_implementation="tightkv",
    )  # fmt: skip
    gc.collect()
    torch.ones(64, 64, device="cuda", dtype=torch.bfloat16) @ torch.ones(
        64, 64, device="cuda", dtype=torch.bfloat16
    )  # cuBLAS takes its workspace now
    before = torch.cuda.memory_allocated()
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    weights = torch.cuda.memory_allocated() - before
    quant, tokens = KVQuantConfig.preset(preset), 32_768
    ids = torch.randint(0, 256, (1, tokens + 70), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        cache = TightCache(quant, model=model)
        for at in range(0, tokens, 512):
            model(ids[:, at : at + 512], past_key_values=cache, logits_to_keep=1)
        for at in range(tokens, tokens + 70):
            model(ids[:, at : at + 1], past_key_values=cache)
    peak = torch.cuda.max_memory_allocated() - before
    plan = config_plan(preset, read_model_shape(config), quant).total_bytes(tokens + 70)
    assert abs(peak - weights - plan) / plan < 0.05, (peak - weights, plan)
