"""Sequences that begin with cached blocks, vLLM's own or a store's: as exact as others, not mixed.

Continuations are forced (vllm_engine.py), so that engines say how probable the same text is.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from centers_file import write_centers
from models import MAMBA, SHAPE
from tightkv import KVQuantConfig
from tightkv.config.quant import FORMAT_VERSION
from tightkv.pages.layout import PageLayout
from tiny_folder import write_adapter, write_model, write_tiny_folder
from vllm_outputs import (
    TIE,
    VOCABULARY,
    Engines,
    assert_same_text,
    batches,
    mean_kl,
    outputs,
    random_tokens,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

PAGE, WINDOW = 32, 3
K4V4 = {"preset": "k4v4", "page_size": PAGE, "exact_pages": WINDOW}
K8V8 = {"preset": "k8v8", "page_size": PAGE, "exact_pages": 1}
RAW = {"key_bits": 16, "value_bits": 16, "page_size": PAGE, "exact_pages": 2}
BRANCHES = 24
CENTERS = "centers.safetensors"


def tokens(seed: int, count: int) -> list[int]:
    return random_tokens(random.Random(seed), count)


# A chat: the second turn is everything that was said before, and a question.
CHATS = [tokens(seed, 300) for seed in range(8)]
FIRST, SAID, ASKED = 200, 238, 248
# An agent: many branches of one long prompt.
SYSTEM = tokens(100, 230)
REUSED = 128  # of their prompts: whole pages, but the window of the last token
LOOP = [SYSTEM + tokens(200 + seed, 60) for seed in range(BRANCHES)]
EVICTING = [tokens(600 + seed, 400) for seed in range(10)]
OTHERS = [tokens(300 + seed, 40) for seed in range(16)]
# Prompts that come back, and one that comes back with two more questions.
RETURNING = [tokens(800 + count, count) for count in (120, 256, 300, 390)]
LONGER = [tokens(900, 300) + tokens(901 + count, count) for count in (40, 150)]
# Models with other layers too: bytes of their cache, and prompt tokens that are then loaded.
OFFLOADED = {
    # Blocks of two pages, which hold one state. States are kept before exact windows.
    "states": (3 << 20, RAW, [64, 192, 256, 320, 256, 256]),
    # Blocks of two pages, and windows in blocks of half as many tokens.
    "windows": (1 << 20, RAW, [64, 192, 256, 320, 256, 256]),
    "sliding": (800 << 10, {**RAW, "sliding_windows": 48}, [64, 192, 256, 352, 288, 288]),
}


def job(
    options: dict[str, Any] | None, *steps: tuple[list[list[int]], int, int], **engine: Any
) -> dict[str, Any]:
    """Steps are (texts, prompt, end): tokens up to `prompt` are given, those up to `end` forced."""
    shared = {"model": "tiny", "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 32}
    if options is not None:
        shared["additional_config"] = {"tightkv": options}
    return {
        "engine": {**shared, **engine},
        "batches": [[text[:prompt] for text in texts] for texts, prompt, _ in steps],
        "forced": [[text[prompt:end] for text in texts] for texts, prompt, end in steps],
        "sampling": {"logprobs": VOCABULARY, "ignore_eos": True},
    }


def connector(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "FileConnector",
        "kv_connector_module_path": "file_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"folder": str(folder)},
    }


# vLLM's own connector, with memory for all prefixes.
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 16 << 20,
        "spec_name": "HostSpec",
        "spec_module_path": "host_offload",
    },
}


# Another engine's pages, or none where they are of another format.
NIXL = {
    "kv_connector": "TightNixlConnector",
    "kv_connector_module_path": "tightkv.integrations.vllm.connectors.nixl",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
}


OTHER_ROPE = {"rope_type": "default", "rope_theta": 500.0}


def with_engine(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**job, "engine": {**job["engine"], **more}}


def store_job(
    options: dict[str, Any], folder: Path, model: str = "tiny", **job_options: Any
) -> dict[str, Any]:
    few = [tokens(400 + seed, count) for seed, count in enumerate((33, 64, 130, 200, 300))]
    return {
        "engine": {
            "model": model,
            "kv_cache_memory_bytes": 512 << 10,  # too little for both batches
            "kv_transfer_config": connector(folder),
            "additional_config": {"tightkv": options},
        },
        "batches": [few, [tokens(500 + seed, 400) for seed in range(4)], few],
        "sampling": {"max_tokens": 16, "ignore_eos": True},
        **job_options,
    }


def tenants_job(folder: Path) -> dict[str, Any]:
    """The same prompts of several tenants; all of them come back."""
    adapters = [{"adapter": str(write_adapter(folder / name, i))} for i, name in enumerate("ab")]
    tenants = [{}, *adapters, {"salt": "secret"}, {**adapters[0], "salt": "secret"}]
    prompts = [tokens(700 + seed, count) for seed, count in enumerate((70, 130, 200))]
    return {
        "engine": {
            "model": "tiny",
            "kv_cache_memory_bytes": 4 << 20,
            "enable_lora": True,
            "max_loras": 2,
            "max_lora_rank": 8,
            "additional_config": {"tightkv": K8V8},
        },
        "batches": [prompts] * 2 * len(tenants),
        "tenants": tenants * 2,
        "sampling": {"max_tokens": 16, "ignore_eos": True},
    }


def offload_job(name: str) -> dict[str, Any]:
    """Prompts that return when their blocks are with others, and the last two without a store."""
    memory, options, _ = OFFLOADED[name]
    return {
        "engine": {
            "model": "windows" if name == "sliding" else name,
            "kv_cache_memory_bytes": memory,
            "kv_transfer_config": OFFLOADING,
            "additional_config": {"tightkv": options},
            "max_num_seqs": 1 if name == "states" else 4,  # the CPU engine mixes up several states
        },
        "batches": [
            *([*RETURNING, LONGER[0][:300]], EVICTING[:6], [*RETURNING, *LONGER]),
            *([text] for text in LONGER),
        ],
        "tenants": [{}, {}, {}, {"salt": "a"}, {"salt": "b"}],
        "sampling": {"max_tokens": 12, "ignore_eos": True},
        "no_checkpoints": True,
    }


def write_other_weights(model: Path, folder: Path) -> Path:
    """A model of the same shape, as after training. vLLM's CPU engine keeps its norms, but packs
    its matrices."""
    copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    trained = {name: 1.05 * tensor for name, tensor in tensors.items()}
    save_file(trained, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def new_weights(job: dict[str, Any]) -> dict[str, Any]:
    """The job, and once more after a change of weights that empties the store."""
    batches = job["batches"]
    return {**job, "batches": [*batches, *batches], "new_weights_before": len(batches)}


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    chat = (CHATS, ASKED, 288)
    loop = (LOOP, 240, 272)
    fresh = {"enable_prefix_caching": False}
    # As a prefix is computed: it is read from codes by what follows.
    chunks = {**fresh, "long_prefill_token_threshold": REUSED}
    store = folder / "store"
    store.mkdir()
    few = (LOOP[:2], 240, 272)
    offloaded = job(
        *(K4V4, ([SYSTEM], 229, 230), (EVICTING, 399, 400), loop),
        kv_cache_memory_bytes=256 << 10,  # of each rank
        kv_transfer_config=OFFLOADING,
        tensor_parallel_size=2,
    )
    handed, source = str(folder / "handed_over.json"), job(K4V4, loop, few, kv_transfer_config=NIXL)
    del source["forced"]
    return {
        "plain chat": job(None, chat, **fresh),
        "fresh chat": job(K4V4, chat, **chunks),
        # Between the turns others take all rings.
        "chat": job({**K4V4, "exact_rows": 8}, (CHATS, FIRST, SAID), (OTHERS, 39, 40), chat),
        "plain loop": job(None, loop, **fresh),
        "fresh loop": job(K4V4, loop, **chunks),
        "loop": job(K4V4, ([SYSTEM], 229, 230), loop),
        "few rings": job({**K4V4, "exact_rows": 8}, ([SYSTEM], 229, 230), loop),
        # As above, and tokens are stored relative to centers far from them.
        "centered chat": job(
            {**K8V8, "calibration": str(folder / CENTERS)},
            *((CHATS, FIRST, SAID), chat),
        ),
        "offload loop": {**offloaded, "fork_ranks": True},
        **{f"offload {name}": offload_job(name) for name in OFFLOADED},
        "nixl source": {**source, "hands_over": handed},
        "nixl loop": {**job(K4V4, loop, kv_transfer_config=NIXL), "taken_over": (handed, 0)},
        "nixl loop of another seed": {
            **job({**K4V4, "seed": 1}, few, kv_transfer_config=NIXL),
            "taken_over": (handed, 1),
        },
        "tenants": tenants_job(folder),
        "store": store_job(K8V8, store),
        "store again": store_job(K8V8, store),
        "store of another seed": store_job({**K8V8, "seed": 1}, store),
        "store of other weights": store_job(K8V8, store, model="other weights"),
        "store of other positions": with_engine(
            store_job(K8V8, store), hf_overrides={"rope_parameters": OTHER_ROPE}
        ),
        "store of another version": new_weights(
            store_job(K8V8, store, format_version=FORMAT_VERSION + 1)
        ),
        "refused": job(
            K4V4, kv_transfer_config={"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
        ),
    }


def write_hybrids(folder: Path) -> dict[str, Path]:
    shape = {**SHAPE, "head_dim": 32, "vocab_size": VOCABULARY}
    states = {**MAMBA, "mamba_d_state": 64, "mamba_chunk_size": PAGE}
    configs = {
        "states": hf.FalconH1Config(**shape, **states),
        "windows": hf.Gemma2Config(**shape, sliding_window=48),
    }
    return {name: write_model(folder / name, config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("vllm_prefixes")
    model = write_tiny_folder(folder / "tiny", max_position_embeddings=1024)
    write_centers(model, folder / CENTERS)
    models = {"tiny": model, **write_hybrids(folder)}
    models["other weights"] = write_other_weights(model, folder / "other_weights")
    return Engines(jobs(folder), models, folder)


def last(result: dict[str, Any]) -> dict[str, Any]:
    return batches(result)[-1]


def cached(result: dict[str, Any]) -> list[int]:
    return [output["cached"] for output in last(result)["outputs"][0]]


@pytest.mark.parametrize("newest", range(0, 5 * PAGE, 7))
def test_a_cached_prefix_ends_before_the_exact_window(newest: int) -> None:
    from tightkv.integrations.vllm.prefix.cache_format import CacheFormat

    found = CacheFormat("abc", "k4v4", PAGE, WINDOW, PAGE, 8, 1000.0, 3700, ("cpu",))
    taken = found.reusable_tokens(newest)
    assert taken % PAGE == 0 and taken <= newest
    assert taken == max(0, newest // PAGE * PAGE - (WINDOW - 1) * PAGE)


class Store:
    """A connector that has prefixes which end at some tokens; answers may come a step later."""

    def __init__(self, ends: Iterable[int], defers: bool, ignores_length: bool = False) -> None:
        self.ends, self.defers, self.ignores_length = list(ends), defers, ignores_length
        self.looked_up: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int | None, bool]:
        most = max(self.ends) if self.ignores_length else request.num_tokens - 1
        if self.defers and request.request_id not in self.looked_up:
            self.looked_up[request.request_id] = most
            return None, False
        most = self.looked_up.pop(request.request_id, most)
        self.found = max((end for end in self.ends if end <= most), default=0)
        return max(0, self.found - computed), True


PAGES = range(PAGE, 400, PAGE)


@pytest.mark.parametrize("defers", [False, True])
@pytest.mark.parametrize(
    ("count", "sizes", "stored", "local", "end"),
    [
        (400, (32,), PAGES, 0, 352),
        (400, (32,), PAGES, 64, 352),
        (400, (96, 96), PAGES, 0, 288),
        (400, (96, 96), (96, 192, 384), 0, 384),  # a state in the window, and none near it
        (400, (32, 32), (96, 384), 320, 320),  # too little more than what is cached
        (400, (96, 96), (288, 384), 384, 384),
        (400, (96, 96), (64, 90), 0, 0),
        (400, (64, 32), (64, 224), 0, 64),  # a window that ends inside of another block
    ],
)
def test_what_is_loaded_was_looked_up(
    count: int, sizes: tuple[int, ...], stored: Iterable[int], local: int, end: int, defers: bool
) -> None:
    store = Store(stored, defers)
    assert load_of(store, count, sizes, local) == max(0, end - local)
    assert store.found == end or local == end


def test_loads_of_connectors_that_ignore_the_length() -> None:
    assert load_of(Store(PAGES, False, True), 400, (32,), 64) == 352 - 64
    assert load_of(Store((96, 288), False, True), 310, (96, 96), 0) == 288
    assert load_of(Store((96, 384), False, True), 310, (96, 96), 0) == 0


def test_full_pages_are_not_written_again() -> None:
    """Without exact windows, and where the last token ends a page."""
    assert load_of(Store(PAGES, False), 384, (32,), 0, rows=0) == 352
    assert load_of(Store(PAGES, False), 385, (32,), 0, rows=0) == 384


def test_a_window_of_tokens_is_computed_again_whole() -> None:
    """A hit ends with a page, before the window of the newest token."""
    from tightkv.integrations.vllm.prefix.cache_format import CacheFormat

    for newest in range(5 * PAGE):
        whole, single = (
            CacheFormat("abc", "k4v4", PAGE, 2, step, 8, 1000.0, 3700, ("cpu",))
            for step in (PAGE, 1)
        )
        assert whole.reusable_tokens(newest) == max(0, newest // PAGE - 1) * PAGE
        taken = single.reusable_tokens(newest)
        assert taken == max(0, newest + 1 - 2 * PAGE) // PAGE * PAGE


@pytest.mark.parametrize("stages", [1, 2])
def test_prefixes_end_before_the_window_of_every_layer(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of 16 bits have windows of pages beside those of 8 bits, which begin earlier."""
    from tightkv.integrations.vllm.prefix import cache_format
    from tightkv.pages.layout import page_layout

    cfg = KVQuantConfig(page_size=PAGE, exact_pages=2, window_bits=8)
    plain = cfg.replace(key_bits=16, value_bits=16, window_bits=16)
    impls = {
        f"layers.{number}.attn": SimpleNamespace(
            layout=page_layout(own, 1, 64, torch.float16),
            limits=SimpleNamespace(rows=8),
            kernels=SimpleNamespace(NAME="cpu"),
            centers=None,
            key_scale=None,
            packed_pages=0,
        )
        for number, own in enumerate((plain, cfg))
    }
    monkeypatch.setattr(cache_format, "_impls", lambda names: {n: impls[n] for n in names})
    names = list(impls)
    ranks: list[Any] = [names] if stages == 1 else [[name] for name in names]
    found = cache_format.joined([cache_format.format_of(rank) for rank in ranks])
    assert found is not None
    assert found.reusable_tokens(4 * PAGE) == 2 * PAGE
    assert found.reusable_tokens(4 * PAGE - 2) == PAGE


def load_of(store: Store, count: int, sizes: tuple[int, ...], local: int, rows: int = 8) -> int:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from tightkv.integrations.vllm.prefix.cache_format import CacheFormat
    from tightkv.integrations.vllm.prefix.prefix_hits import HitEnds, bound_loads

    managers = [SimpleNamespace(block_size=size) for size in sizes]
    found = CacheFormat("abc", "k4v4", PAGE, 2, PAGE, rows, 1000.0, 3700, ("cpu",))
    ends = HitEnds(found, SimpleNamespace(single_type_managers=managers))
    bound_loads(SimpleNamespace(connector=store), ends)
    request = Request("a", [5] * count, SamplingParams(max_tokens=1), None)
    answers = (store.get_num_new_matched_tokens(request, local) for _ in range(20))
    loaded, is_async = next(answer for answer in answers if answer[0] is not None)
    assert type(request) is Request and request.num_tokens == request.num_prompt_tokens == count
    assert loaded is not None and is_async == (loaded > 0)
    return loaded


@pytest.mark.parametrize(
    "kind", [pytest.param("chat", marks=pytest.mark.thorough), "loop", "offload loop"]
)
def test_continuations_of_cached_prefixes_are_as_exact_as_fresh_ones(
    engines: dict[str, Any], kind: str
) -> None:
    text = kind.removeprefix("offload ")
    plain, fresh = last(engines[f"plain {text}"]), last(engines[f"fresh {text}"])
    assert set(cached(engines[kind])) == {REUSED}
    hit, alone = (mean_kl(plain, x, "best") for x in (last(engines[kind]), fresh))
    assert 0 < hit < 1.1 * alone, (hit, alone)


def test_tokens_relative_to_centers_say_the_same(engines: dict[str, Any]) -> None:
    """In prompts, while decoding and after a hit."""
    assert min(cached(engines["centered chat"])) > 0
    assert 0 < mean_kl(last(engines["plain chat"]), last(engines["centered chat"]), "best") < 1e-3


def test_tenants_share_neither_blocks_nor_exact_tokens(engines: dict[str, Any]) -> None:
    """A tenant is an adapter, a cache salt or both; hits read codes, a ring and saved sinks."""
    told = batches(engines["tenants"])
    begun, again = told[: len(told) // 2], told[len(told) // 2 :]
    for first, second in zip(begun, again, strict=True):
        assert {text["cached"] for text in first["outputs"][0]} == {0}
        assert [text["cached"] for text in second["outputs"][0]] == [32, 96, 160]
        assert_same_text(first, second, tie=0.05, share=0.6)
    base, a, b, salted, a_salted = (
        [text["tokens"] for text in first["outputs"][0]] for first in begun
    )
    assert base == salted and a == a_salted
    assert all(x != y and y != z and z != x for x, y, z in zip(base, a, b, strict=True))


def test_blocks_go_out_and_come_back(engines: dict[str, Any]) -> None:
    told = engines["store"]
    first, _, again = batches(told)
    assert max(cached(engines["store"])) == 256
    assert told["metrics"]["vllm:external_prefix_cache_hits"] > 200
    assert_same_text(first, again, tie=0.05, share=0.6)


def test_another_engine_reads_what_one_of_the_same_format_stored(engines: dict[str, Any]) -> None:
    begun, *_ = batches(engines["store again"])
    assert [text["cached"] for text in begun["outputs"][0]] == [0, 32, 96, 160, 256]
    assert_same_text(batches(engines["store"])[0], begun, tie=0.05, share=0.6)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("another seed", marks=pytest.mark.thorough),
        "other weights",
        pytest.param("other positions", marks=pytest.mark.thorough),
        "another version",
    ],
)
def test_a_store_of_another_format_or_model_is_missed(engines: Engines, other: str) -> None:
    """Pages of another seed have the same bytes in number and mean other numbers."""
    assert "error" not in engines["store"] and list((engines.folder / "store").glob("*.pt"))
    begun, _, again, *_ = batches(engines[f"store of {other}"])
    assert {text["cached"] for text in begun["outputs"][0]} == {0}
    assert {text["cached"] for text in again["outputs"][0]} == {0, 32, 96, 160, 256}  # its own
    assert_same_text(begun, again, tie=0.05, share=0.6)


class Worker:
    """One whose model has a fused projection and a rotary table, as vLLM's have."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.model = torch.nn.Module()
        for name, shape in {"qkv": (4 * 64, 48), "bias": (4 * 64,), "w13": (3, 40, 24)}.items():
            value = torch.nn.Parameter(torch.randn(shape, generator=draw), requires_grad=False)
            self.model.register_parameter(name, value)
        self.model.register_buffer("cos_sin_cache", torch.randn(512, 32, generator=draw))
        self.model.register_buffer("scratch", torch.empty(16))

    def get_model(self) -> torch.nn.Module:
        return self.model


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("qkv", slice(0, 128)),
        ("qkv", slice(128, 192)),
        ("qkv", slice(192, 256)),  # the values' part alone, as a merged adapter may change
        ("bias", slice(192, 256)),
        ("w13", (slice(None), slice(20, 40))),
        ("cos_sin_cache", slice(1, None)),  # other positions
    ],
)
def test_a_part_of_the_weights_changes_their_mark(name: str, part: Any) -> None:
    from tightkv.integrations.vllm.prefix.cache_format import weights_mark

    worker, same = Worker(), Worker()
    same.model.scratch.fill_(7)  # type: ignore[operator]
    assert weights_mark(worker) == weights_mark(same)
    dict(same.model.state_dict())[name][part] += 1
    assert weights_mark(worker) != weights_mark(same)


def test_sinks_of_old_weights_are_not_found_again(engines: dict[str, Any]) -> None:
    old, _, _, new, _, again = batches(engines["store of another version"])
    assert {text["cached"] for text in new["outputs"][0]} == {0}
    assert {text["cached"] for text in again["outputs"][0]} == {0, 32, 96, 160, 256}
    changed = zip(old["outputs"][0], new["outputs"][0], strict=True)
    assert all(a["tokens"] != b["tokens"] for a, b in changed)
    assert_same_text(new, again, tie=0.05, share=0.6)


def test_a_loaded_prefix_is_as_exact_as_a_cached_one(engines: dict[str, Any]) -> None:
    """With rings, and with the sinks of a sequence that ended before its blocks were evicted.

    The workers are other processes than the scheduler, which tells them what is loaded.
    """
    assert engines["store"]["tightkv"]["exact_rings"] == 8
    assert engines["offload loop"]["metrics"]["vllm:external_prefix_cache_hits"] >= REUSED
    plain = last(engines["plain loop"])
    loaded, hit = (mean_kl(plain, last(engines[name]), "best") for name in ("offload loop", "loop"))
    assert loaded == pytest.approx(hit, rel=0.01)  # without sinks: 3% more


@pytest.mark.parametrize(
    "name",
    ["states", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("windows", "sliding"))],
)
def test_loads_end_where_all_layers_can_go_on(engines: dict[str, Any], name: str) -> None:
    """With states, vLLM's own windows and compressed ones."""
    told, expected = engines[f"offload {name}"], OFFLOADED[name][2]
    first, _, again, *fresh = (outputs(batch) for batch in batches(told))
    assert [text["cached"] for text in again] == expected
    computed = {"outputs": [first[:-1], *fresh]}
    assert {text["cached"] for text in outputs(computed)} == {0}
    assert_same_text(computed, {"outputs": [again]})
    for one, two in zip(outputs(computed), again, strict=True):
        for a, b in zip(one["best"], two["best"], strict=True):
            assert a[0][1] == pytest.approx(b[0][1], abs=TIE)
    hits = told["metrics"]
    found = hits["vllm:external_prefix_cache_hits"] + hits["vllm:prefix_cache_hits"]
    assert found == sum(expected)
    assert told["tightkv"]["prefix_hits_without_state_total"] == 0


def test_pages_of_another_engine_are_read(engines: dict[str, Any]) -> None:
    """All before the exact windows. Only their sinks are less exact: they are read from codes."""
    read = engines["nixl loop"]
    assert read["metrics"]["vllm:external_prefix_cache_hits"] == BRANCHES * REUSED
    plain, fresh = last(engines["plain loop"]), last(engines["fresh loop"])
    hit, alone = (mean_kl(plain, x, "best") for x in (last(read), fresh))
    assert 0 < hit < 1.2 * alone, (hit, alone)


@pytest.mark.thorough
def test_pages_of_another_engine_and_seed_are_not_read(engines: dict[str, Any]) -> None:
    """The handshake fails, and prompts are computed where they are continued."""
    [plain], [fresh] = (engines[name]["outputs"] for name in ("plain loop", "fresh loop"))
    told = engines["nixl loop of another seed"]
    assert "NIXL compatibility hash mismatch" in told["log"]
    computed = last(told)
    count = len(computed["outputs"][0])
    few, alone = ({"outputs": [outputs[:count]]} for outputs in (plain, fresh))
    assert 0 < mean_kl(few, computed, "best") < 1.5 * mean_kl(few, alone, "best")


def test_connectors_that_cannot_move_pages_are_refused_at_start(engines: dict[str, Any]) -> None:
    line = "tightkv with the KV connector ExampleConnector: it copies single tokens"
    assert line in engines["refused"]["error"]


def transfer(name: str, module: str | None = None, **options: Any) -> dict[str, Any]:
    found = {"kv_connector": name, "kv_connector_module_path": module}
    return {**found, "kv_connector_extra_config": options}


def of_several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return transfer("MultiConnector", connectors=connectors)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (transfer("LMCacheConnectorV1"), "copies keys and values of single tokens"),
        (transfer("LMCacheMPConnector"), "finds blocks by token ids"),
        (transfer("LMCacheMPConnector", "lmcache.integration.vllm"), "finds blocks by token ids"),
        (transfer("NixlConnector"), "use TightNixlConnector"),
        (transfer("NixlPushConnector"), "from the end of a prompt"),
        (transfer("MooncakeConnector"), "compares neither presets"),
        (transfer("ExampleConnector", "vllm.anywhere"), "single tokens"),
        (of_several(transfer("OffloadingConnector"), transfer("NixlConnector")), "use TightNixl"),
    ],
)
def test_connectors_are_refused_by_name(given: dict[str, Any], why: str) -> None:
    from tightkv.integrations.vllm.connectors.connector_checks import check_connectors

    with pytest.raises(ValueError, match=why):
        check_connectors(SimpleNamespace(**given))


def test_connectors_that_separate_formats_are_not_refused() -> None:
    from tightkv.integrations.vllm.connectors.connector_checks import check_connectors

    ours = transfer(NIXL["kv_connector"], NIXL["kv_connector_module_path"])
    for given in (ours, transfer("OffloadingConnector"), of_several(ours, transfer("Own", "own"))):
        check_connectors(SimpleNamespace(**given))
    check_connectors(None)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tightkv": False}, "an engine without tightkv"),
        ({"extra": {"enforce_handshake_compat": False}}, "enforce_handshake_compat=false"),
        ({"device": "cuda"}, "kv_buffer_device='cuda'"),
        ({"specs": ("FullAttentionSpec", "MambaSpec")}, "caches of FullAttentionSpec, MambaSpec"),
        ({"specs": ("SlidingWindowSpec",)}, "caches of SlidingWindowSpec"),
        ({"specs": ("MLAAttentionSpec",)}, "caches of MLAAttentionSpec"),
        ({}, None),
    ],
)
def test_what_pages_cannot_be_read_with_is_refused(
    changed: dict[str, Any], why: str | None
) -> None:
    from vllm.config import KVTransferConfig
    from vllm.v1 import kv_cache_interface

    from tightkv.integrations.vllm.connectors.nixl import check_engine

    config = SimpleNamespace(
        additional_config={"tightkv": changed.get("tightkv", K4V4)},
        kv_transfer_config=KVTransferConfig(
            kv_connector="TightNixlConnector",
            kv_role="kv_both",
            kv_buffer_device=changed.get("device", "cpu"),
            kv_connector_extra_config=changed.get("extra", {}),
        ),
    )
    specs = [getattr(kv_cache_interface, x) for x in changed.get("specs", ("FullAttentionSpec",))]
    groups = [SimpleNamespace(kv_cache_spec=spec.__new__(spec)) for spec in specs]
    cache = SimpleNamespace(kv_cache_groups=groups)
    with nullcontext() if why is None else pytest.raises(ValueError, match=why):
        check_engine(config, cache)


def test_metrics_say_what_is_compressed_and_what_runs_without_a_ring(
    engines: dict[str, Any],
) -> None:
    whole, few = engines["loop"]["tightkv"], engines["few rings"]["tightkv"]
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    named = {name for name in whole if not name.endswith("_created")}
    assert named == set(re.findall(r"`tightkv:(\w+)`", page))
    layout = PageLayout(KVQuantConfig.from_dict(K4V4), 2, 32)
    blocks = engines["loop"]["blocks"]
    assert whole["kv_cache_bytes"] == blocks * 2 * layout.page_bytes
    assert whole["compression_ratio"] == pytest.approx(layout.ratio)
    assert whole["cache_info"] == 1 and whole["exact_rings"] == 32 and few["exact_rings"] == 8
    for told in (whole, few):  # idle
        assert told["exact_rings_in_use"] == told["sequences_without_ring"] == 0
        assert told["kv_cache_used_bytes"] == 0
    assert whole["prefix_hits_without_window_total"] == 0
    assert few["prefix_hits_without_window_total"] == BRANCHES - 8
    line = f"tightkv: {BRANCHES} sequences run at a time and 8 have an exact ring"
    assert engines["few rings"]["log"].count(line) == 1


def test_engines_of_one_process_have_hashes_of_their_own() -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.engine import core
    from vllm.v1.request import Request

    from tightkv.integrations.vllm.start.engine_core import separate_block_hashes

    own, function = core.get_request_block_hasher, get_hash_fn_by_name("sha256_cbor")
    init_none_hash(function)
    hashers = {}
    for name, fingerprint in (("a", "a"), ("b", "b"), ("again", "a"), ("vllm", None)):
        separate_block_hashes(fingerprint)
        hashers[name] = core.get_request_block_hasher(16, function)
        assert core.get_request_block_hasher is own  # the next engine's are vLLM's

    def hashes(name: str, tokens: int) -> list[bytes]:
        ids = list(range(tokens))
        params = SamplingParams(max_tokens=1)
        return Request(name, ids, params, None, block_hasher=hashers[name]).block_hashes

    first = {name: hashes(name, 64) for name in hashers}
    assert first["a"] == first["again"] == hashes("a", 80)[:4] and len(first["a"]) == 4
    assert len({tuple(found) for found in first.values()}) == 3
