"""Headless Chromium, driven over its DevTools pipe (--remote-debugging-pipe): no other package.

Messages are JSON objects that end in a zero byte: commands go to the browser's descriptor 3, its
answers and events come from descriptor 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import pytest

_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-extensions", "--window-size=1200,1000", "--remote-debugging-pipe",
)  # fmt: skip


def find() -> str:
    """Path of Chromium; the test is passed over where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no chromium here (PATH, or apt-get install chromium)")


class Browser:
    """`with Browser() as page:` is one empty page.

    `requests` are the URLs it asked for, `messages` what it and the browser logged to its console
    (but for verbose hints), and every exception nobody caught.
    """

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.messages: list[str] = []
        self._replies: dict[int, Any] = {}
        self._count = 0
        self._buffer = b""
        self._session: str | None = None

    def __enter__(self) -> Browser:
        program = find()
        self._home = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        read_commands, self._write = os.pipe()
        self._read, write_replies = os.pipe()
        script = f'exec "$@" 3<&{read_commands} 4>&{write_replies}'
        command = ["bash", "-c", script, "bash", program, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._home.name}", "about:blank"],
            pass_fds=(read_commands, write_replies), env={**os.environ, "HOME": self._home.name},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_replies)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        os.close(self._write)
        os.close(self._read)
        self._home.cleanup()

    def call(self, method: str, **parameters: Any) -> Any:
        """One DevTools command and its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + 30
        while self._count not in self._replies:
            self._receive(end)
        reply = self._replies.pop(self._count)
        assert "error" not in reply, (method, reply)
        return reply["result"]

    def run(self, script: str) -> Any:
        """The JSON value of an expression in the page, awaited if it is a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True,
            userGesture=True,
        )  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def click(self, selector: str) -> None:
        """Press the mouse over the middle of an element."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def fill(self, selector: str, text: str) -> None:
        """Type into a field, replacing what is there."""
        self.run(f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
                 " e.focus(); e.select(); })()")  # fmt: skip
        self.call("Input.insertText", text=text)
        self.run("document.activeElement.dispatchEvent(new Event('change'))")

    def until(self, script: str, timeout: float = 15) -> Any:
        """The value of an expression once it is true."""
        return self.wait(lambda: self.run(script), script, timeout)

    def wait(self, condition: Callable[[], Any], what: str, timeout: float = 15) -> Any:
        """The value of `condition` once it is true."""
        end = time.monotonic() + timeout
        while not (found := condition()):
            assert time.monotonic() < end, f"not within {timeout} s: {what}; {self.messages}"
            time.sleep(0.02)
        return found

    def _receive(self, end: float) -> None:
        assert self._selector.select(max(0.0, end - time.monotonic())), "the browser is silent"
        data = os.read(self._read, 1 << 20)
        assert data, "the browser has ended"
        *messages, self._buffer = (self._buffer + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._replies[message["id"]] = message
            else:
                self._event(message["method"], message.get("params", {}))

    def _event(self, method: str, found: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(found["request"]["url"])
        elif method == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(found["args"]))
        elif method == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(found["exceptionDetails"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] != "verbose":
            self.messages.append(f"{found['entry']['level']}: {found['entry']['text']}")
