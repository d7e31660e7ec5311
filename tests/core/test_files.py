"""Files appear whole or not at all; links, devices and pipes stay what they are."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tightkv.files.atomic import check_appendable, check_folder, check_writable, whole_file


def write(path: Path | str, text: str) -> None:
    with whole_file(path) as temporary:
        temporary.write_text(text)


def test_the_file_that_a_link_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, real = tmp_path / "link", tmp_path / "folder" / "real"
    link.symlink_to(Path("folder") / "real")
    for text in ("new", "newer"):  # a link to nothing, then to a file
        write(link, text)
        assert link.is_symlink() and real.read_text() == text
    with pytest.raises(RuntimeError), whole_file(link) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert real.read_text() == "newer" and os.listdir(tmp_path / "folder") == ["real"]


def test_a_pipe_gets_the_bytes(tmp_path: Path) -> None:
    pipe, got = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_writable(pipe)  # and its reader sees no end
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()), daemon=True)
    reader.start()
    write(pipe, "text")
    reader.join(60)
    assert got == ["text"] and stat.S_ISFIFO(pipe.stat().st_mode)
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_character_device_gets_the_bytes() -> None:
    ours, theirs = os.openpty()
    try:
        device = os.ttyname(theirs)
        check_writable(device)
        write(device, "text")
        assert os.read(ours, 100) == b"text" and stat.S_ISCHR(os.stat(device).st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize("check", [check_writable, check_appendable, write])
def test_what_is_no_file_is_refused(check: object, tmp_path: Path) -> None:
    assert callable(check)
    text = ("text",) if check is write else ()
    with pytest.raises(OSError, match="is a folder; give the name of a file"):
        check(tmp_path, *text)
    with pytest.raises(OSError, match=r"cannot be written \(|Not a directory"):
        (tmp_path / "file").write_text("old")
        check(tmp_path / "file" / "inner", *text)
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file").read_text() == "old"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder of '.*no/file' does not exist"):
        check_writable(tmp_path / "no" / "file")
    check_appendable(tmp_path / "no" / "file")  # that folder is made when it is needed
    check_folder(tmp_path / "no" / "folder")
    assert not os.listdir(tmp_path)


def test_what_takes_this_programs_output_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As --out /dev/stdout of a command whose output goes to a file: one of both would be lost."""
    path = tmp_path / "log"
    path.write_text("printed")
    real, found = os.fstat, os.stat(path)
    monkeypatch.setattr(os, "fstat", lambda number: found if number == 1 else real(number))
    with pytest.raises(ValueError, match="is where this program prints; give another file"):
        check_writable(path)
    assert path.read_text() == "printed"


def test_checks_leave_nothing_and_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    before = path.stat()
    for check in (check_writable, check_appendable):
        check(path)
        check(tmp_path / "new")
    assert os.listdir(tmp_path) == ["file"] and path.stat() == before
    with pytest.raises(OSError, match=r"cannot be written|does not exist"):
        check_writable("/proc/new-file")
