"""tightkv info --json."""

from tightkv.tools.cli.schemas.build import BOOL, INT, STR, array, constant, names, nullable, obj

_PACKAGE = obj({"name": STR, "version": nullable(STR), "install": nullable(STR)})
_CPU = obj(
    {
        "model": STR,
        **names("logical_cores usable_cores", nullable(INT)),
        "simd": array(STR),
    }
)
_DEVICE = obj({**names("type name capability", STR), **names("index memory_bytes", INT)})
_KERNELS = obj({"name": STR, "usable": BOOL, "reason": STR})

SCHEMA = obj(
    {
        "schema": constant(1),
        **names("tightkv python platform", STR),
        "packages": array(_PACKAGE),
        "cpu": _CPU,
        "devices": array(_DEVICE),
        "kernels": array(_KERNELS),
        "errors": array(STR),
    }
)
