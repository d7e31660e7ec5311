"""The peak of a long prefill and decoding on a GPU: `python gpu_peak.py PRESET`.

Prints JSON: the peak of bytes beyond the weights, as the allocator sees them, what is left in the
end, those of the plan, and those of one layer's pages. A program, because other tests free and
allocate memory of the process that they share.
"""

import json
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightkv import KVQuantConfig, TightCache
from tightkv.model_shape import read_model_shape
from tightkv.model_shape.planner import config_plan

TOKENS, DECODED, CHUNK = 32_768, 70, 512


def main(preset: str) -> None:
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=32, num_attention_heads=8,
        num_key_value_heads=8, head_dim=64, vocab_size=256, max_position_embeddings=40_000,
        attn_implementation="tightkv",
    )  # fmt: skip
    ones = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    ones @ ones  # cuBLAS takes its workspace now
    before = torch.cuda.memory_allocated()
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    weights = torch.cuda.memory_allocated() - before
    quant = KVQuantConfig.preset(preset)
    ids = torch.randint(0, 256, (1, TOKENS + DECODED), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        cache = TightCache(quant, model=model)
        for at in range(0, TOKENS, CHUNK):
            model(ids[:, at : at + CHUNK], past_key_values=cache, logits_to_keep=1)
        for at in range(TOKENS, TOKENS + DECODED):
            model(ids[:, at : at + 1], past_key_values=cache)
    peak = torch.cuda.max_memory_allocated() - before
    left = torch.cuda.memory_allocated() - before - ids.nbytes
    # What sealing knows of the queries belongs to the model, like its weights.
    weights += sum(layer.kv.feedback.nbytes for layer in cache.tight_layers)
    plan = config_plan(preset, read_model_shape(config), quant).total_bytes(TOKENS + DECODED)
    layer = cache.tight_layers[0].kv.pages.nbytes
    json.dump([peak - weights, left - weights, plan, layer], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
