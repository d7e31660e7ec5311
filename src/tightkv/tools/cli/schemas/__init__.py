"""JSON Schema (draft 7) of what each command prints with --json, from the table results.json.

In the table a key names one field, or several of one kind with spaces between; a name that ends
in ? may be absent. A kind is "int", "float", "str", "bool", "object" (of any keys) or "$name", an
entry of the table; with ? it may also be null. A number or "=word" is a constant. {} is an object
of just these keys and those of its "and", {"*": kind} one of any keys, [kind] a list, [kind, kind]
a pair, and ["one of", kind, ...] either of several.
"""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from tightkv.config import KVQuantConfig

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
_CONFIG_KINDS = {bool: "bool", int: "int", float: "float", str: "str", tuple: ["int"]}


def schema_of(command: str) -> Schema:
    """What `tightkv COMMAND --json-schema` prints; `bench` has one for all that it measures."""
    return {"$schema": DRAFT, "title": f"tightkv {command} --json", **to_schema(_table()[command])}


@cache
def _table() -> dict[str, Any]:
    table = json.loads(Path(__file__).with_name("results.json").read_text(encoding="utf-8"))
    fields = dataclasses.fields(KVQuantConfig)
    table["$config"] = {field.name: _CONFIG_KINDS[type(field.default)] for field in fields}
    return dict(table)


def to_schema(kind: Any) -> Schema:
    """A kind of the table as JSON Schema."""
    if isinstance(kind, int):
        return {"const": kind}
    if isinstance(kind, str):
        return _named(kind)
    if isinstance(kind, dict):
        if "*" in kind:
            return {"type": "object", "additionalProperties": to_schema(kind["*"])}
        return _object(kind)
    if kind[0] == "one of":
        return {"anyOf": [to_schema(one) for one in kind[1:]]}
    length = {"minItems": len(kind), "maxItems": len(kind)} if len(kind) > 1 else {}
    return {"type": "array", "items": to_schema(kind[0]), **length}


def _named(kind: str) -> Schema:
    if kind.endswith("?"):
        return {"anyOf": [_named(kind[:-1]), {"type": "null"}]}
    if kind.startswith("$"):
        return to_schema(_table()[kind])
    return {"const": kind[1:]} if kind.startswith("=") else {"type": _TYPES.get(kind, kind)}


def _object(kind: dict[str, Any]) -> Schema:
    properties: Schema = {}
    required: list[str] = []
    for other in kind.get("and", ()):
        base = to_schema(other)
        properties |= base["properties"]
        required += base["required"]
    for names, field in kind.items():
        for name in names.split() if names != "and" else ():
            properties[name.rstrip("?")] = to_schema(field)
            required += [] if name.endswith("?") else [name]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
