"""check: whether what a command printed is as its schema says."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import fastjsonschema

from tightkv.tools.cli.schemas import schema_of


@lru_cache
def validator(command: str) -> Callable[[Any], Any]:
    made: Callable[[Any], Any] = fastjsonschema.compile(schema_of(command))
    return made


def check(command: str, text: str) -> None:
    """An AssertionError where it is not: commands would take a ValueError for their user's."""
    try:
        validator(command)(json.loads(text))
    except fastjsonschema.JsonSchemaValueException as error:
        raise AssertionError(f"tightkv {command} --json: {error}") from error
