"""Drives a headless Chromium over its DevTools pipe (file descriptors 3 and 4), with the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
)


class PageError(Exception):
    """The page threw, or did not get there in time."""


class Page:
    """One tab. `console` holds errors and exceptions, `requests` every address that the page asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def size(self, width: int, height: int, phone: bool = False, dark: bool = False) -> None:
        """Set the viewport, and whether the reader prefers dark colours."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self._send("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.requests.clear()
        self.console.clear()
        self._send("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression (promises are awaited)."""
        answer = self._send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise PageError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 90.0) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            if value := self.evaluate(script):
                return value
            time.sleep(0.25)
        raise PageError(f"not true after {timeout_s} s: {script}; console: {self.console[:5]}")

    def press(self, key: str, code: str = "") -> None:
        """Press a key, such as "Tab" or "Enter"."""
        text = {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}
        for kind in ("keyDown", "keyUp"):
            extra = text if kind == "keyDown" else {}
            self._send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=code or key,
                windowsVirtualKeyCode=codes[key],
                **extra,
            )

    def screenshot(self, file: Path, whole: bool = False) -> None:
        data = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(data))

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        while True:
            answer = self._next(60.0)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise PageError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._event(answer)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._answers], [], [], timeout_s)[0]:
                raise PageError("the browser does not answer")
            data = os.read(self._answers, 1 << 20)
            if not data:
                raise PageError("the browser has ended")
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))

    def _event(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        method = message.get("method")
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.console.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))


@contextmanager
def chromium() -> Iterator[Page]:
    """A page in a fresh browser with a profile of its own; the browser ends with the block."""
    assert BINARY is not None
    ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in _two_pipes()]
    read_commands, write_commands, read_answers, write_answers = ends
    profile = tempfile.mkdtemp(prefix="chromium-")
    launch = f'exec 3<&{read_commands} 4>&{write_answers}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", launch, "_", BINARY, *_FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Page(write_commands, read_answers)
    finally:
        os.close(write_commands)
        os.close(read_answers)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _two_pipes() -> Iterator[int]:
    for _ in range(2):
        ends = os.pipe()
        yield from ends
        for fd in ends:
            os.close(fd)
