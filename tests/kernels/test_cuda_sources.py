"""The CUDA C++ sources compile, for every shape of tile, where there is a compiler but no GPU."""

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
from tightkv.kernels.cuda.source import included, source
from tightkv.layout import PageLayout

HEADERS = Path(decode_plan.__file__).parent / "csrc" / "include"
NVCC = shutil.which("nvcc")
HOPPER, ADA = (132, 228 << 10), (128, 100 << 10)  # processors, shared memory of each


@pytest.mark.sampled
@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("preset,dim", [("k4v4", 128), ("k2v2", 64), ("k3v2", 256)])
def test_nvrtc_takes_the_sources(preset, dim, arch):
    """As at a user's: the compiler at run time knows less than nvcc."""
    lib = load_nvrtc("13")
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    for columns, softcap in ((4, False), (8, True)):
        text = source("decode", layout, 32, DecodeTile.of(layout, columns), softcap)
        assert len(compile_source(lib, text, arch)) > 10_000
    text = source("append", layout, 8, None)
    assert len(compile_source(lib, text, arch)) > 10_000
    text = source("append_with_feedback", layout, 8, None)
    assert len(compile_source(lib, text, arch)) > 10_000
    with pytest.raises(CompileError, match=r"encode\.cuh\(\d+\): error: expected"):
        compile_source(lib, text.replace("struct AppendParams {", "struct AppendParams"), arch)


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is there for Linux")
@pytest.mark.parametrize("header", sorted(path.name for path in HEADERS.glob("*.cuh")))
def test_a_header_includes_what_it_needs(header):
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128)
    macros, _, _ = source("decode", layout, 32, DecodeTile.of(layout, 4)).partition("#line")
    compile_source(load_nvrtc("13"), macros + included(f"include/{header}"), "sm_90")


def compile_for_hopper(text, folder):
    (folder / "kernels.cu").write_text(text, encoding="utf-8")
    command = [NVCC, "-arch=sm_90", "-cubin", "-Xptxas=-v", "kernels.cu"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.sampled
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize(
    "preset,dim,columns",
    [
        ("k4v4", 128, 4),
        ("k4v4", 128, 16),
        ("k2v2", 128, 4),
        ("k3v2", 64, 8),
        ("k4v4", 256, 8),
        ("k8v4", 128, 8),
        ("k8v8", 256, 4),
    ],
)
def test_decode_compiles_without_spilling(preset, dim, columns, tmp_path):
    """The sizes that Python computes are asserted in the source."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    text = source("decode", layout, 32, DecodeTile.of(layout, columns))
    done = compile_for_hopper(text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert " 0 bytes spill stores" in done.stderr
    wrong = text.replace("#define STAGES 2", "#define STAGES 5")
    assert "computes another size" in compile_for_hopper(wrong, tmp_path).stderr


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_append_compiles(tmp_path):
    layout = PageLayout(KVQuantConfig.preset("k4v4"), 8, 128)
    assert compile_for_hopper(source("append", layout, 8, None), tmp_path).returncode == 0


@pytest.mark.sampled
@pytest.mark.skipif(NVCC is None, reason="no nvcc")
@pytest.mark.parametrize("preset", ["k4v4", "k3v3", "k2v2"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sealing_with_feedback_keeps_to_its_registers(preset, dim, tmp_path):
    """Four blocks a processor; a number or two may wait in local memory while a page is coded."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    done = compile_for_hopper(source("append_with_feedback", layout, 8, None), tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stderr[done.stderr.index("'seal'") :]
    spilled, registers = (
        int(re.search(pattern, said)[1])
        for pattern in (r"(\d+) bytes spill stores", r"Used (\d+) registers")
    )
    assert registers <= 128 and spilled <= 16


@pytest.mark.parametrize("preset", ["k8v8", "k8v4", "k4v4", "k3v2", "k2v2"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("columns", [4, 8, 16])
def test_blocks_fit_a_processor(preset, dim, columns):
    """228 KiB of shared memory on Hopper, 100 on Ada, where every block costs one more KiB."""
    layout = PageLayout(KVQuantConfig.preset(preset), 8, dim)
    tile = DecodeTile.of(layout, min(columns, 8 if dim > 128 else 16))
    assert tile.blocks * (tile.shared_bytes(layout) + 1024) <= HOPPER[1]
    assert tile.shared_bytes(layout) + 1024 <= ADA[1]


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
