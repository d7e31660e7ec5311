"""The CUDA C++ sources compile, for every shape of tile, where there is a compiler but no GPU."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tightkv.config import KVQuantConfig
from tightkv.kernels.cuda import decode_plan
from tightkv.kernels.cuda.decode_plan import DecodeTile
from tightkv.kernels.cuda.nvrtc import CompileError, compile_source, load_nvrtc
from tightkv.kernels.cuda.source import SPLIT_PLAN, STATIC_STEP, included, source
from tightkv.pages.layout import PageLayout

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_decode_tiles.jsonl"
HEADERS = Path(decode_plan.__file__).parent / "csrc" / "include"
NVCC = shutil.which("nvcc")
HOPPER, ADA = (132, 228 << 10), (128, 100 << 10)  # processors, shared memory of each


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
@pytest.mark.parametrize(
    ("arch", "name", "preset", "dim"),
    [
        ("sm_80", "decode", "k4v4", 128),
        ("sm_86", "seal", "k2v2", 64),
        ("sm_100", "append", "k4v4", 64),
        pytest.param("sm_90", "seal", "k4v4", 512, marks=pytest.mark.thorough),
        pytest.param("sm_89", "append", "k3v2", 256, marks=pytest.mark.thorough),
        pytest.param("sm_90", "decode", "k4v4", 80, marks=pytest.mark.thorough),
        pytest.param("sm_120", "decode", "k3v3", 64, marks=pytest.mark.thorough),
    ],
)
def test_nvrtc_takes_the_sources(arch, name, preset, dim):
    """As at a user's: the compiler at run time knows less than nvcc."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    of = (32, DecodeTile.of(layout, 4), dim == 64) if name == "decode" else (8, None)
    assert len(compile_source(load_nvrtc("13"), source(name, layout, *of), arch)) > 10_000


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", [STATIC_STEP, SPLIT_PLAN])
def test_nvrtc_takes_sources_without_constants(name, arch):
    assert len(compile_source(load_nvrtc("13"), included(name), arch)) > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
def test_nvrtc_says_where_a_source_is_wrong():
    text = source("append", PageLayout(KVQuantConfig.preset("k4v4"), 8, 128), 8, None)
    broken = text.replace("struct AppendParams {", "struct AppendParams")
    with pytest.raises(CompileError, match=r"encode\.cuh\(\d+\): error: expected"):
        compile_source(load_nvrtc("13"), broken, "sm_90")


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
@pytest.mark.parametrize("header", sorted(path.name for path in HEADERS.glob("*.cuh")))
def test_a_header_includes_what_it_needs(header):
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128)
    sealing = header == "seal_pages.cuh"
    of = ("seal", layout, 8, None) if sealing else ("decode", layout, 32, DecodeTile.of(layout, 4))
    macros, _, _ = source(*of).partition("#line")
    compile_source(load_nvrtc("13"), macros + included(f"include/{header}"), "sm_90")


def compile_for_hopper(text, folder):
    (folder / "kernels.cu").write_text(text, encoding="utf-8")
    command = [NVCC, "-arch=sm_90", "-cubin", "-Xptxas=-v", "kernels.cu"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def registers_and_spills(said, kernel):
    """What ptxas says of a kernel: its registers, and bytes that it stores for want of more."""
    said = said[said.index(f"'{kernel}'") :]
    patterns = r"Used (\d+) registers", r"(\d+) bytes spill stores"
    return tuple(int(re.findall(pattern, said)[0]) for pattern in patterns)


@pytest.mark.sampled
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize(
    "preset,dim,columns,programs",
    [
        ("k4v4", 128, 4, 1),
        ("k4v4", 128, 4, 4),
        ("k4v4", 64, 4, 1),
        ("k4v4", 64, 8, 2),
        ("k4v4", 128, 12, 1),
        ("k4v4", 128, 16, 1),
        ("k2v2", 128, 4, 1),
        ("k3v3", 128, 4, 4),
        ("k4v4", 512, 8, 1),
        ("k2v2", 128, 8, 1),
        ("k3v2", 64, 8, 1),
        ("k4v4", 256, 8, 1),
        ("k8v4", 128, 8, 1),
        ("k8v8", 256, 4, 1),
        ("k4v4", 80, 4, 1),
        ("k8v4", 192, 8, 1),
    ],
)
def test_decode_compiles_without_spilling(preset, dim, columns, programs, tmp_path):
    """The sizes that Python computes are asserted in the source. Many columns spill a little."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    text = source("decode", layout, 4 * columns, DecodeTile.of(layout, columns, programs))
    done = compile_for_hopper(text, tmp_path)
    assert done.returncode == 0, done.stderr
    _, spilled = registers_and_spills(done.stderr, "decode")
    assert spilled <= (32 if columns >= 8 else 0)
    wrong = text.replace("#define STAGES 2", "#define STAGES 5")
    assert "computes another size" in compile_for_hopper(wrong, tmp_path).stderr


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_append_compiles(tmp_path):
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128)
    assert compile_for_hopper(source("append", layout, 8, None), tmp_path).returncode == 0


@pytest.mark.sampled
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k2v2"])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_sealing_keeps_to_its_registers(preset, dim, tmp_path):
    """Four blocks a processor, where some numbers wait in local memory; three with an append.

    Of 512 channels two.
    """
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    done = compile_for_hopper(source("seal", layout, 8, None), tmp_path)
    assert done.returncode == 0, done.stderr
    registers, spilled = registers_and_spills(done.stderr, "seal")
    assert registers <= (255 if dim > 256 else 128) and spilled <= (128 if dim == 256 else 48)
    registers, spilled = registers_and_spills(done.stderr, "append_and_seal")
    most = 255 if dim > 256 or (preset, dim) == ("k2v2", 64) else 168
    assert registers <= most and spilled == 0


@pytest.mark.parametrize("preset", ["k8v8", "k8v4", "k4v4", "k3v2", "k2v2"])
@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256, 512])
@pytest.mark.parametrize("columns", [4, 8, 12, 16])
def test_blocks_fit_a_processor(preset, dim, columns):
    """228 KiB of shared memory on Hopper, 100 on Ada, where every block costs one more KiB."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    columns = min(columns, 8 if dim > 128 else 16)
    for programs in (1, 8):
        tile = DecodeTile.of(layout, columns, programs, HOPPER[1])
        assert tile.blocks * (tile.shared_bytes(layout) + 1024) <= HOPPER[1]
        tile = DecodeTile.of(layout, columns, programs, ADA[1])
        assert tile.shared_bytes(layout) + 1024 <= ADA[1]


@pytest.mark.parametrize(
    "preset,small", [("k4v4", True), ("k2v2", True), ("k3v3", True), ("k4v2", False)]
)
def test_small_blocks_are_for_many_programs_and_where_four_fit(preset, small, monkeypatch):
    """64 sequences of 8 heads on an H200; other bits were not measured."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, 128)

    def blocks(batch, group=4, gpu=HOPPER, pages=64):
        monkeypatch.setattr(decode_plan, "_processors", lambda device: gpu)
        decode_plan.DecodePlan.of.cache_clear()
        plan = decode_plan.DecodePlan.of(layout, group, 1, batch, pages, "cuda")
        assert plan.num_splits == 1 or plan.tile.blocks == 2
        return plan.tile.blocks

    assert [blocks(batch) for batch in (1, 32, 62)] == [2, 2, 2]
    many = [blocks(64), blocks(256), blocks(128, pages=2048), blocks(256, pages=2048)]
    assert many == [4 if small else 2] * 4
    assert blocks(75, pages=2048) == 2  # sequences are cut
    assert blocks(256, group=8) == blocks(256, gpu=ADA) == 2
    decode_plan.DecodePlan.of.cache_clear()


@pytest.mark.parametrize(
    "batch,tokens,splits",
    [
        (256, 1024, 1),  # where the last wave is fuller with five
        (256, 131072, 1),  # a table as wide as the longest sequence that may come
        (32, 8192, 1),
        (8, 32768, 4),
        (1, 131072, 33),
        (1, 2048, 8),
    ],
)
def test_splits_of_eight_heads_on_an_h200(batch, tokens, splits):
    tile = decode_plan.DecodeTile(2, 2, 2, 4)
    assert decode_plan.num_splits_heuristic(8 * batch, HOPPER[0], tile, tokens // 64) == splits


@pytest.mark.parametrize("preset", ["k4v4", "k2v2"])
@pytest.mark.parametrize("batch,max_queries", [(1, 1), (8, 1), (32, 1), (300, 1), (2, 16)])
@pytest.mark.parametrize("gpu", [HOPPER, ADA], ids=["sm_90", "sm_89"])
def test_launches_fill_the_processors_once_over(gpu, batch, max_queries, preset, monkeypatch):
    """No more blocks a processor than planned, the last wave of them nearly full."""
    monkeypatch.setattr(decode_plan, "_processors", lambda device: gpu)
    processors, memory = gpu
    for dim in (128, 256):
        layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
        decode_plan.DecodePlan.of.cache_clear()
        plan = decode_plan.DecodePlan.of(layout, 4, max_queries, batch, 2000, "cuda")
        assert plan.shared_bytes >= plan.tile.shared_bytes(layout)
        held = memory // (plan.shared_bytes + 1024)
        assert 1 <= held <= plan.tile.blocks
        if gpu is HOPPER:
            blocks = batch * 8 * plan.num_q_tiles * plan.num_splits
            assert blocks / (held * processors) / -(-blocks // (held * processors)) > 0.85
    decode_plan.DecodePlan.of.cache_clear()


def test_plans_are_those_that_were_measured(monkeypatch):
    """And other tiles were slower."""
    monkeypatch.setattr(decode_plan, "_processors", lambda device: HOPPER)
    decode_plan.DecodePlan.of.cache_clear()
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        shape, cfg = row["shape"], KVQuantConfig.preset(row["preset"])
        layout = PageLayout(cfg, shape["kv_heads"], shape["head_dim"])
        group = shape["query_heads"] // shape["kv_heads"]
        pages = shape["tokens"] // cfg.page_size + 2  # bench.inputs.fill
        plan = decode_plan.DecodePlan.of(layout, group, 1, shape["batch"], pages, "cuda")
        tile = dataclasses.replace(plan.tile, **row["tile"])  # it may have more fields since then
        assert (plan.tile, plan.num_splits) == (tile, row["num_splits"]), row
        assert row["other"]["tile"] != row["tile"]
        assert row["other"]["ms"]["step"] > row["ms"]["step"]
    assert len(rows) >= 20
    decode_plan.DecodePlan.of.cache_clear()
