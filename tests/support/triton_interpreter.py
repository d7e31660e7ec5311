"""Triton's interpreter at twice its speed: it is spared work whose result nobody reads.

It computes a check of overflow for each sum of integers, and drops it unless kernels are debugged;
and it replaces the names of triton.language in each call of a device function, which the launch
has done.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from triton.runtime import interpreter


class Patches:
    """The interpreter's `_patch_lang`, once in a launch for each set of names."""

    def __init__(self) -> None:
        self.patch = interpreter._patch_lang
        self.launch = interpreter.GridExecutor.__call__
        self.done: set[tuple[bool, ...]] = set()

    def patch_lang(self, fn: Any) -> Any:
        names = tuple(
            any(value is language for value in fn.__globals__.values())
            for language in (interpreter.tl, interpreter.tl.core)
        )
        if names in self.done:
            return None  # what a device function's call gets is not looked at
        self.done.add(names)
        return self.patch(fn)

    def call(self, executor: Any, *args: Any, **options: Any) -> Any:
        self.done.clear()
        try:
            return self.launch(executor, *args, **options)
        finally:
            self.done.clear()


def spare() -> None:
    """For the rest of the process."""
    builder, patches = interpreter.interpreter_builder, Patches()
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patches.patch_lang
    interpreter.GridExecutor.__call__ = lambda *args, **options: patches.call(*args, **options)
