"""schema_of: the schema of a command as a document of its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tightkv.tools.cli.schemas.build import Schema

DRAFT = "http://json-schema.org/draft-07/schema#"


def schema_of(command: str) -> dict[str, Any]:
    """What `tightkv COMMAND --json-schema` prints; `bench` has one for all that it measures."""
    schema: Schema = import_module(f"tightkv.tools.cli.schemas.{command}").SCHEMA
    return {"$schema": DRAFT, "title": f"tightkv {command} --json", **schema}
