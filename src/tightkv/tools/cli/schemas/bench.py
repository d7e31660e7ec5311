"""tightkv bench --json: a row is one of what `bench` says it is."""

from tightkv.tools.cli.schemas.build import (
    ANYTHING,
    BOOL,
    FLOAT,
    INT,
    STR,
    Schema,
    array,
    constant,
    mapping,
    names,
    nullable,
    obj,
    one_of,
)

_MS = mapping(FLOAT)
_MACHINE = {
    **names("time tightkv torch python machine device", STR),
    **names("commit triton flashinfer-python", nullable(STR)),
    "cores": nullable(INT),
    "gpu": STR,
    **names("cuda driver", nullable(STR)),
}
_ON_GPU = ("gpu", "cuda", "driver")


def _row(bench: str, fields: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    return obj({"bench": constant(bench), **fields, **_MACHINE}, optional=(*optional, *_ON_GPU))


_SHAPE = obj(
    {**names("batch tokens query_heads kv_heads head_dim", INT), "ragged": BOOL},
    optional=("ragged",),  # older rows
)
_DECODE = {"shape": _SHAPE, **names("preset kernels", STR), "ms": _MS}
_DECODE_CPU = _row(
    "decode",
    {
        **_DECODE,
        "attention_ms": _MS,
        "ratios": mapping(FLOAT),
        **names("cpu isa", STR),
        "threads": INT,
    },
)
_DECODE_GPU = _row(
    "decode",
    {
        **_DECODE,
        "others_ms": _MS,
        **names("others_timed others_failed", mapping(STR)),
        **names("share_of_copy_bandwidth copy_bytes_per_s", FLOAT),
        **names("against_best_bf16 against_fp8 against_4bit", nullable(FLOAT)),
        "vllm": nullable(STR),
        "bytes_read": INT,
    },
    optional=("others_timed", "others_failed", "against_4bit", "vllm"),  # older rows
)
_STORE = _row("store", {"tokens": INT, "preset": STR, **names("ms bf16_write_ms more_us", FLOAT)})
_EXTEND = _row(
    "extend",
    {
        **names("chunk prefix", INT),
        "preset": STR,
        "others_ms": _MS,
        **names("ms against_best_bf16", FLOAT),
    },
)
_CACHE = obj(
    {
        **names("ms tokens_per_s", FLOAT),
        **names("cache_bytes peak_bytes largest_batch", INT),
    }
)
_MODEL = _row(
    "model",
    {
        "preset": STR,
        **names("batch context weights_bytes", INT),
        "model": ANYTHING,
        **names("compressed bf16", nullable(_CACHE)),
        "ratios": mapping(FLOAT),
    },
)
_LATENCY = nullable(obj(names("mean p50 p90 p99", FLOAT)))
_ENGINE = _row(
    "engine",
    {
        **names("kv model vllm unit", STR),
        "measure": {"enum": ["capacity", "prefill", "new_lengths", "tpot", "mixed"]},
        "value": nullable(FLOAT),
        "ratios": mapping(FLOAT),
        **names("blocks block_size tokens batch context decode_tokens", INT),
        "reported": nullable(INT),
        "seconds": array(one_of(FLOAT, array(FLOAT))),
        "lengths": array(INT),
        "load": obj(
            {
                **names("requests prompt_tokens output_tokens", INT),
                **names("prompt answer", array(INT)),
            }
        ),
        **names("ttft_ms tpot_ms", _LATENCY),
        "left_out": STR,
        "start_s": FLOAT,
        "arguments": ANYTHING,
        "attention": mapping(INT),
    },
    optional=(
        *("ratios", "blocks", "block_size", "tokens", "batch", "context", "decode_tokens"),
        *("reported", "seconds", "lengths", "load", "ttft_ms", "tpot_ms", "left_out"),
    ),
)
_FAILED = obj({"bench": constant("engine"), **names("kv model error", STR)})
_SERVE = obj(
    {
        "bench": constant("serve"),
        **names("server url model", STR),
        "load": obj(
            {
                **names("requests concurrency prompt_tokens output_tokens seed", INT),
                "seconds": FLOAT,
            }
        ),
        **names("completed failed out_of_time output_tokens", INT),
        "first_error": nullable(STR),
        **names("prompt_tokens preemptions", nullable(INT)),
        **names("seconds output_tokens_per_s requests_per_s", FLOAT),
        **names("ttft_ms tpot_ms", _LATENCY),
        "ratios": mapping(FLOAT),
        "client": obj(_MACHINE, optional=_ON_GPU),
    }
)

SCHEMA = obj(
    {
        "schema": constant(1),
        "rows": array(
            one_of(*(_DECODE_CPU, _DECODE_GPU, _STORE, _EXTEND, _MODEL, _ENGINE, _FAILED, _SERVE))
        ),
    }
)
