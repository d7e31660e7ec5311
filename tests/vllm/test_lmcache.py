"""Engines that share pages through an LMCache server, a process of its own on this machine.

Skipped without LMCache. An engine is a process that ends, or is ended, without telling the server.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from centers_file import write_centers
from tiny_folder import write_tiny_folder
from vllm_outputs import (
    VOCABULARY,
    Engines,
    assert_same_text,
    batches,
    mean_kl,
    outputs,
    random_tokens,
)

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)),
    pytest.mark.skipif(find_spec("lmcache") is None, reason="needs lmcache"),
]

PAGE, CHUNK = 32, 64
K4V4 = {"preset": "k4v4", "page_size": PAGE, "exact_pages": 3}
K8V8 = {"preset": "k8v8", "page_size": PAGE, "exact_pages": 3}
MODULE = "tightkv.integrations.vllm.connectors.lmcache"
LENGTHS = {  # of a prompt -> chunks' tokens before its exact window
    70: 0,
    120: 0,
    192: 64,
    193: 128,
    300: 192,
    390: 320,
}


def tokens(seed: int, count: int) -> list[int]:
    return random_tokens(random.Random(seed), count)


PROMPTS = [tokens(count, count) for count in LENGTHS]
LOADED = list(LENGTHS.values())
TALK = tokens(2, 400)


class Server:
    """`lmcache server`, until the tests of this file end."""

    def __init__(self, log: Path) -> None:
        self.port, self.http = free_port(), free_port()
        options = {
            "port": self.port,
            "http-port": self.http,
            "chunk-size": CHUNK,
            "l1-size-gb": 0.1,
            "eviction-policy": "LRU",
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--disable-observability"]
        env = {**os.environ, "LMCACHE_TRACK_USAGE": "false"}
        with log.open("w") as out:
            self.process = subprocess.Popen([*command, *given], stdout=out, stderr=out, env=env)
        while True:
            try:
                self.status()
                return
            except OSError:
                assert self.process.poll() is None, log.read_text()[-4000:]
                time.sleep(0.2)

    def status(self) -> dict[str, Any]:
        with urlopen(f"http://127.0.0.1:{self.http}/status", timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def jobs(port: int, centers: Path) -> dict[str, dict[str, Any]]:
    """In the order in which they run."""

    def job(options: dict[str, Any] | None, *steps: list[list[int]], **more: Any) -> dict[str, Any]:
        extra = {"lmcache.mp.port": port, "lmcache.mp.mq_timeout": 60, **more.pop("extra", {})}
        connector: dict[str, Any] = {"kv_connector": "LMCacheMPConnector"}
        engine = {"model": "tiny", "kv_cache_memory_bytes": 4 << 20, **more.pop("engine", {})}
        if options is not None:
            ours = {"kv_connector": "TightLMCacheConnector", "kv_connector_module_path": MODULE}
            connector.update(ours)
            engine["additional_config"] = {"tightkv": options}
        else:
            extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
            engine["block_size"] = PAGE
        connector = {**connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return {
            "engine": {**engine, "kv_transfer_config": connector},
            "batches": list(steps),
            "sampling": {"max_tokens": 12, "ignore_eos": True},
            **more,
        }

    alone = {"enable_prefix_caching": False}
    ranks = {"tensor_parallel_size": 2, **alone}
    talk = {
        "kernels": "reference",  # with which pages wait where there is no connector
        "extra": {"lmcache.mp.save_decode_cache": True},
        "sampling": {"logprobs": VOCABULARY, "ignore_eos": True},
    }
    coded = {**K4V4, "sinks": 0}  # those of another engine are read from their codes
    centered = {**K8V8, "calibration": str(centers)}
    return {
        "bf16": job(None, PROMPTS),
        "first": job(K4V4, PROMPTS, stays=True),
        "preset": job(K8V8, PROMPTS, stays=True),
        "seed": job({**K4V4, "seed": 1}, PROMPTS),
        "calibration": job(centered, PROMPTS),
        "bf16 again": job(None, PROMPTS),
        "again": job(K4V4, PROMPTS),
        "part": job(K4V4, [PROMPTS[-1][:230]], PROMPTS[-1:], [tokens(1, 20)]),
        "tenants": job(
            *(K4V4, PROMPTS, PROMPTS, PROMPTS, PROMPTS),
            engine=alone,
            tenants=[{"salt": "a"}, {"salt": "b"}, {"salt": "a"}, {}],
        ),
        "layers": job({**K4V4, "protected_first": 1}, PROMPTS, PROMPTS, engine=alone),
        # Most of the text comes out, and goes in again.
        "talk": job(
            coded, [TALK[:40]], [TALK[:350]], forced=[[TALK[40:300]], [TALK[350:]]], **talk
        ),
        "talk again": job(coded, [TALK[:350]], forced=[[TALK[350:]]], **talk),
        "plain talk": job(None, [TALK[:350]], forced=[[TALK[350:]]], **talk),
        "ranks": job(centered, PROMPTS, PROMPTS, engine=ranks, fork_ranks=True),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    known = set(Path("/dev/shm").glob("lmcache_*"))
    found = Server(tmp_path_factory.mktemp("lmcache") / "server.log")
    yield found
    found.stop()
    for segment in set(Path("/dev/shm").glob("lmcache_*")) - known:
        segment.unlink()  # of engines that were ended


@pytest.fixture(scope="module")
def engines(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("engines")
    model = write_tiny_folder(folder / "tiny", max_position_embeddings=1024)
    write_centers(model, folder / "centers.safetensors")
    found = jobs(server.port, folder / "centers.safetensors")
    return Engines(found, {"tiny": model}, folder).run(found)


def cached(result: dict[str, Any], batch: int = 0) -> list[int]:
    return [output["cached"] for output in outputs(batches(result)[batch])]


def external(result: dict[str, Any]) -> int:
    return int(result["metrics"]["vllm:external_prefix_cache_hits"])


def test_another_engine_finds_prefixes_before_their_exact_windows(
    engines: dict[str, dict[str, Any]],
) -> None:
    """While the first is there, and one of another preset, whose layout the server has, too."""
    first, again = engines["first"], engines["again"]
    assert cached(first) == [0] * len(PROMPTS) and external(first) == 0
    assert cached(again) == LOADED and external(again) == sum(LOADED)
    assert_same_text(first, again, tie=0.05, share=0.6)


@pytest.mark.parametrize("name", ["preset", "seed", "calibration"])
def test_engines_of_another_format_miss(engines: dict[str, dict[str, Any]], name: str) -> None:
    assert cached(engines[name]) == [0] * len(PROMPTS)
    assert external(engines[name]) == 0


def test_engines_without_tightkv_have_prefixes_of_their_own(
    engines: dict[str, dict[str, Any]],
) -> None:
    found = [min(len(ids) // CHUNK * CHUNK, len(ids) - 1) for ids in PROMPTS]
    assert external(engines["bf16"]) == 0 and cached(engines["bf16 again"]) == found
    assert_same_text(engines["bf16"], engines["bf16 again"])


def test_a_chunk_of_which_the_engine_has_a_part_is_loaded_beyond_it(
    engines: dict[str, dict[str, Any]],
) -> None:
    """The first 224 tokens, seven pages, are in vLLM's own cache; a chunk is two."""
    told = engines["part"]
    assert [cached(told, i) for i in range(2)] == [[128], [320]]
    assert external(told) == 128 + 320 - 224
    alone = {"outputs": [[batches(engines["again"])[0]["outputs"][0][-1]]]}
    assert_same_text(alone, batches(told)[1], tie=0.05, share=0)
    last = 1  # of the last request; a next step would free it
    assert told["free_blocks"] == told["blocks"] - 1 - last


def test_tenants_do_not_share_prefixes(engines: dict[str, dict[str, Any]]) -> None:
    none = [0] * len(PROMPTS)
    told = engines["tenants"]
    assert [cached(told, i) for i in range(4)] == [none, none, LOADED, LOADED]
    first, _, again, _ = batches(told)
    assert_same_text(first, again, tie=0.05, share=0.6)


def test_layers_of_other_bits_are_moved_too(engines: dict[str, dict[str, Any]]) -> None:
    told = engines["layers"]
    assert len(set(told["bits"].values())) == 2
    assert [cached(told, i) for i in range(2)] == [[0] * len(PROMPTS), LOADED]
    assert_same_text(*batches(told), tie=0.05, share=0.6)


def test_pages_of_generated_tokens_are_stored_when_they_are_sealed(
    engines: dict[str, dict[str, Any]],
) -> None:
    """Loaded ones are those that the engine that wrote them has."""
    own, [loaded] = batches(engines["talk"])[1], batches(engines["talk again"])
    assert cached(engines["talk"], 1) == cached(engines["talk again"]) == [256]
    assert not engines["talk"]["sealed_later"]
    assert external(engines["talk"]) == 0 and external(engines["talk again"]) == 256
    [plain] = batches(engines["plain talk"])
    assert mean_kl(own, loaded, "best") < 1e-6 * mean_kl(plain, own, "best")


def test_ranks_of_an_engine_know_the_format_of_all(engines: dict[str, dict[str, Any]]) -> None:
    """Each has the centers of its own head."""
    told = engines["ranks"]
    assert [cached(told, i) for i in range(2)] == [[0] * len(PROMPTS), LOADED]
    assert_same_text(*batches(told), tie=0.05, share=0.6)


def test_nothing_stays_locked(engines: dict[str, dict[str, Any]], server: Server) -> None:
    end = time.monotonic() + 20
    while (found := server.status())["active_sessions"] and time.monotonic() < end:
        time.sleep(0.2)
    store = found["storage_manager"]["l1_manager"]
    assert found["active_sessions"] == found["active_prefetch_jobs"] == 0
    assert store["read_locked_count"] == store["write_locked_count"] == 0
    # Prompts are stored to their ends: by engines of each format, and by tenants. So is a talk of
    # which all but the newest token is in the cache.
    chunks = sum(len(ids) // CHUNK for ids in PROMPTS)
    talks = 2 * ((len(TALK) - 1) // CHUNK)
    assert store["total_object_count"] == chunks * (1 + 4 + 2 + 1 + 2) + talks


def transfer(**extra: Any) -> Any:
    from vllm.config import KVTransferConfig

    found = {"kv_connector": "TightLMCacheConnector", "kv_connector_module_path": MODULE}
    return KVTransferConfig(**found, kv_role="kv_both", kv_connector_extra_config=extra)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"additional_config": {}}, "an engine without tightkv: use LMCacheMPConnector"),
        ({"lora_config": object()}, "with LoRA: LMCache's keys have no adapter"),
        ({"model_config": SimpleNamespace(enable_prompt_embeds=True)}, "with prompt embeddings"),
        ({"spec": "MambaSpec"}, "with caches of MambaSpec"),
        ({"spec": "SlidingWindowSpec"}, "with caches of SlidingWindowSpec"),
        ({"spec": "MLAAttentionSpec"}, "with caches of MLAAttentionSpec"),
        ({"lmcache.mp.mp_transfer_mode": "engine_driven"}, "takes its block for one token"),
        ({"lmcache.mp.eager_prefetch": True}, "looks up prompts past"),
        ({}, None),
    ],
)
def test_engines_that_would_read_wrong_pages_are_refused(
    changed: dict[str, Any], why: str | None
) -> None:
    from vllm.v1 import kv_cache_interface

    from tightkv.integrations.vllm.connectors.lmcache import check_engine

    config = {
        "additional_config": {"tightkv": K4V4},
        "lora_config": None,
        "model_config": SimpleNamespace(enable_prompt_embeds=False),
        "kv_transfer_config": transfer(**{x: changed[x] for x in changed if x[:2] == "lm"}),
    }
    spec = getattr(kv_cache_interface, changed.get("spec", "FullAttentionSpec"))
    groups = [SimpleNamespace(kv_cache_spec=spec.__new__(spec))]
    given = {name: changed.get(name, config[name]) for name in config}
    with nullcontext() if why is None else pytest.raises(ValueError, match=why):
        check_engine(SimpleNamespace(**given), SimpleNamespace(kv_cache_groups=groups))
