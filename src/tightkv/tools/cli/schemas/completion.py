"""tightkv completion --json."""

from tightkv.tools.cli.schemas.build import STR, array, constant, mapping, obj

SCHEMA = obj(
    {
        "schema": constant(1),
        "words": mapping(array(STR)),
        "choices": mapping(array(STR)),
    }
)
