"""KV connectors that cannot move our pages, refused by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from tightkv.integrations.vllm.options import engine_options

# They find blocks by vLLM's block hashes, which `start.engine_core` separates by format.
_BY_BLOCK_HASH = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")
_MODULES = "kv_connector_module_path=tightkv.integrations.vllm.connectors"
_OURS = f"TightNixlConnector with {_MODULES}.nixl"
_REASONS = {
    "ExampleConnector": "it copies single tokens of a block, and a page cannot be taken apart",
    "LMCacheConnectorV1": (
        "it copies keys and values of single tokens, and a page cannot be taken apart"
    ),
    "LMCacheMPConnector": (
        "it finds blocks by token ids and the model's name, so that pages of another format would "
        "be read, and loads more than ends before an exact window; use TightLMCacheConnector with "
        f"{_MODULES}.lmcache"
    ),
    "NixlConnector": f"its handshake does not compare formats of pages; use {_OURS}",
    "NixlPullConnector": f"its handshake does not compare formats of pages; use {_OURS}",
    "NixlPushConnector": (
        "the sender takes its blocks from the end of a prompt, and pages are taken up to the exact "
        f"window; use {_OURS}"
    ),
}
_OTHER = (
    "it compares neither presets nor calibrations, so that pages of another format could be read"
)
_KNOWN_MODULES = ("vllm", "lmcache")


def check_connectors(transfer: Any) -> None:
    """Refuse connectors that cannot move pages; `transfer` is an engine's kv_transfer_config."""
    if transfer is None:
        return
    names = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    for name in _named({name: getattr(transfer, name) for name in names}):
        if name not in _BY_BLOCK_HASH:
            raise ValueError(
                f"tightkv with the KV connector {name}: {_REASONS.get(name, _OTHER)}; supported: "
                f"{', '.join(_BY_BLOCK_HASH)}, and your own (kv_connector_module_path) that find "
                "blocks by their block hashes"
            )


def check_use(name: str, instead: str, vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse engines that cannot have our connector `name`; `instead` is the one without us."""
    if engine_options(vllm_config.additional_config) is None:
        raise ValueError(
            f"{name} in an engine without tightkv: use {instead}, without kv_connector_module_path"
        )
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # A group of layers of different sizes has a spec for each.
    each = [next(iter(getattr(spec, "kv_cache_specs", {0: spec}).values())) for spec in specs]
    kinds = [type(spec).__name__ for spec in each]
    if kinds != ["FullAttentionSpec"]:
        raise ValueError(
            f"{name} with caches of {', '.join(kinds)}: pages of full attention alone are read; "
            "leave the connector or tightkv out"
        )


def _named(given: Mapping[str, Any]) -> Iterator[str]:
    """Connectors of vLLM and LMCache, one by one."""
    name = given.get("kv_connector")
    module = given.get("kv_connector_module_path") or _KNOWN_MODULES[0]
    if name == "MultiConnector":
        for one in given.get("kv_connector_extra_config", {}).get("connectors", ()):
            yield from _named(one)
    elif name is not None and module.partition(".")[0] in _KNOWN_MODULES:
        yield name
