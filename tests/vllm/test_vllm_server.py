"""The OpenAI server that `tightkv serve` starts: streams, broken clients, a killed worker."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiny_folder import write_tiny_folder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

START = 600  # seconds a server may take on a busy machine
CLIENTS = 32


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        text = body if isinstance(body, str) else json.dumps(body)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, text if body is not None else None, headers)
        response = connection.getresponse()
        told = response.read().decode()
        connection.close()
        return response.status, told

    def stream(self, prompt: str, tokens: int, leave_after: int | None = None) -> str:
        """The text of a streamed completion; `leave_after` so many pieces hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        body = completion(prompt, tokens, stream=True)
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response, pieces = connection.getresponse(), []
        assert response.status == 200
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                break
            if data:
                pieces.append(json.loads(data)["choices"][0]["text"])
            if leave_after is not None and len(pieces) >= leave_after:
                break
        connection.close()
        return "".join(pieces)

    def metric(self, name: str) -> float:
        _, text = self.request("GET", "/metrics")
        lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
        assert lines, f"no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def wait_until_idle(self) -> None:
        for _ in range(100):
            if self.metric("vllm:num_requests_running") == 0:
                return
            time.sleep(0.2)
        raise AssertionError("requests still run")


def completion(prompt: str, tokens: int, **options: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **options,
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = write_tiny_folder(folder / "model", max_position_embeddings=1024)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--dtype": "float32",
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": "512",
        "--max-num-seqs": "16",
        "--kv-cache-memory-bytes": str(1 << 20),
    }
    words = [word for pair in options.items() for word in pair]
    ours = ["--preset", "k4v4", "--page-size", "32", "--exact-pages", "1"]
    command = [sys.executable, "-m", "tightkv", "serve", str(model), *ours, *words]
    quiet = {"OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    quiet["TORCH_COMPILE_DISABLE"] = "1"
    log = folder / "log.txt"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--enforce-eager"],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **quiet, "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            start_new_session=True,
        )
    try:
        yield wait_for(Server(process, port, log))
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for(server: Server) -> Server:
    for _ in range(START):
        assert server.process.poll() is None, server.log.read_text()[-4000:]
        try:
            if server.request("GET", "/health")[0] == 200:
                return server
        except OSError:
            pass
        time.sleep(1)
    raise AssertionError(server.log.read_text()[-4000:])


def test_streaming_clients_get_the_text_of_one_alone_and_leak_no_block(server: Server) -> None:
    assert "tightkv k4v4" in server.log.read_text()
    prompts = [f"{i} " * (3 * i + 1) for i in range(CLIENTS)]
    alone = [server.stream(prompt, 24) for prompt in prompts[:4]]
    with ThreadPoolExecutor(CLIENTS) as clients:
        together = list(clients.map(lambda prompt: server.stream(prompt, 24), prompts))
        left = list(clients.map(lambda prompt: server.stream(prompt, 200, 3), prompts))
    assert together[:4] == alone
    assert len(set(together)) > CLIENTS // 2 and len(left) == CLIENTS
    server.wait_until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("tightkv:compression_ratio") > 3
    assert server.metric("tightkv:exact_rings") == 16
    assert server.metric("tightkv:kv_cache_used_bytes") == 0


@pytest.mark.parametrize(
    "body",
    [
        "{",
        completion("x" * 2000, 10),
        completion("x", -1),
        completion("x", 10, temperature=-1),
        {**completion("x", 10), "model": "another"},
    ],
)
def test_malformed_requests_are_refused_and_change_nothing(server: Server, body: Any) -> None:
    status, told = server.request("POST", "/v1/completions", body)
    assert 400 <= status < 500 and "error" in told
    server.stream("still here", 4)
    server.wait_until_idle()
    assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_a_killed_worker_gives_clients_an_error_and_not_silence(server: Server) -> None:
    """Last of the file: the server does not live on."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    workers = [child for child in family if "Worker" in " ".join(child.cmdline())]
    workers = workers or [child for child in family if not child.children()]
    with ThreadPoolExecutor(4) as clients:
        futures = [
            clients.submit(server.request, "POST", "/v1/completions", completion("a", 400))
            for _ in range(4)
        ]
        time.sleep(1)
        for worker in workers:
            worker.kill()
        for future in futures:
            try:
                status, _ = future.result(timeout=120)
                assert status >= 500 or status == 200  # 200: it was done before the kill
            except (OSError, http.client.HTTPException):
                pass  # the connection was closed, not left open
    assert server.process.wait(120) is not None
