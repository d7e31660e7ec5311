"""tightkv calibrate --json."""

from tightkv.tools.cli.schemas.build import FLOAT, INT, STR, array, constant, mapping, names, obj

_LAYER = obj({"layer": INT, **names("key_kl value_kl", mapping(FLOAT))})

SCHEMA = obj(
    {
        "schema": constant(1),
        **names("file model fingerprint tightkv", STR),
        **names("bytes tokens", INT),
        "texts": array(obj(names("name sha256", STR))),
        "layer_bits": mapping(STR),
        "layers": array(_LAYER),
    }
)
