"""tightkv generate --json."""

from tightkv.tools.cli.schemas.build import (
    BOOL,
    CONFIG,
    FLOAT,
    INT,
    STR,
    array,
    constant,
    names,
    nullable,
    obj,
)

_SAMPLING = obj(
    {"temperature": FLOAT, "top_p": nullable(FLOAT), "top_k": nullable(INT), "seed": INT}
)
_TIMING = obj(
    {
        **names("prefill_seconds decode_seconds", FLOAT),
        **names("prefill_tokens_per_second decode_tokens_per_second", nullable(FLOAT)),
    }
)
_KV = obj(
    {
        **names("tokens bytes bf16_bytes compressed_layers exact_layers other_layers", INT),
        **names("ratio bytes_per_token bf16_bytes_per_token long_ratio", FLOAT),
        "break_even_tokens": nullable(INT),
    }
)
_RUN = obj(
    {
        **names("cache attention", STR),
        "answers": array(obj({"text": STR, **names("prompt_tokens new_tokens", INT)})),
        "timing": _TIMING,
        "kv": _KV,
    }
)
_COMPARE = obj(
    {
        **names("shared_tokens scored_tokens", INT),
        "equal": BOOL,
        "divergence_token": nullable(INT),
        **names("before uncompressed compressed", STR),
        "mean_kl": nullable(FLOAT),
    }
)
_NEEDLE = obj(
    {
        **names("fact question expected", STR),
        "depth": FLOAT,
        "answers": array(obj({"text": STR, "found": BOOL})),
    }
)

SCHEMA = obj(
    {
        "schema": constant(1),
        **names("tightkv torch transformers", STR),
        "model": obj(names("name dtype device", STR)),
        "config": CONFIG,
        "sampling": _SAMPLING,
        "runs": array(_RUN),
        "compare": nullable(_COMPARE),
        "needle": nullable(_NEEDLE),
    }
)
