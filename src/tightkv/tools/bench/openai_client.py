"""A client for OpenAI-compatible servers with the standard library: what a benchmark needs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

_OPENER = build_opener(ProxyHandler({}))  # a proxy would be measured as well


class ServerError(Exception):
    """The server's answer is an error, or not an answer."""


@dataclass(frozen=True)
class Answer:
    """Seconds from sending to the first and the last token, and how many tokens there were."""

    first: float
    last: float
    tokens: int
    prompt_tokens: int | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds between two tokens; None where there are not two."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True)
class Server:
    """A server by its base URL, without /v1."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Server:
        """NAME=URL, or a URL alone, which is named after its host and port."""
        name, equals, url = text.partition("=")
        if not equals or "://" in name:
            name, url = "", text
        parts = urlsplit(url)
        try:
            wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
        except ValueError:  # a port that is not a number
            wrong = True
        if wrong:
            raise ValueError(f"server {text!r}; give NAME=http://HOST:PORT")
        return cls(name or parts.netloc, url.rstrip("/").removesuffix("/v1"))

    def get(self, path: str, timeout: float = 10.0) -> str:
        """The body of a 200 answer."""
        with self._ask(path, timeout) as response:
            return str(response.read().decode("utf-8", errors="replace"))

    def models(self) -> list[str]:
        """Names under which models are served."""
        try:
            return [str(entry["id"]) for entry in json.loads(self.get("/v1/models"))["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"GET /v1/models: not a list of models ({error!r})") from None

    def complete(self, body: Mapping[str, Any], deadline: float) -> Answer:
        """Stream a completion; TimeoutError past `deadline` (time.perf_counter)."""
        start = time.perf_counter()
        first = last = None
        pieces = 0
        usage: dict[str, Any] = {}
        with self._ask("/v1/completions", max(0.001, deadline - start), body) as response:
            for event in events(response):
                now = time.perf_counter()
                if now > deadline:
                    raise TimeoutError
                if "error" in event:
                    raise ServerError(_message(json.dumps(event)))
                if event.get("choices"):
                    first, last, pieces = first or now, now, pieces + 1
                usage = event.get("usage") or usage
        if first is None or last is None:
            raise ServerError("the stream ended without a token")
        tokens = usage.get("completion_tokens", pieces)
        return Answer(first - start, last - start, tokens, usage.get("prompt_tokens"))

    def _ask(self, path: str, timeout: float, body: Mapping[str, Any] | None = None) -> Any:
        """The response to a POST of `body`, or to a GET without one."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            return _OPENER.open(request, timeout=timeout)
        except HTTPError as error:
            what = f"GET {path}: " if body is None else ""
            text = error.read().decode("utf-8", errors="replace")
            raise ServerError(f"{what}{error.code} {_message(text)}") from None
        except URLError as error:  # wraps what went wrong
            raise (error.reason if isinstance(error.reason, OSError) else error) from None


def events(lines: Any) -> Iterator[dict[str, Any]]:
    """JSON objects of a stream of server-sent events, to its [DONE]."""
    for line in lines:
        field, _, data = line.decode("utf-8").strip().partition(":")
        if field != "data":
            continue
        if data.strip() == "[DONE]":
            return
        try:
            yield json.loads(data)
        except json.JSONDecodeError:
            raise ServerError(f"not JSON in the stream: {data[:200]!r}") from None
    raise ServerError("the stream broke off before [DONE]")


def metric(text: str, name: str) -> float | None:
    """The sum of a counter over its labels in Prometheus' text format; None if there is none."""
    pattern = rf"^{re.escape(name)}(?:_total)?(?:\{{.*\}})? (\S+)"
    found = re.findall(pattern, text, flags=re.MULTILINE)
    return sum(map(float, found)) if found else None


def _message(body: str) -> str:
    """The message of an error answer, in whichever form servers give it."""
    try:
        data = json.loads(body)
        error = data.get("error", data)
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, AttributeError):
        return body[:200]
