"""tightkv validate --json."""

from tightkv.tools.cli.schemas.build import (
    BOOL,
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

_DETAIL = mapping(nullable(FLOAT))
_INTERVAL = {**array(FLOAT), "minItems": 2, "maxItems": 2}
_CLAIM = obj(
    {
        **names("section claim setting", STR),
        **names("measured lower upper", nullable(FLOAT)),
        "interval": nullable(_INTERVAL),
        "passed": BOOL,
        "detail": _DETAIL,
    }
)
_AUDIT = obj(
    {
        **names("what setting unit reading", STR),
        "measured": nullable(FLOAT),
        "detail": _DETAIL,
    }
)

SCHEMA = obj(
    {
        "schema": constant(1),
        **names("seed dim failed_claims", INT),
        **names("quick passed", BOOL),
        "seconds": FLOAT,
        "claims": array(_CLAIM),
        "audit": array(_AUDIT),
    }
)
