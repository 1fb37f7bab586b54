"""A headless Chromium, driven over a pipe: what a page asks of the network, says and looks like.

No package is needed: `--remote-debugging-pipe` takes and gives JSON, each ended by a zero byte, on
file descriptors 3 and 4 (Chrome DevTools Protocol).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def find() -> str | None:
    """The browser's path, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. `requests`: addresses asked for; `complaints`: errors that the console got."""

    def __init__(self, write: int, read: int):
        self._out, self._in = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        self._count, self._rest = 0, b""
        self._session: str | None = None
        self._loaded = False
        self.requests: list[str] = []
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Asks the browser; its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._next()).get("id") != self._count:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def look(self, *, width: int = 1280, dark: bool = False, media: str = "", script: bool = True):
        """How the page is seen from now on."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=width < 500)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.send("Emulation.setScriptExecutionDisabled", value=not script)

    def open(self, path: Path) -> None:
        """Loads a file, to the end."""
        self._loaded = False
        self.requests, self.complaints = [], []
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key that is pressed where the focus is."""
        text = {"text": "\r"} if key == "Enter" else {}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def screenshot(self, path: Path) -> None:
        """The whole page, as PNG."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in.fileno(), 1 << 16)
            assert more, "the browser went away"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        event = json.loads(message)
        self._note(event.get("method"), event.get("params", {}))
        return event

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Page.loadEventFired":
            self._loaded = True

    def close(self) -> None:
        """Lets the pipes go."""
        self._out.close()
        self._in.close()


def _high(descriptor: int) -> int:
    """The same behind a number that is not 3 or 4."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


@contextmanager
def browsing(browser: str, profile: Path) -> Iterator[Page]:
    """A tab of a browser of its own, with an empty profile."""
    to_read, to_write, from_read, from_write = map(_high, (*os.pipe(), *os.pipe()))
    # A shell puts the pipes where the browser looks for them.
    shell = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write} {to_read}<&- {from_write}>&-'
    process = subprocess.Popen(
        ["bash", "-c", shell, browser, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    page = None
    try:
        page = Page(to_write, from_read)
        yield page
    finally:
        if page:
            page.close()  # a browser whose pipe ends, ends
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
