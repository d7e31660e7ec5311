"""Words that schemas are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from tightkv.config import KVQuantConfig

Schema = dict[str, Any]

INT: Schema = {"type": "integer"}
FLOAT: Schema = {"type": "number"}
STR: Schema = {"type": "string"}
BOOL: Schema = {"type": "boolean"}
ANYTHING: Schema = {"type": "object"}


def obj(properties: dict[str, Schema], optional: Collection[str] = ()) -> Schema:
    """An object with exactly these keys; those in `optional` may be absent."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def mapping(values: Schema) -> Schema:
    """An object with any keys."""
    return {"type": "object", "additionalProperties": values}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def one_of(*schemas: Schema) -> Schema:
    """What any of these describes."""
    return {"anyOf": list(schemas)}


def constant(value: int | str) -> Schema:
    return {"const": value}


def names(keys: str, schema: Schema) -> dict[str, Schema]:
    """The same schema for several keys: names("a b", INT)."""
    return dict.fromkeys(keys.split(), schema)


def _config() -> Schema:
    kinds = {bool: BOOL, int: INT, float: FLOAT, str: STR, tuple: array(INT)}
    fields = dataclasses.fields(KVQuantConfig)
    return obj({field.name: kinds[type(field.default)] for field in fields})


CONFIG = _config()
"""Every field of a KVQuantConfig."""
