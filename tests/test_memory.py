import torch

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
