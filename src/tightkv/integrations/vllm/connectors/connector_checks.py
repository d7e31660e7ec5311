"""KV connectors that cannot move our pages, refused by name."""

from collections.abc import Iterator, Mapping
from typing import Any

# They find blocks by vLLM's block hashes, which `store_keys` separates by format.
_BY_BLOCK_HASH = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")
_OURS = "TightNixlConnector with kv_connector_module_path=tightkv.integrations.vllm.connectors.nixl"
_REASONS = {
    "ExampleConnector": "it copies single tokens of a block, and a page cannot be taken apart",
    "LMCacheConnectorV1": (
        "it copies keys and values of single tokens, and a page cannot be taken apart"
    ),
    "LMCacheMPConnector": (
        "it finds blocks by token ids and the model's name, so that pages of another format would "
        "be read, and loads more than ends before an exact window"
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


def _named(given: Mapping[str, Any]) -> Iterator[str]:
    """Connectors of vLLM and LMCache, one by one."""
    name = given.get("kv_connector")
    module = given.get("kv_connector_module_path") or _KNOWN_MODULES[0]
    if name == "MultiConnector":
        for one in given.get("kv_connector_extra_config", {}).get("connectors", ()):
            yield from _named(one)
    elif name is not None and module.partition(".")[0] in _KNOWN_MODULES:
        yield name
