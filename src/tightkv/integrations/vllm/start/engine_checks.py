"""What cannot work together with an engine's options, refused at start."""

from typing import Any

from tightkv.integrations.vllm.connectors.connector_checks import check_connectors
from tightkv.integrations.vllm.options import EngineOptions
from tightkv.pages.layout import RING_SLACK

_DRAFTS = {
    "dflash": "its drafts attend in both directions, and are written to the cache elsewhere",
    "dspark": "its drafts attend in both directions, and are written to the cache elsewhere",
    "gemma4_mtp": "its layers read the cache of the model's layers",
}
_OWN_KERNELS = ("Flint", "Step5")  # beginnings of architectures' names
WAITS_FOR_DEVICE = (
    "tightkv: no CUDA graphs, check_finite waits for the device; leave it out to have them"
)


def check_engine_options(options: EngineOptions, vllm_config: Any) -> None:
    """Raise at start what could only go wrong later."""
    cfg, cache, parallel = options.config, vllm_config.cache_config, vllm_config.parallel_config
    if cache.cache_dtype not in ("auto", "bfloat16", "float16"):
        raise ValueError(
            f"tightkv with --kv-cache-dtype {cache.cache_dtype}: both would compress the cache; "
            "leave --kv-cache-dtype at auto, set it to bfloat16 if the checkpoint asks for "
            "another, or leave tightkv out"
        )
    if cache.user_specified_block_size and cache.block_size != cfg.page_size:
        raise ValueError(
            f"tightkv with --block-size {cache.block_size}: a block is a page of "
            f"{cfg.page_size} tokens; leave --block-size out or set page_size to it"
        )
    if cache.prefix_match_unit is not None and cache.prefix_match_unit % cfg.page_size:
        raise ValueError(
            f"tightkv with --prefix-match-unit {cache.prefix_match_unit}: prefixes end at pages of "
            f"{cfg.page_size} tokens; leave it out or set a multiple of {cfg.page_size}"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise ValueError(
            f"tightkv with {', '.join(vllm_config.model_config.architectures)}: encoder-decoder "
            "models are not supported; leave tightkv out"
        )
    for name in vllm_config.model_config.architectures:
        if name.startswith(_OWN_KERNELS):
            raise ValueError(
                f"tightkv with {name}: the model's own kernels write and read vLLM's cache, past "
                "its attention layers; leave tightkv out"
            )
    if getattr(vllm_config.model_config, "rswa_window", None) is not None:
        raise ValueError("tightkv with reference sliding windows (rswa_window): not supported")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (ranks := getattr(parallel, name, 1)) > 1:
            raise ValueError(
                f"tightkv with {name}={ranks}: each rank would hold scattered tokens of a "
                "sequence, and a page, its mean and the exact window are of consecutive ones; "
                "leave it at 1, and use tensor parallelism"
            )
    count = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    beyond = max(cfg.bits_of_layers(), default=0)
    if count is not None and beyond >= count:
        raise ValueError(
            f"tightkv: layer_bits={cfg.layer_bits!r} names layer {beyond}; the model has layers 0 "
            f"to {count - 1}"
        )
    speculative = vllm_config.speculative_config
    is_gemma = getattr(speculative, "use_gemma4_mtp", bool)()
    draft = "gemma4_mtp" if is_gemma else getattr(speculative, "method", None) or ""
    if (why := _DRAFTS.get(draft)) is not None:
        raise ValueError(
            f"tightkv with speculation by {draft}: {why}; choose another method (ngram, eagle, "
            "eagle3, mtp, draft_model), or leave speculation or tightkv out"
        )
    if getattr(speculative, "enable_adaptive_verification", False):
        raise ValueError(
            "tightkv with adaptive verification: vLLM decides on the device how many drafts of a "
            "sequence are checked, and the batch is planned on the host; leave "
            "enable_adaptive_verification out of --speculative-config"
        )
    check_connectors(vllm_config.kv_transfer_config)
    tokens = speculative_tokens(vllm_config)
    if tokens > RING_SLACK:
        raise ValueError(f"tightkv with {tokens} speculative tokens; supported: up to {RING_SLACK}")


def rings_obstacle(vllm_config: Any) -> str | None:
    """Why no sequence of an engine can have a ring; None where they can."""
    if vllm_config.cache_config.prefix_match_unit is not None:
        return "with --prefix-match-unit vLLM copies blocks without the plugin's knowledge"
    return None


def speculative_tokens(vllm_config: Any) -> int:
    """Tokens a sequence may decode beyond the one that is certain."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else speculative.num_speculative_tokens or 0
