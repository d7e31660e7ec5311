"""tightkv plan --json."""

from tightkv.tools.cli.schemas.build import (
    BOOL,
    FLOAT,
    INT,
    STR,
    array,
    constant,
    names,
    nullable,
    obj,
    one_of,
)

_LAYERS = obj(
    {
        "kind": STR,
        **names("count num_kv_heads head_dim value_head_dim latent_dim index_bytes", INT),
        **names("window state_bytes", nullable(INT)),
        "compressed": BOOL,
        "skip_reason": nullable(STR),
    }
)
_MODEL = obj(
    {
        **names("name model_type dtype", STR),
        **names("num_layers num_heads hidden_size", INT),
        "max_positions": nullable(INT),
        "layers": array(_LAYERS),
    }
)
_WEIGHTS = obj({"bytes": INT, "dtype": nullable(STR), "source": STR})
_MEMORY = obj(
    {
        **names("budget_bytes cache_bytes", INT),
        "gpu": nullable(STR),
        "utilization": FLOAT,
    }
)
_ROW = obj(
    {
        "name": STR,
        **names("key_bits value_bits", nullable(INT)),
        "bytes_per_token_per_layer": nullable(FLOAT),
        "bytes_per_token": FLOAT,
        **names("ratio total_ratio", nullable(FLOAT)),
        "total_bytes": INT,
        **names("max_tokens max_requests", nullable(INT)),
    }
)
_PLAN = obj(
    {
        "schema": constant(1),
        "tightkv": STR,
        "model": _MODEL,
        **names("context batch tp", INT),
        "weights": nullable(_WEIGHTS),
        "memory": nullable(_MEMORY),
        "rows": array(_ROW),
        "notes": array(STR),
    }
)
_PAGE = obj({"schema": constant(1), "html": STR})

SCHEMA = one_of(_PLAN, _PAGE)
