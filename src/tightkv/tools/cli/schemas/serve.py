"""tightkv serve --json."""

from tightkv.tools.cli.schemas.build import CONFIG, STR, array, constant, nullable, obj

SCHEMA = obj(
    {
        "schema": constant(1),
        "tightkv": STR,
        "command": array(STR),
        "kv_quant": nullable(CONFIG),
    }
)
