"""A real Chromium without a window, driven over the pipe of its DevTools protocol: no driver, no library.

The protocol is JSON with a NUL behind each message; Chromium reads descriptor 3 and writes 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
WAIT_S = 60.0


def needs_chromium() -> str:
    """The program. Skips the test if there is none, unless COMMPLAN_CHROMIUM=1: then it fails."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        if os.environ.get("COMMPLAN_CHROMIUM") == "1":
            pytest.fail("COMMPLAN_CHROMIUM=1, and Chromium is not installed")
        pytest.skip("Chromium is not installed")
    return program


class Browser:
    """One tab. `errors`: the errors of the page; `requests`: the requested addresses."""

    def __init__(self, program: str, profile: Path) -> None:
        to_chromium, from_chromium = os.pipe(), os.pipe()
        # Above all numbers that the copies take.
        ends = (to_chromium[0], from_chromium[1])
        read_end, write_end = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in ends)
        quiet = os.open(os.devnull, os.O_RDWR)
        actions = [
            (os.POSIX_SPAWN_DUP2, quiet, 0), (os.POSIX_SPAWN_DUP2, quiet, 1), (os.POSIX_SPAWN_DUP2, quiet, 2),
            (os.POSIX_SPAWN_DUP2, read_end, 3), (os.POSIX_SPAWN_DUP2, write_end, 4),
        ]  # fmt: skip
        words = [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self.process = os.posix_spawn(program, words, os.environ, file_actions=actions, setsid=True)
        for fd in (*ends, read_end, write_end, quiet):
            os.close(fd)
        self._write, self._read = to_chromium[1], from_chromium[0]
        self._rest, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._session = ""
            self.call("Browser.close")
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to `method`; events that arrive before it are stored."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        limit = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0.0, limit - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            data = os.read(self._read, 1 << 16)
            if not data:
                raise TimeoutError("Chromium has ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._keep(message.get("method", ""), message.get("params", {}))
        return message

    def _keep(self, method: str, event: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = event["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "warning", "assert"):
                self.errors.append(str(event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] in ("error", "warning"):
                self.errors.append(event["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(event["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True
            case "Inspector.targetCrashed":
                raise RuntimeError("the page's process has crashed; nothing answers for it any more")
            case _:
                pass

    def open(self, page: Path | str, width: int = 1400, height: int = 900, *, dark: bool = False) -> float:
        """Load a file, or an address; the seconds until it is drawn."""
        self.size(width, height)
        self.media(dark=dark)
        self.errors.clear()
        self.requests.clear()
        self._loaded, begin = False, time.monotonic()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        while not self._loaded:
            self._next()
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - begin

    def size(self, width: int, height: int) -> None:
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **screen)

    def media(self, *, dark: bool = False, kind: str = "screen") -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def center(self, selector: str) -> tuple[float, float]:
        """The center of the first element that matches `selector`, scrolled into view."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center', inline: 'nearest'}); const r = e.getBoundingClientRect();"
            " return [r.left + r.width / 2, r.top + r.height / 2]; })()"
        )
        assert place is not None, f"nothing matches {selector}"
        return place[0], place[1]

    def point(self, selector: str) -> None:
        x, y = self.center(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.center(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)
        self.run("new Promise((done) => setTimeout(done))")

    def press(self, key: str, *, shift: bool = False) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39,
                 "ArrowDown": 40}  # fmt: skip
        named: dict[str, Any] = {"key": key, "modifiers": 8 if shift else 0}
        named["windowsVirtualKeyCode"] = codes.get(key, ord(key[0]))
        text = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def screenshot(self, file: Path, *, whole: bool = False) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser(profile: Path) -> Generator[Browser]:
    """A Chromium with the empty profile `profile`; it ends with the block."""
    tab = Browser(needs_chromium(), profile)
    try:
        yield tab
    finally:
        tab.close()
