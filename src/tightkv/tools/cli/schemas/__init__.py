"""JSON Schema (draft 7) of what each command prints with --json."""

from tightkv.tools.cli.schemas.document import schema_of

__all__ = ["schema_of"]
