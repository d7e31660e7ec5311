"""A page in headless Chromium, driven over the WebDriver protocol by chromedriver."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

# Nothing of the browser's own goes to the network.
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One session; `close` ends the browser and its driver."""

    def __init__(self, folder: Path) -> None:
        driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
        if driver is None or chromium is None:
            pytest.skip("no Chromium: install the packages chromium and chromium-driver")
        log = folder / "chromedriver.log"
        self._driver = subprocess.Popen([driver, "--port=0", f"--log-path={log}"], stdout=-1)
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            if b"started successfully on port" in line:
                port = int(line.split()[-1].rstrip(b"."))
                break
        else:
            raise RuntimeError(f"chromedriver did not start: {log.read_text()}")
        self._url = f"http://127.0.0.1:{port}"
        flags = [*_FLAGS, f"--user-data-dir={folder / 'profile'}"]
        options = {"args": flags, "binary": chromium}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._send("POST", "/session", capabilities={"alwaysMatch": wanted})
        self._url += f"/session/{made['sessionId']}"

    def _send(self, method: str, path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if method == "POST" else None
        request = urllib.request.Request(self._url + path, data, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait()

    def open(self, url: str) -> None:
        self._send("POST", "/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """The value that a function with this body and `arguments` returns."""
        return self._send("POST", "/execute/sync", script=script, args=args)

    def _element(self, css: str) -> str:
        found = self._send("POST", "/element", using="css selector", value=css)
        return f"/element/{found[_ELEMENT]}"

    def choose(self, css: str, text: str) -> None:
        """Take the option with this text of a select."""
        options = self.run(
            "return [...document.querySelector(arguments[0]).options].map((o) => o.text)", css
        )
        number = options.index(text) + 1
        self._send("POST", self._element(f"{css} option:nth-of-type({number})") + "/click")

    def type(self, css: str, text: str) -> None:
        """Write into a field in place of what it holds."""
        element = self._element(css)
        self._send("POST", element + "/clear")
        self._send("POST", element + "/value", text=text)

    def text(self, css: str) -> str:
        return str(self._send("GET", self._element(css) + "/text"))

    def width(self, pixels: int, mobile: bool = False) -> None:
        metrics = {"width": pixels, "height": 900, "deviceScaleFactor": 1, "mobile": mobile}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics}
        self._send("POST", "/goog/cdp/execute", **command)
        time.sleep(0.2)  # the page draws again after a resize

    def screenshot(self, path: Path) -> None:
        whole = {"cmd": "Page.captureScreenshot", "params": {"captureBeyondViewport": True}}
        path.write_bytes(base64.b64decode(self._send("POST", "/goog/cdp/execute", **whole)["data"]))

    def errors(self) -> list[str]:
        """What the console has been told since the last call."""
        return [entry["message"] for entry in self._send("POST", "/se/log", type="browser")]
