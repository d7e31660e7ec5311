"""tightkv export --json."""

from tightkv.tools.cli.schemas.build import CONFIG, FLOAT, INT, STR, array, constant, names, obj

SCHEMA = obj(
    {
        "schema": constant(1),
        **names("kind dtype device torch tightkv folder", STR),
        **names("max_tokens cache_bytes format file_bytes", INT),
        "stop_tokens": array(INT),
        "config": CONFIG,
        "seconds": FLOAT,
    }
)
