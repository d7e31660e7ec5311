"""tightkv eval --json."""

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
    one_of,
)

_VERSION = constant(2)
_PAIRED = {**names("mean reference difference", FLOAT), "stderr": nullable(FLOAT)}
_QUALITY = {
    "positions": INT,
    **names("perplexity reference_perplexity kl kl_p99 kl_p999 top1", FLOAT),
}
_WORST = obj({"kl": FLOAT, **names("text context next", STR), **names("window position", INT)})
_NEEDLES = array(
    obj(
        {
            **names("context prompt_tokens found asked", INT),
            "answers": array(obj({**names("question expected answer", STR), "found": BOOL})),
        }
    )
)
_PROBES = obj(
    {
        "log_prob": obj(_PAIRED),
        **names("top reference_top", FLOAT),
        "by_context": array(obj({"context": INT, **_PAIRED})),
        "probes": array(
            obj(
                {
                    "context": INT,
                    "expected": STR,
                    **names("depth log_prob reference", FLOAT),
                    "top": BOOL,
                }
            )
        ),
    }
)
# what each task says of a config
_TASKS = {
    "quality": obj(
        {
            **_QUALITY,
            **names("perplexity_increase ratio seconds", FLOAT),
            **names("bytes_held bytes_bf16", INT),
            "by_text": array(obj({"text": STR, **_QUALITY})),
            "worst": _WORST,
        }
    ),
    "free": obj(
        {
            "log_prob": obj(_PAIRED),
            **names("kl median", FLOAT),
            "lengths": array(INT),
            "cap": INT,
            "prompts": array(obj(names("log_prob reference own", FLOAT))),
        }
    ),
    **names("passkey recall lambada", _PROBES),
    "tools": obj(
        {
            **names("asked json valid correct", INT),
            **names("reference_json reference_valid reference_correct", INT),
            "replies": array(
                obj(
                    {
                        "context": INT,
                        **names("expected reply", STR),
                        **names("json valid correct", BOOL),
                    }
                )
            ),
        }
    ),
    "needles": _NEEDLES,
    "greedy": obj({"lengths": array(INT), "median": FLOAT, **names("min cap", INT)}),
    "gsm8k": obj(
        {
            "accuracy": obj(_PAIRED),
            "same": FLOAT,
            "replies": array(
                obj({**names("expected reply", STR), "got": nullable(STR), "correct": BOOL})
            ),
        }
    ),
}
_ROW = obj(
    {
        **names("name kernels", STR),
        "config": CONFIG,
        "bits": obj(names("key value mean", FLOAT)),
        **{task: nullable(result) for task, result in _TASKS.items()},
    }
)
_SETTINGS = obj(
    {
        "tasks": array(STR),
        **names("window windows prefill chunk batch needles depths calls", INT),
        **names("prompts prompt_tokens new_tokens seed limit shots answer_tokens", INT),
        "temperature": FLOAT,
        "contexts": array(INT),
    }
)
_MODEL = obj(
    {
        "schema": _VERSION,
        **names("time tightkv torch transformers python", STR),
        "commit": nullable(STR),
        "machine": obj({"cpu": STR, "gpu": nullable(STR), "threads": INT}),
        "model": obj({**names("name fingerprint dtype device", STR), "parameters": INT}),
        "texts": array(obj({**names("name sha256", STR), "characters": INT})),
        "settings": _SETTINGS,
        "seconds": FLOAT,
        "reference": obj({"perplexity": nullable(FLOAT), "needles": nullable(_NEEDLES)}),
        "rows": array(_ROW),
        "notes": array(STR),
    }
)

SCHEMA = one_of(_MODEL, obj({"schema": _VERSION, "models": array(_MODEL)}))
