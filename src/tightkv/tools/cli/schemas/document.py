"""schema_of: a command's results (results.py) as a JSON Schema document."""

from __future__ import annotations

from typing import Any

from tightkv.tools.cli.schemas.results import RESULTS

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"
_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def schema_of(command: str) -> Schema:
    """What `tightkv COMMAND --json-schema` prints; `bench` has one for all that it measures."""
    schema = to_schema(RESULTS[command])
    return {"$schema": DRAFT, "title": f"tightkv {command} --json", **schema}


def to_schema(result: Any) -> Schema:
    """The notation of results.py as JSON Schema."""
    if isinstance(result, dict):
        return _mapping(result) if set(result) == {"*"} else _object(result)
    if isinstance(result, tuple):
        return {"anyOf": [to_schema(one) for one in result]}
    if isinstance(result, list):
        length = {"minItems": len(result), "maxItems": len(result)} if len(result) > 1 else {}
        return {"type": "array", "items": to_schema(result[0]), **length}
    if result is None:
        return {"type": "null"}
    if isinstance(result, int):
        return {"const": result}
    if result.endswith("?"):
        return to_schema((result[:-1], None))
    if result.startswith("="):
        return {"const": result[1:]}
    return {"type": _TYPES.get(result, result)}


def _mapping(result: dict[str, Any]) -> Schema:
    return {"type": "object", "additionalProperties": to_schema(result["*"])}


def _object(result: dict[str, Any]) -> Schema:
    """Exactly these keys."""
    properties, required = {}, []
    for names, field in result.items():
        for name in names.split():
            properties[name.rstrip("?")] = to_schema(field)
            if not name.endswith("?"):
                required.append(name)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
