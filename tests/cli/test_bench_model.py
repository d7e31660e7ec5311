"""The random model decodes alike over both caches; the compressed one is as small as it says."""

import pytest
import torch

from tightkv.config import KVQuantConfig
from tightkv.tools.bench.model import ModelShape, PlainCache, RandomModel, TightModelCache
from tightkv.tools.cli.bench.command import _size

TINY = ModelShape(
    layers=2, hidden=64, intermediate=96, query_heads=4, kv_heads=2, head_dim=64, vocabulary=50
)
CPU = torch.device("cpu")


def test_both_caches_give_the_same_logits():
    torch.manual_seed(0)
    model = RandomModel(TINY, CPU, torch.float32)
    cfg = KVQuantConfig.preset("k8v8")
    tight = TightModelCache(cfg, TINY, 2, 330, CPU, "reference", torch.float32)
    plain = PlainCache(TINY, 2, 330, CPU)
    plain.data = plain.data.float()
    from tightkv.kernels.reference import materialize

    for layer, at in enumerate(tight.layers):  # what the compressed cache holds
        for side, x in enumerate(materialize(at.codec, at.view)):
            plain.data[layer, side] = x.transpose(1, 2)
    ids, position = torch.tensor([3, 7]), torch.tensor([329, 329])
    expected = model.step(ids, position, plain)
    torch.testing.assert_close(model.step(ids, position, tight), expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(model.step(ids + 1, position, tight), expected, atol=1e-2)


def test_bytes_are_those_of_the_tensors():
    cfg = KVQuantConfig.preset("k4v4")
    cache = TightModelCache(cfg, TINY, 3, 500, CPU, "reference")
    layout = cache.layers[0].codec.layout
    pages = 3 * (500 // 64 + 2)
    exact = 3 * (layout.ring_tokens + cfg.sinks) * layout.exact_bytes_per_token
    assert cache.bytes == 2 * (pages * (layout.page_bytes + 4) + exact)
    assert PlainCache(TINY, 3, 500, CPU).bytes == 3 * 500 * TINY.bf16_bytes_per_token


def test_sizes():
    assert _size("8x32768") == (8, 32768)
    for text in ("8", "x8", "0x99", "8x64", "ax100"):
        with pytest.raises(ValueError, match="sequences x context"):
            _size(text)
