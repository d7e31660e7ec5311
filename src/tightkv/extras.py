"""How to install an optional extra: there is no release on a registry."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """The pip lines for a checkout of the sources and for a wheel."""
    return f'pip install ".[{extra}]" in a checkout, or pip install "WHEEL[{extra}]"'
