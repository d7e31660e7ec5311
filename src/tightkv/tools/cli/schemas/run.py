"""tightkv run --json."""

from tightkv.tools.cli.schemas.build import FLOAT, INT, STR, array, constant, names, obj

SCHEMA = obj(
    {
        "schema": constant(1),
        "text": STR,
        **names("prompt_tokens new_tokens", INT),
        "tokens": array(INT),
        **names("prefill_seconds decode_seconds", FLOAT),
    }
)
