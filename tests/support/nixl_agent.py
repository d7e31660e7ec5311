"""In the place of NIXL's agent: reads memory of another process, which serves it by a socket."""

from __future__ import annotations

import ctypes
import pickle
import socket
from multiprocessing.connection import Client, Listener
from threading import Thread
from typing import Any


class Agent:
    def __init__(self, name: str, _config: Any) -> None:
        self.name, self.listener = name, Listener()
        self.remote: dict[str, Any] = {}
        Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            Thread(target=self.answer, args=(self.listener.accept(),), daemon=True).start()

    def answer(self, connection: Any) -> None:
        while True:
            connection.send_bytes(ctypes.string_at(*connection.recv()))

    def get_agent_metadata(self) -> bytes:
        return pickle.dumps((self.name, self.listener.address))

    def add_remote_agent(self, metadata: bytes) -> str:
        name, address = pickle.loads(metadata)
        self.remote[name] = Client(address)
        return str(name)

    def get_reg_descs(self, ranges: Any, _kind: str) -> Any:
        return ranges

    def register_memory(self, _ranges: Any, backends: Any) -> None:
        pass

    def get_xfer_descs(self, blocks: Any, _kind: str) -> Any:
        return blocks.tolist()  # [address, bytes, device]

    def prep_xfer_dlist(self, agent: str, blocks: Any, mem_type: str | None = None) -> Any:
        if mem_type is not None:  # from vLLM 0.33 on: [address, bytes, device, stride, count]
            rows = blocks.tolist()
            blocks = [
                [x + i * step, n, dev] for x, n, dev, step, count in rows for i in range(count)
            ]
        return agent, blocks

    def make_prepped_xfer(
        self, kind: str, own: Any, own_ids: Any, other: Any, other_ids: Any, notif_msg: bytes
    ) -> Any:
        assert kind == "READ" and len(own_ids) == len(other_ids)
        agent, blocks = other
        pairs = zip(own_ids.tolist(), other_ids.tolist(), strict=True)
        return self.remote[agent], [(own[1][i], blocks[j]) for i, j in pairs]

    def transfer(self, handle: Any) -> None:
        connection, pairs = handle
        for (to, size, _), (address, other_size, _) in pairs:
            assert size == other_size
            connection.send((address, size))
            ctypes.memmove(to, connection.recv_bytes(), size)

    def check_xfer_state(self, _handle: Any) -> str:
        return "DONE"

    def get_xfer_telemetry(self, _handle: Any) -> None:
        return None

    def release(self, _handle: Any) -> None:
        pass

    release_xfer_handle = release_dlist_handle = deregister_memory = remove_remote_agent = release

    def send_notif(self, _agent: str, notif_msg: bytes) -> None:
        pass  # the other process keeps its blocks

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        return {}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def replace_agent() -> None:
    """In vLLM, before it imports its connector."""
    from vllm.distributed import nixl_utils

    nixl_utils.NixlWrapper, nixl_utils.nixl_agent_config = Agent, None
