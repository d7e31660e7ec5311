"""Compiled kernels on disk: whatever is found there, the compiler's own output is used."""

import pwd
import resource
from pathlib import Path

import pytest

from tightkv.config import cache_root
from tightkv.kernels.cuda import nvrtc

SOURCE = 'extern "C" __global__ void k(float *x) { x[threadIdx.x] += 1.0f; }'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where kernels are kept; NVRTC of the development packages compiles them."""
    try:
        lib = nvrtc.load_nvrtc("13")
    except OSError as error:
        pytest.skip(f"no NVRTC: {error}")
    monkeypatch.setattr(nvrtc, "load_torch_nvrtc", lambda: lib)
    monkeypatch.setenv("TIGHTKV_CACHE_DIR", str(tmp_path))
    return tmp_path / "kernels"


def compiled(monkeypatch):
    """compile_cubin, and whether it had to compile."""
    calls = []
    real = nvrtc.compile_source

    def counted(*args):
        calls.append(args)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_source", counted)
        return nvrtc.compile_cubin(SOURCE, "sm_90"), bool(calls)


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_compiled_once(folder, monkeypatch):
    first, did = compiled(monkeypatch)
    assert did and first[:4] == b"\x7fELF"
    assert compiled(monkeypatch) == (first, False)
    assert folder.stat().st_mode & 0o077 == 0


def test_a_user_without_a_home_compiles_each_time(folder, monkeypatch):
    """As in a container whose user the system does not know."""

    def unknown(_):
        raise KeyError("getpwuid(): uid not found")

    for name in ("TIGHTKV_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(OSError, match="set TIGHTKV_CACHE_DIR to one"):
        cache_root()
    assert [compiled(monkeypatch)[1] for _ in "ab"] == [True, True]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:48],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: data[48:],  # machine code alone, as earlier versions wrote it
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: data[:12] + bytes([data[12] ^ 1]) + data[13:],
        lambda data: b"tightkv\x02" + data[8:],
    ],
)
def test_damaged_entries_are_compiled_again_and_replaced(folder, monkeypatch, damage):
    good, _ = compiled(monkeypatch)
    file = only_file(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert compiled(monkeypatch) == (good, True)
    assert only_file(folder).read_bytes() == whole
    assert compiled(monkeypatch) == (good, False)


def test_a_folder_in_place_of_an_entry(folder, monkeypatch):
    good, _ = compiled(monkeypatch)
    file = only_file(folder)
    file.unlink()
    file.mkdir()
    assert compiled(monkeypatch) == (good, True)
    assert list(folder.iterdir()) == [file]


def test_a_full_disk_leaves_nothing(folder, monkeypatch):
    """The limit on a file's size makes the kernel refuse the write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        good, did = compiled(monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert did and not list(folder.iterdir())
    assert compiled(monkeypatch) == (good, True)


def test_a_root_that_is_a_file(folder, monkeypatch):
    folder.write_bytes(b"")
    assert compiled(monkeypatch)[0] == compiled(monkeypatch)[0]


def test_options_are_part_of_the_key(folder, monkeypatch):
    compiled(monkeypatch)
    real = nvrtc.compile_options
    monkeypatch.setattr(nvrtc, "compile_options", lambda arch: [*real(arch), "--fmad=false"])
    assert compiled(monkeypatch)[1]
    assert len(list(folder.iterdir())) == 2


def test_a_folder_that_others_write_is_not_used(folder, monkeypatch):
    good, _ = compiled(monkeypatch)
    planted = nvrtc._entry(b"not ours")
    only_file(folder).write_bytes(planted)
    assert compiled(monkeypatch) == (b"not ours", False)  # who may write there is trusted
    folder.chmod(0o777)
    with pytest.warns(UserWarning, match="set TIGHTKV_CACHE_DIR"):
        assert compiled(monkeypatch) == (good, True)
    assert only_file(folder).read_bytes() == planted
