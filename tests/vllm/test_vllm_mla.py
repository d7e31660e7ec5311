"""Latent attention (MLA) in vLLM: prompts over stored tokens, and what is refused.

Engines with it run in test_vllm_engine.py.
"""

from __future__ import annotations

from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tightkv.config import KVQuantConfig
from tightkv.integrations.vllm.start.install import latent_obstacle, layout_of_layers
from tightkv.kernels import mla_reference
from tightkv.pages.latent import LatentLayout

pytestmark = pytest.mark.vllm

CFG = KVQuantConfig.preset("k4v4", page_size=32)
HEADS, RANK, ROPE, NOPE, VALUE = 4, 512, 64, 16, 24


class MLAAttention:
    """What is asked of vLLM's layer of this name."""

    def __init__(self, **changes: Any) -> None:
        dense = {"use_sparse": False, "indexer": None, "sliding_window": None}
        dims = {"kv_lora_rank": RANK, "qk_rope_head_dim": ROPE}
        other = {"non_causal_multi_token_decode": False, "is_amx_bmm_enabled": False}
        vars(self).update({**dense, **dims, **other, **changes})


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([MLAAttention(), MLAAttention()], None),
        ([MLAAttention(use_sparse=True)], "sparse latent attention"),
        ([MLAAttention(indexer=object())], "sparse latent attention"),
        ([MLAAttention(), object()], "beside layers of other kinds"),
        ([MLAAttention(sliding_window=128)], "in a sliding window"),
        ([MLAAttention(non_causal_multi_token_decode=True)], "see later tokens"),
        ([MLAAttention(is_amx_bmm_enabled=True)], "--attention-backend CPU_MLA"),
    ],
)
def test_latents_that_stay_with_vllm_are_named(layers: list[Any], reason: str | None) -> None:
    found = latent_obstacle({str(i): layer for i, layer in enumerate(layers)})
    assert found is None if reason is None else reason in str(found)


def test_stored_latents_are_found_whatever_the_window() -> None:
    """They have none. The digest is that of stores from when a window had 16 bits by default."""
    from tightkv.integrations.vllm.prefix.cache_format import _meaning

    found = set()
    for bits in (8, 16):
        layout = LatentLayout(CFG.replace(window_bits=bits), RANK, ROPE)
        found.add(_meaning(3, SimpleNamespace(layout=layout)))
    fingerprint = CFG.replace(window_bits=16).fingerprint()
    assert found == {("latent", 3, fingerprint, RANK, ROPE, "torch.bfloat16")}


def test_layers_of_versions_without_latent_pages_are_asked_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of vLLM 0.26 have no sliding_window and no non_causal_multi_token_decode."""
    spec = make_dataclass("MLAAttentionSpec", ["block_size"])
    monkeypatch.setattr("vllm.v1.kv_cache_interface.MLAAttentionSpec", spec)
    old = object.__new__(MLAAttention)
    assert latent_obstacle({"0": old}) == "latent attention (MLA) before vLLM 0.29"


def latent_attention(cfg: KVQuantConfig, kernels: Any) -> Any:
    from tightkv.integrations.vllm.latent.mla import TightLatentAttention

    layout = LatentLayout(cfg, RANK, ROPE, torch.float32)
    old = SimpleNamespace(num_heads=HEADS, scale=1.0)
    impl = object.__new__(TightLatentAttention)
    impl.__init__(SimpleNamespace(impl=old), layout, kernels)
    return impl


@pytest.mark.parametrize("check", [True, False])
def test_appends_that_wait_for_the_device_are_in_no_cuda_graph(check: bool) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    from tightkv.integrations.vllm.latent.mla import TightLatentBuilder

    impl = latent_attention(CFG.replace(check_finite=check), mla_reference)
    layers = {"0": SimpleNamespace(impl=impl), "experts": object()}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    expected = AttentionCGSupport.NEVER if check else AttentionCGSupport.UNIFORM_BATCH
    assert TightLatentBuilder.get_cudagraph_support(config, None) == expected


def test_kernels_are_compiled_once_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from tightkv.integrations.vllm.latent import mla
    from tightkv.integrations.vllm.step import warm_up

    monkeypatch.setattr(warm_up, "_WARM", set())
    launched = []
    kernels = SimpleNamespace(
        append=lambda codec, pages, *_: launched.append(pages.device.type),
        gather=lambda *_: None,
        decode=lambda *_: None,
    )
    for device in ("cpu", "meta", "cpu"):
        mla.warm_up_once(latent_attention(CFG, kernels), torch.device(device))
    assert launched == ["cpu"] * 2 + ["meta"] * 2


@pytest.mark.parametrize(
    ("options", "dims", "words"),
    [
        ({"layer_bits": "0=k3v3"}, {}, "leave layer_bits out"),
        ({"protected_first": 1}, {}, "set protected_first and protected_last to 0"),
        ({"calibration": "some.json"}, {}, "calibration='some.json'.*leave it out"),
        ({}, {"kv_lora_rank": 256}, r"\(256, 64\), \(512, 64\)"),
        ({}, {"qk_rope_head_dim": 0}, "one size"),
    ],
)
def test_options_that_latents_do_not_have_are_refused(
    options: dict[str, Any], dims: dict[str, int], words: str
) -> None:
    layers = {"0": MLAAttention(), "1": MLAAttention(**dims)}
    with pytest.raises(ValueError, match=words):
        layout_of_layers(CFG.replace(**options), layers, torch.bfloat16)


def test_prompts_attend_to_stored_tokens_a_workspace_at_a_time() -> None:
    """Three sequences, one without stored tokens; the longest takes three workspaces."""
    from vllm.model_executor.layers.attention.mla_attention import (
        build_mla_chunked_context_metadata,
    )
    from vllm.v1.attention.backends.mla.prefill.cpu_sdpa import CPUSDPAMLAPrefillBackend

    from tightkv.integrations.vllm.latent.mla import TightLatentAttention

    torch.manual_seed(0)
    stored, scale = [70, 0, 200], 0.1
    layout = LatentLayout(CFG, RANK, ROPE, torch.float32)
    weight = torch.randn(HEADS * (NOPE + VALUE), RANK) / RANK**0.5
    dims = {"num_heads": HEADS, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    impl = object.__new__(TightLatentAttention)
    project = Projection(weight)
    old = SimpleNamespace(**dims, kv_b_proj=project, _use_flashinfer_concat_mla_k=False)
    impl.__init__(SimpleNamespace(impl=old), layout, mla_reference)

    table = torch.randperm(24).reshape(3, 8).int()
    cache = torch.full((24, 1, layout.page_bytes), 0xFF, dtype=torch.uint8)
    latents, ropes = [], []
    for row, count in enumerate(stored):
        at = torch.arange(count)
        slots = table[row, at // 32].long() * 32 + at % 32
        latents.append(torch.randn(count, RANK))
        ropes.append(torch.randn(count, 1, ROPE))
        impl.do_kv_cache_update(latents[-1], ropes[-1], cache, slots, "auto", torch.ones(1))

    backend = CPUSDPAMLAPrefillBackend(
        **dims, scale=scale, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, vllm_config=None
    )
    starts = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    context = build_mla_chunked_context_metadata(
        context_lens_cpu=torch.tensor(stored),
        prefill_query_start_loc_cpu=starts,
        chunked_prefill_workspace=torch.full((96, RANK + ROPE), torch.nan),
        chunked_prefill_workspace_size=96,
        block_size=32,
        align_chunk_to_block=True,
        device=torch.device("cpu"),
        dcp_world_size=1,
        dcp_local_block_size=1,
        dcp_virtual_block_size=1,
    )
    assert context is not None and len(context.chunks) > 2
    prefill = SimpleNamespace(chunked_context=context, block_table=table, prefill_backend=backend)
    q = torch.randn(9, HEADS, NOPE + ROPE)
    out, lse = impl._compute_prefill_context(q, cache, SimpleNamespace(prefill=prefill), None)

    assert torch.isneginf(lse[:, 3:5]).all() and (out[3:5] == 0).all()
    for row, part in ((0, slice(0, 3)), (2, slice(5, 9))):
        codes = impl.codec.encode(latents[row])
        heads = project(impl.codec.decode(*codes))[0].unflatten(-1, (HEADS, -1))
        key, value = heads.split([NOPE, VALUE], -1)
        key = torch.cat([key, ropes[row].expand(-1, HEADS, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", q[part], key) * scale
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)
        torch.testing.assert_close(out[part], expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(lse[:, part], scores.logsumexp(-1), atol=1e-5, rtol=1e-5)


class Projection:
    """vLLM's kv_b_proj."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x @ self.weight.T, None
