"""tightkv doctor --json."""

from tightkv.tools.cli.schemas.build import (
    BOOL,
    CONFIG,
    FLOAT,
    INT,
    STR,
    array,
    constant,
    mapping,
    names,
    nullable,
    obj,
)

_UNIFORM = obj({"name": STR, **names("bytes_per_token kl", FLOAT), "measured": BOOL})
_TRIED = obj(
    {
        **names("name layer_bits", STR),
        "predicted_kl": nullable(FLOAT),
        **names("kl top1 bytes_per_token", FLOAT),
        "within": BOOL,
    }
)
_LAYER = obj(
    {
        "layer": INT,
        **names("key_kl value_kl", mapping(FLOAT)),
        **names("mean_share outlier_head key_bias", nullable(FLOAT)),
        "warnings": array(STR),
    }
)

SCHEMA = obj(
    {
        "schema": constant(1),
        "tightkv": STR,
        "budget": FLOAT,
        "interrupted": BOOL,
        "chosen": nullable(STR),
        "kv_quant": nullable(CONFIG),
        "bytes_per_token_bf16": FLOAT,
        "uniform": nullable(_UNIFORM),
        "tried": array(_TRIED),
        "layers": array(_LAYER),
    }
)
