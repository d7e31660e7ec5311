"""What every command prints with --json, field by field.

A key names one field or several of one kind, with spaces between; one that ends in ? may be absent.
A kind is "int", "float", "str", "bool" or "object" (of any keys), with ? for null as well; a number
or "=word" is a constant. {} is an object of just these keys, {"*": kind} one of any keys, [kind] a
list, [kind, kind] a pair, and (one, other) either of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tightkv.config import KVQuantConfig

_KINDS = {bool: "bool", int: "int", float: "float", str: "str", tuple: ["int"]}
CONFIG = {field.name: _KINDS[type(field.default)] for field in dataclasses.fields(KVQuantConfig)}
"""Every field of a KVQuantConfig."""

# --- bench: a row is one of these ---
_FLOATS = {"*": "float"}
_MACHINE = {
    "time tightkv torch python machine device gpu?": "str",
    "commit triton flashinfer-python cuda? driver?": "str?",
    "cores": "int?",
}
_SHAPE = {"batch tokens query_heads kv_heads head_dim": "int", "ragged?": "bool"}
_DECODE = {"bench": "=decode", "shape": _SHAPE, "preset kernels": "str", "ms": _FLOATS, **_MACHINE}
_DECODE_CPU = {
    **_DECODE,
    "attention_ms ratios": _FLOATS,
    "cpu isa": "str",
    "threads": "int",
}
_DECODE_GPU = {  # older rows have fewer fields
    **_DECODE,
    "others_ms": _FLOATS,
    "others_timed? others_failed?": {"*": "str"},
    "share_of_copy_bandwidth copy_bytes_per_s": "float",
    "against_best_bf16 against_fp8 against_4bit?": "float?",
    "vllm?": "str?",
    "bytes_read": "int",
}
_STORE = {
    "bench": "=store",
    "tokens": "int",
    "preset": "str",
    "ms bf16_write_ms more_us": "float",
    **_MACHINE,
}
_EXTEND = {
    "bench": "=extend",
    "chunk prefix": "int",
    "preset": "str",
    "others_ms": _FLOATS,
    "ms against_best_bf16": "float",
    **_MACHINE,
}
_CACHE = {"ms tokens_per_s": "float", "cache_bytes peak_bytes largest_batch": "int"}
_MODEL = {
    "bench": "=model",
    "preset": "str",
    "batch context weights_bytes": "int",
    "model": "object",
    "compressed bf16": (_CACHE, None),
    "ratios": _FLOATS,
    **_MACHINE,
}
_LATENCY = ({"mean p50 p90 p99": "float"}, None)
_ENGINE = {
    "bench": "=engine",
    "kv model vllm unit": "str",
    "measure": ("=capacity", "=prefill", "=new_lengths", "=tpot", "=mixed"),
    "value": "float?",
    "ratios?": _FLOATS,
    "blocks? block_size? tokens? batch? context? decode_tokens?": "int",
    "reported?": "int?",
    "seconds?": [("float", ["float"])],
    "lengths?": ["int"],
    "load?": {"requests prompt_tokens output_tokens": "int", "prompt answer": ["int"]},
    "ttft_ms? tpot_ms?": _LATENCY,
    "left_out?": "str",
    "start_s": "float",
    "arguments": "object",
    "attention": {"*": "int"},
    **_MACHINE,
}
_FAILED_ENGINE = {"bench": "=engine", "kv model error": "str"}
_SERVE = {
    "bench": "=serve",
    "server url model": "str",
    "load": {
        "requests concurrency prompt_tokens output_tokens seed": "int",
        "seconds": "float",
    },
    "completed failed out_of_time output_tokens": "int",
    "first_error": "str?",
    "prompt_tokens preemptions": "int?",
    "seconds output_tokens_per_s requests_per_s": "float",
    "ttft_ms tpot_ms": _LATENCY,
    "ratios": _FLOATS,
    "client": _MACHINE,
}
_BENCH = (
    *(_DECODE_CPU, _DECODE_GPU, _STORE, _EXTEND, _MODEL),
    *(_ENGINE, _FAILED_ENGINE, _SERVE),
)

# --- eval ---
_PAIRED = {"mean reference difference": "float", "stderr": "float?"}
_QUALITY = {"positions": "int", "perplexity reference_perplexity kl kl_p99 kl_p999 top1": "float"}
_NEEDLES = [
    {
        "context prompt_tokens found asked": "int",
        "answers": [{"question expected answer": "str", "found": "bool"}],
    }
]
_PROBE = {
    "context": "int",
    "expected": "str",
    "depth log_prob reference": "float",
    "top": "bool",
}
_PROBES = {
    "log_prob": _PAIRED,
    "top reference_top": "float",
    "by_context": [{"context": "int", **_PAIRED}],
    "probes": [_PROBE],
}
_TASKS: dict[str, Any] = {  # what each task says of a config
    "quality": {
        **_QUALITY,
        "perplexity_increase ratio seconds": "float",
        "bytes_held bytes_bf16": "int",
        "by_text": [{"text": "str", **_QUALITY}],
        "worst": {"kl": "float", "text context next": "str", "window position": "int"},
    },
    "free": {
        "log_prob": _PAIRED,
        "kl median": "float",
        "lengths": ["int"],
        "cap": "int",
        "prompts": [{"log_prob reference own": "float"}],
    },
    "passkey recall lambada": _PROBES,
    "tools": {
        "asked json valid correct reference_json reference_valid reference_correct": "int",
        "replies": [{"context": "int", "expected reply": "str", "json valid correct": "bool"}],
    },
    "needles": _NEEDLES,
    "greedy": {"lengths": ["int"], "median": "float", "min cap": "int"},
    "gsm8k": {
        "accuracy": _PAIRED,
        "same": "float",
        "replies": [{"expected reply": "str", "got": "str?", "correct": "bool"}],
    },
}
_EVALUATED = {
    "schema": 2,
    "time tightkv torch transformers python": "str",
    "commit": "str?",
    "machine": {"cpu": "str", "gpu": "str?", "threads": "int"},
    "model": {"name fingerprint dtype device": "str", "parameters": "int"},
    "texts": [{"name sha256": "str", "characters": "int"}],
    "settings": {
        "tasks": ["str"],
        "window windows prefill chunk batch needles depths calls": "int",
        "prompts prompt_tokens new_tokens seed limit shots answer_tokens": "int",
        "temperature": "float",
        "contexts": ["int"],
    },
    "seconds": "float",
    "reference": {"perplexity": "float?", "needles": (_NEEDLES, None)},
    "rows": [
        {
            "name kernels": "str",
            "config": CONFIG,
            "bits": {"key value mean": "float"},
            **{task: (result, None) for task, result in _TASKS.items()},
        }
    ],
    "notes": ["str"],
}

# --- plan ---
_LAYERS = {
    "kind": "str",
    "count num_kv_heads head_dim value_head_dim latent_dim index_bytes": "int",
    "window state_bytes": "int?",
    "compressed": "bool",
    "skip_reason": "str?",
}
_PLAN = {
    "schema": 1,
    "tightkv": "str",
    "model": {
        "name model_type dtype": "str",
        "num_layers num_heads hidden_size": "int",
        "max_positions": "int?",
        "layers": [_LAYERS],
    },
    "context batch tp": "int",
    "weights": ({"bytes": "int", "dtype": "str?", "source": "str"}, None),
    "memory": (
        {"budget_bytes cache_bytes": "int", "gpu": "str?", "utilization": "float"},
        None,
    ),
    "rows": [
        {
            "name": "str",
            "key_bits value_bits": "int?",
            "bytes_per_token": "float",
            "bytes_per_token_per_layer ratio total_ratio": "float?",
            "total_bytes": "int",
            "max_tokens max_requests": "int?",
        }
    ],
    "notes": ["str"],
}

# --- calibrate, doctor, generate, validate ---
_COSTS = {"layer": "int", "key_kl value_kl": _FLOATS}
_GENERATED = {
    "cache attention": "str",
    "answers": [{"text": "str", "prompt_tokens new_tokens": "int"}],
    "timing": {
        "prefill_seconds decode_seconds": "float",
        "prefill_tokens_per_second decode_tokens_per_second": "float?",
    },
    "kv": {
        "tokens bytes bf16_bytes compressed_layers exact_layers other_layers": "int",
        "ratio bytes_per_token bf16_bytes_per_token long_ratio": "float",
        "break_even_tokens": "int?",
    },
}
_COMPARED = {
    "shared_tokens scored_tokens": "int",
    "equal": "bool",
    "divergence_token": "int?",
    "before uncompressed compressed": "str",
    "mean_kl": "float?",
}
_NEEDLE = {
    "fact question expected": "str",
    "depth": "float",
    "answers": [{"text": "str", "found": "bool"}],
}
_DETAIL = {"*": "float?"}

RESULTS: dict[str, Any] = {
    "bench": {"schema": 1, "rows": [_BENCH]},
    "calibrate": {
        "schema": 1,
        "file model fingerprint tightkv": "str",
        "bytes tokens": "int",
        "texts": [{"name sha256": "str"}],
        "layer_bits": {"*": "str"},
        "layers": [_COSTS],
    },
    "completion": {"schema": 1, "words choices": {"*": ["str"]}},
    "doctor": {
        "schema": 1,
        "tightkv": "str",
        "budget bytes_per_token_bf16": "float",
        "interrupted": "bool",
        "chosen": "str?",
        "kv_quant": (CONFIG, None),
        "uniform": ({"name": "str", "bytes_per_token kl": "float", "measured": "bool"}, None),
        "tried": [
            {
                "name layer_bits": "str",
                "predicted_kl": "float?",
                "kl top1 bytes_per_token": "float",
                "within": "bool",
            }
        ],
        "layers": [
            {**_COSTS, "mean_share outlier_head key_bias": "float?", "warnings": ["str"]},
        ],
    },
    "eval": (_EVALUATED, {"schema": 2, "models": [_EVALUATED]}),
    "export": {
        "schema": 1,
        "kind dtype device torch tightkv folder": "str",
        "max_tokens cache_bytes format file_bytes": "int",
        "stop_tokens": ["int"],
        "config": CONFIG,
        "seconds": "float",
    },
    "generate": {
        "schema": 1,
        "tightkv torch transformers": "str",
        "model": {"name dtype device": "str"},
        "config": CONFIG,
        "sampling": {"temperature": "float", "top_p": "float?", "top_k": "int?", "seed": "int"},
        "runs": [_GENERATED],
        "compare": (_COMPARED, None),
        "needle": (_NEEDLE, None),
    },
    "info": {
        "schema": 1,
        "tightkv python platform": "str",
        "packages": [{"name": "str", "version install": "str?"}],
        "cpu": {"model": "str", "logical_cores usable_cores": "int?", "simd": ["str"]},
        "devices": [{"type name capability": "str", "index memory_bytes": "int"}],
        "kernels": [{"name reason": "str", "usable": "bool"}],
        "errors": ["str"],
    },
    "plan": (_PLAN, {"schema": 1, "html": "str"}),
    "run": {
        "schema": 1,
        "text": "str",
        "prompt_tokens new_tokens": "int",
        "tokens": ["int"],
        "prefill_seconds decode_seconds": "float",
    },
    "serve": {"schema": 1, "tightkv": "str", "command": ["str"], "kv_quant": (CONFIG, None)},
    "validate": {
        "schema": 1,
        "seed dim failed_claims": "int",
        "quick passed": "bool",
        "seconds": "float",
        "claims": [
            {
                "section claim setting": "str",
                "measured lower upper": "float?",
                "interval": (["float", "float"], None),
                "passed": "bool",
                "detail": _DETAIL,
            }
        ],
        "audit": [
            {"what setting unit reading": "str", "measured": "float?", "detail": _DETAIL},
        ],
    },
}
