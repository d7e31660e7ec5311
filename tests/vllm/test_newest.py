"""Signatures of vLLM and transformers that src/ relies on, and what benchmarks/newest.py prints.

tests/vllm/signatures has those of the oldest and the newest vLLM supported, which are not installed
here: `python benchmarks/contract.py FOLDER --store FILE` writes them from an unpacked wheel.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tightkv.integrations.extras import NEWEST, untested

ROOT = Path(__file__).resolve().parents[2]
SIGNATURES = Path(__file__).parent / "signatures"
# What only newer versions are asked for.
OLDEST_LACKS = {
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:"
    "OffloadingConnectorScheduler._reachable_store_block_mask",
    "vllm.model_executor.layers.attention.mla_attention:accumulate_mla_context_chunk",
    "vllm.model_executor.layers.attention.mla_attention:init_mla_context_partial",
    "vllm.model_executor.layers.attention:mla_attention._get_kv_b_proj_input_dtype",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.cache_blocks",
    "vllm.v1.kv_cache_interface:KVCacheLayout",
    "vllm.v1.kv_cache_interface:KVCacheLayout.LBHNC",
    "vllm.v1.kv_cache_interface:KVCacheLayout.LBNHC",
}
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.vllm.a" name="fine"/>
<testcase classname="tests.vllm.a" name="skipped"><skipped message="no GPU"/></testcase>
<testcase classname="tests.vllm.b" name="moved">
<error message="ImportError: gone&#10;more"/></testcase>
<testcase classname="tests.vllm.b" name="worse">
<failure message="assert 1 == 2">long</failure></testcase>
</testsuite></testsuites>"""
THEIRS = """
from .parts import Part, moved
class Base(Part):
    def step(self, tokens, lengths, *, skip=False): ...
def plan(size, *, layout): ...
"""
OURS = """
from vllm.base import Base, plan, gone
class Own(Base):
    def step(self, tokens, lengths): ...
    def run(self, x): ...
    def own(self): ...
plan(1, layout=2)
plan(1)
Base.there
"""


@pytest.fixture(scope="module")
def contract() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("contract")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def stored(version: str) -> Any:
    return json.loads((SIGNATURES / f"{version}.json").read_text(encoding="utf-8"))


def test_what_broke_in_a_release_is_named(contract: Any, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "base.py").write_text(THEIRS)
    (tmp_path / "vllm" / "parts.py").write_text("class Part:\n    def run(self, x, y=0): ...")
    (tmp_path / "ours.py").write_text(OURS)
    wanted = contract.needs("vllm", tmp_path)
    found = contract.found_in(tmp_path, [need for need in wanted if need.where[:4] == "ours"])
    lines = contract.breaks(wanted, found, {"vllm.base:Base.own": ""})
    assert [re.sub(r"ours\(self.*?\) ", "", line) for line in lines] == [
        "ours.py:2: there is no vllm.base:gone",
        "ours.py:4: vllm.base:Base.step(self, tokens, lengths, *, skip=None): got an unexpected "
        "keyword argument 'skip'",
        "ours.py:5: vllm.base:Base.run(self, x, y=None): too many positional arguments",
        "ours.py:6: there is no vllm.base:Base.own",
        "ours.py:8: vllm.base:plan(size, *, layout): missing a required argument: 'layout'",
        "ours.py:9: there is no vllm.base:Base.there",
    ]


def test_oldest_and_newest_vllm_have_what_is_asked_of_them(contract: Any) -> None:
    wanted = contract.needs("vllm")
    assert {need.where.split(":")[0] for need in wanted} >= contract.REPLACED.keys()
    newest = "{}.{}.0".format(*NEWEST["vllm"])
    assert contract.breaks(wanted, stored(newest)) == []
    asked = [need for need in wanted if need.key not in OLDEST_LACKS]
    assert contract.breaks(asked, stored("0.26.0")) == []
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"vllm>=0.26,<0.{NEWEST["vllm"][1] + 1}"' in text


@pytest.mark.parametrize("where", ["vllm", "transformers", "oldest", "newest"])
def test_installed_releases_have_what_is_asked_of_them(contract: Any, where: str) -> None:
    if where in ("vllm", "transformers"):
        package, spec = where, importlib.util.find_spec(where)
        folder = None if spec is None or spec.origin is None else Path(spec.origin).parents[1]
    else:
        package, folder = "transformers", Path(sys.prefix) / f"transformers-{where}"
    if folder is None or not (folder / package).is_dir():
        pytest.skip(f"no {package} {where}")
    wanted = contract.needs(package)
    assert contract.breaks(wanted, contract.found_in(folder, wanted)) == []


def test_a_release_newer_than_the_newest_tested_is_announced() -> None:
    for package, (major, minor) in NEWEST.items():
        assert untested(package, f"{major}.{minor}.7+cpu") is None
        assert untested(package, "a source tree") is None
        line = untested(package, f"{major}.{minor + 1}.0rc1")
        assert line is not None and f"install {package}<{major}.{minor + 1}" in line
    pinned = (ROOT / "constraints-transformers-newest.txt").read_text(encoding="utf-8")
    assert "transformers=={}.{}.".format(*NEWEST["transformers"]) in pinned


def test_what_broke_is_named_with_its_reason(contract: Any, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("newest", ROOT / "benchmarks" / "newest.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.stored("vllm") == stored("{}.{}.0".format(*NEWEST["vllm"]))
    (tmp_path / "junit.xml").write_text(JUNIT)
    text, well = script.report(tmp_path / "junit.xml")
    assert not well and text.splitlines() == [
        "2 of 4 tests broke",
        "tests.vllm.b::moved",
        "    ImportError: gone",
        "tests.vllm.b::worse",
        "    assert 1 == 2",
    ]
    (tmp_path / "junit.xml").write_text("<testsuites><testcase name='fine'/></testsuites>")
    assert script.report(tmp_path / "junit.xml") == ("0 of 1 tests broke", True)
