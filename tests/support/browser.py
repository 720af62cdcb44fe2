# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from time_limits import HANG_LIMIT_S


def find_chromium() -> str | None:
    """The path of Chromium or Chrome; None if there is none."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page in a browser of its own, until the `with` block ends.

    Attributes:
        problems: What the browser complained of: errors of scripts, refusals of the page's policy,
            and responses with an error.
        urls: All that the page has asked for.
    """

    def __init__(self, executable: str) -> None:
        self._executable = executable
        self._number = 0
        self._session: str | None = None
        self._buffer = b""
        self.problems: list[str] = []
        self.urls: list[str] = []

    def __enter__(self) -> Browser:
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            profile = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            from_us, self._to_browser = os.pipe()
            self._from_browser, from_browser = os.pipe()
            stack.callback(os.close, self._to_browser)
            stack.callback(os.close, self._from_browser)
            # The browser reads descriptor 3 and writes descriptor 4.
            command = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
            options = [
                *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}"),
                *(
                    "--disable-background-networking",
                    "--disable-component-update",
                    "--disable-sync",
                ),
                *("--hide-scrollbars", "--force-device-scale-factor=1"),
            ]
            self._process = subprocess.Popen(
                [
                    *("bash", "-c", command, "bash", str(from_us), str(from_browser)),
                    *(self._executable, *options),
                ],
                env=os.environ | {"TMPDIR": profile},  # it leaves folders there
                pass_fds=(from_us, from_browser),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            os.close(from_us)
            os.close(from_browser)
            stack.callback(self._process.wait)
            stack.callback(self._process.kill)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.call(f"{domain}.enable")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and waits for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + HANG_LIMIT_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from_browser], [], [], max(left, 0))
            assert ready, "the browser says nothing"
            data = os.read(self._from_browser, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        """Opens a page."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def all(self, selector: str, value: str) -> list[Any]:
        """The values of an expression of `e`, each element that a selector finds."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return list(self.run(f"{found}.map((e) => {value})"))

    def wait_for(self, script: str) -> Any:
        """Waits until an expression is true; returns its value."""
        deadline = time.monotonic() + HANG_LIMIT_S
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, (
                script,
                self.problems,
                self.run("document.body.innerText"),
            )
            time.sleep(0.02)
        return value

    def press(self, key: str, *, ctrl: bool = False, text: str | None = None) -> None:
        """Presses a key, as a user does."""
        code = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37}.get(key, 0)
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        if text is not None:
            common["text"] = text
        self.call("Input.dispatchKeyEvent", type="keyDown", **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def set_scheme(self, scheme: str) -> None:
        """Prefers "light" or "dark"."""
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )

    def set_size(self, width: int, height: int, scale: float = 1) -> None:
        """Sets the size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
