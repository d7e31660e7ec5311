"""Files that appear whole or not at all, and checks before long work that they can be written."""

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[Path]:
    """An empty file beside `path`, which takes its place when the block ends without an error.

    Else it is removed, and what was at `path` stays. `mode` is subject to the umask. A symbolic
    link stays too: the file that it points to is replaced. A character device or a pipe
    (/dev/stdout) is never replaced; what was written is copied into it.
    """
    target = _target(path)
    if target is None:
        with tempfile.TemporaryDirectory(prefix="tightkv-") as folder:
            temporary = Path(folder) / "file"
            temporary.touch()
            yield temporary
            with temporary.open("rb") as data, open(os.open(path, os.O_WRONLY), "wb") as device:
                shutil.copyfileobj(data, device)
        return
    temporary = _create_beside(target, path, mode)
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise now what `whole_file` would raise after long work; nothing is left or changed."""
    target = _target(path)
    if target is not None:
        _create_beside(target, path).unlink()
    elif not os.access(path, os.W_OK):
        raise PermissionError(f"{os.fspath(path)!r} cannot be written")


def check_appendable(path: str | os.PathLike[str]) -> None:
    """Raise now what appending to `path`, and making its folder if needed, would raise later."""
    if Path(path).is_file():
        with open(path, "ab"):
            return
    if Path(path).exists():
        return check_writable(path)
    check_folder(Path(path).parent, path)


def check_folder(folder: Path, path: str | os.PathLike[str] | None = None) -> None:
    """Raise now what making `folder` if needed, and the file `path` in it, would raise later."""
    there = next(part for part in (folder, *folder.parents) if os.path.lexists(part))
    _create_beside(there / "file", folder if path is None else path).unlink()


def _target(path: str | os.PathLike[str]) -> Path | None:
    """The file behind a path, links followed; None for a device or pipe, which is kept."""
    target = Path(os.path.realpath(path))
    try:
        found = os.stat(path)
    except FileNotFoundError:
        if not target.is_dir():
            return target
        found = os.stat(target)  # an empty path
    if stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode):
        return None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a block device or a socket"
        raise IsADirectoryError(f"{os.fspath(path)!r} is {kind}; give the name of a file")
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(descriptor)):
                break
    else:
        return target
    raise ValueError(f"{os.fspath(path)!r} is where this program prints; give another file")


def _create_beside(target: Path, path: str | os.PathLike[str], mode: int = 0o666) -> Path:
    """A new empty file with a random name; errors name `path`."""
    temporary = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    except OSError as error:
        shown = os.fspath(path)
        if not os.path.lexists(target.parent):
            raise FileNotFoundError(f"the folder of {shown!r} does not exist") from None
        raise OSError(error.errno, f"cannot be written ({error.strerror})", shown) from None
    return temporary
