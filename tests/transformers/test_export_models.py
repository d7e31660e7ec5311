"""Exported tiny models against the same models with a TightCache, token for token."""

from types import SimpleNamespace

import pytest
import torch

from elsewhere import run_elsewhere
from greedy import COUNT, greedy, with_tight_cache
from models import prompt, tiny
from tightkv.export import OperatorError, StaticKV, operator_library
from tightkv.integrations.transformers import TightCache, export
from tightkv.integrations.transformers.export import NAME, ExportableModel, ExportError
from tightkv.math.centers import Centers

try:
    operator_library()
except OperatorError as error:
    pytest.skip(str(error), allow_module_level=True)

# exact prefill, then pages of 64 tokens fill up and leave the ring
PROMPTS = ((100, 1), (7, 2))


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3"])
def test_an_exported_model_says_what_the_tight_cache_says(family):
    """Over 200 tokens of each prompt: the graph and the module bit for bit, TightCache by token.

    TightCache's first prefill is torch's own attention, which rounds otherwise in the last bits;
    exact tokens near the middle of two float16 numbers then differ by one of their steps.
    """
    model = tiny(family)
    static = ExportableModel(model, "k4v4", max_tokens=320)
    exported = ExportableModel(model, "k4v4", max_tokens=320).program().module()
    for count, seed in PROMPTS:
        ids = prompt(1, count, seed)
        tokens, logits = greedy(exported, ids, COUNT)
        eager_tokens, eager_logits = greedy(static, ids, COUNT)
        assert torch.equal(logits, eager_logits) and torch.equal(tokens, eager_tokens)
        tight_tokens, tight_logits = greedy(with_tight_cache(model, "k4v4"), ids, COUNT)
        torch.testing.assert_close(logits, tight_logits, atol=1e-3, rtol=1e-3)
        assert torch.equal(tokens, tight_tokens)
    assert model.config._attn_implementation == "tightkv" != NAME


def first_cache(model: ExportableModel) -> StaticKV:
    """The cache of its first layer."""
    cache = model.caches[0]
    assert isinstance(cache, StaticKV)
    return cache


def forced(model, preset, ids, tokens):
    """Logits of a TightCache that is fed these tokens."""
    cache = TightCache(preset, model)
    with torch.no_grad():
        logits = [model(ids, past_key_values=cache).logits[:, -1]]
        for token in tokens[0, :-1]:
            logits.append(model(token[None, None], past_key_values=cache).logits[:, -1])
    return torch.stack(logits, 1).float(), cache


@pytest.mark.sampled
@pytest.mark.parametrize("preset", ["k8v8", "k3v2"])
def test_other_presets_and_bf16(preset):
    """Nearer to a TightCache than that is to itself in float32; bf16 has ties, so by logits."""
    model = tiny("llama", torch.bfloat16)
    static = ExportableModel(model, preset, max_tokens=512)
    ids = prompt(1, 100)
    tokens, logits = greedy(static, ids, 150)
    expected, cache = forced(model, preset, ids, tokens)
    in_float32, _ = forced(model.float(), preset, ids, tokens)
    assert (logits.float() - expected).norm() < (expected - in_float32).norm()
    pages = first_cache(static).pages[0]
    assert torch.equal(pages[0], cache.layers[0].kv.pages[0])  # of the prefill
    assert pages.any(-1).any(-1).sum() == (100 + 149) // 64


@pytest.mark.parametrize("window_bits", [8, 16])
def test_pages_of_an_exported_model_are_those_of_the_tight_cache(window_bits):
    """Protected layers, error feedback and all: the bytes that TightCache stores."""
    model, quant = tiny("qwen2"), {"preset": "k3v2", "window_bits": window_bits}
    static = ExportableModel(model, quant, max_tokens=512)
    ids, cache = prompt(1, 300), TightCache(quant, model)
    with torch.no_grad():
        static(ids, torch.arange(300))
        model(ids, past_key_values=cache)
    cache.bytes_used()  # writes what is pending
    assert any(kv.feedback is not None for kv in static.caches)
    # queries and keys of deeper layers differ by the rounding of the first layer's attention
    sealed = len(cache.layers[0].kv.table.rows[0].pages)  # when they leave the window
    assert sealed == 2
    pages = first_cache(static).pages[0]
    assert torch.equal(pages[:sealed], cache.layers[0].kv.pages[:sealed])
    assert [x.layout.cfg for x in static.caches] == [x.kv.layout.cfg for x in cache.layers]


@pytest.mark.thorough
def test_rows_with_left_padding():
    model = tiny("gemma2")
    static = ExportableModel(model, "k4v4", max_tokens=320, batch=3)
    exported = static.program().module()
    pads = torch.tensor([0, 5, 70])
    ids = prompt(3, 90)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
    tokens, logits = greedy(lambda i, p: exported(i, p, pads), ids, COUNT)
    for row, pad in enumerate(pads.tolist()):
        # pages begin elsewhere without padding, so each row is compared in its own batch
        mask = torch.ones(1, 90 + COUNT, dtype=torch.int64)
        mask[:, :pad] = 0
        cache = TightCache("k4v4", model)

        def step(x, position, cache=cache, mask=mask, pad=pad):
            return model(
                x,
                past_key_values=cache,
                attention_mask=mask[:, : position[-1] + 1],
                position_ids=(position - pad).clamp_min(0)[None],
            ).logits

        alone, alone_logits = greedy(step, ids[row : row + 1], COUNT)
        torch.testing.assert_close(logits[row], alone_logits[0], atol=1e-3, rtol=1e-3)
        assert torch.equal(tokens[row], alone[0])


def test_a_sequence_can_be_taken_back():
    """As speculative decoding does: tokens that were refused are written over."""
    model = tiny("llama")
    static = ExportableModel(model, "k4v4", max_tokens=320, last_only=False)
    ids, wrong = prompt(1, 250), prompt(1, 10, seed=9)
    with torch.no_grad():
        for end in (100, 150, 201):
            static(ids[:, :end], torch.arange(end))
            before = first_cache(static).pages.clone()
            static(wrong, torch.arange(end, end + 10))
            new = static(ids[:, end : end + 5], torch.arange(end, end + 5))
            static(ids[:, :end], torch.arange(end))
            assert torch.equal(new, static(ids[:, end : end + 5], torch.arange(end, end + 5)))
            sealed = end // 64
            assert torch.equal(first_cache(static).pages[:, :sealed], before[:, :sealed])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt_oss", "a learned sink"),
        ("lfm2", "layer 0 of Lfm2ForCausalLM has no attention"),
        ("qwen3_next", "linear attention"),
        ("llama4", "chunked attention"),
        ("falcon_h1", "TightHybridLayer"),
    ],
)
def test_what_cannot_be_exported_is_refused(family, reason):
    model = tiny(family)
    with pytest.raises(ExportError, match=reason):
        ExportableModel(model, "k4v4", max_tokens=64)
    assert model.config._attn_implementation == "tightkv"


def test_windows_that_never_slide_take_no_more_than_the_cache():
    model, ids = tiny("gemma2", sliding_window=4096), prompt(1, 100)
    static = ExportableModel(model, "k4v4", max_tokens=128)
    assert first_cache(static).ring.shape[2] <= 128 + 2 * 32
    expected, _ = greedy(with_tight_cache(model, "k4v4"), ids, 10)
    assert torch.equal(greedy(static, ids, 10)[0], expected)


def test_a_graph_needs_room_for_two_tokens():
    with pytest.raises(ExportError, match="max_tokens=1; a graph needs room for 2"):
        ExportableModel(tiny(num_hidden_layers=1), "k4v4", max_tokens=1).program()
    ExportableModel(tiny(num_hidden_layers=1), "k4v4", max_tokens=2).program()


def test_layers_that_stay_exact_are_refused():
    with pytest.raises(ExportError, match="layer 1 keeps its cache in a DynamicLayer"):
        ExportableModel(tiny(), {"preset": "k4v4", "layer_bits": "1=k16v16"}, max_tokens=64)


@pytest.mark.thorough
def test_a_process_that_never_imports_tightkv(tmp_path):
    """As torch.export.save wrote it; what AOTInductor compiles: test_export_command."""
    model, ids = tiny("qwen2", num_hidden_layers=2), prompt(1, 100)
    path = tmp_path / "model.pt2"
    torch.export.save(ExportableModel(model, "k4v4", max_tokens=320).program(), path)
    expected, _ = greedy(with_tight_cache(model, "k4v4"), ids, COUNT)
    tokens, refusal = run_elsewhere(tmp_path, path, ids, "export")
    assert torch.equal(tokens, expected)
    assert "100 tokens from position 400 on; the cache has room for positions 0 to 319" in refusal


def test_a_decode_step_compiles_as_one_graph():
    model, ids = tiny("llama", num_hidden_layers=1), prompt(1, 60)
    static, other = (ExportableModel(model, "k4v4", max_tokens=320) for _ in range(2))
    step = torch.compile(other, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(static(ids, torch.arange(60)), other(ids, torch.arange(60)))
        for at in range(60, 80):  # a page is sealed on the way
            token, position = ids[:, at - 60 : at - 59], torch.tensor([at])
            assert torch.equal(step(token, position), static(token, position))
    assert torch.equal(first_cache(other).pages, first_cache(static).pages)
    assert first_cache(static).pages.any()


def test_layers_for_a_gpu(monkeypatch):
    """Their kernels are made for the window and the soft cap; float32 is refused."""
    cuda = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    model, made = tiny("gemma2"), []
    calls = export._calls(model, 4)
    layers = TightCache({"preset": "k4v4", "feedback": "off"}, model).layers
    monkeypatch.setattr(StaticKV, "__init__", lambda self, *_, **options: made.append(options))
    for layer in (0, 1):
        export._static_cache(layers[layer], calls[layer], cuda, 64, 1)
    assert [(x.get("window"), x["softcap"], x["query_heads"]) for x in made] == [
        (16, 50.0, 4),
        (None, 50.0, 4),
    ]
    cuda.dtype = torch.float32
    with pytest.raises(ExportError, match="GPUs have float16 and bfloat16: use --dtype"):
        export._static_cache(layers[1], calls[1], cuda, 64, 1)


def test_the_model_keeps_its_attention_and_shares_its_weights(monkeypatch):
    """A step asks nothing of the model that torch.compile could not trace."""
    model, ids = tiny("llama", num_hidden_layers=1), prompt(1, 5)
    exportable = ExportableModel(model, "k4v4", max_tokens=64)
    assert model.config._attn_implementation == "tightkv"
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert exportable.model.get_parameter(name) is tensor

    def change(self, *args, **kwargs):
        raise AssertionError("changed")

    monkeypatch.setattr(type(model), "set_attn_implementation", change)
    exportable(ids, torch.arange(5))


def test_centers_of_a_calibration_are_exported(monkeypatch):
    model, ids = tiny("llama", num_hidden_layers=2), prompt(1, 100)
    shape = (model.config.num_key_value_heads, model.config.head_dim)
    centers = {n: Centers(3 * torch.randn(shape), 3 * torch.randn(shape)) for n in range(2)}

    def with_centers(quant, model, **options):
        cache = TightCache(quant, model, **options)
        for number, layer in enumerate(cache.layers):
            layer.centers = centers[number]
        return cache

    monkeypatch.setattr(export, "TightCache", with_centers)
    exported = ExportableModel(model, "k4v4", max_tokens=320).program().module()
    cache = with_centers("k4v4", model)
    tokens, logits = greedy(exported, ids, 160)
    expected, tight = greedy(lambda x, at: model(x, past_key_values=cache).logits, ids, 160)
    torch.testing.assert_close(logits, tight, atol=5e-3, rtol=5e-3)  # of float16 numbers around 3
    assert torch.equal(tokens, expected)
    own = cache.layers[0].kv
    sealed = own.table.rows[0].pages  # when they leave the window
    assert len(sealed) == 2
    assert torch.equal(exported.get_buffer("caches.0.pages")[0, :2], own.pages[sealed])
