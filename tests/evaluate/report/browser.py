"""A headless Chromium, driven by the DevTools protocol over a pipe."""

import itertools
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = "/usr/bin/chromium"
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
_FLAGS += ["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]
# Chromium reads commands from file descriptor 3 and writes to 4.
_LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
_KEYS = {"Tab": 9, "Enter": 13, "ArrowUp": 38, "ArrowDown": 40}
_MESSAGES = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
_TIMEOUT = 60.0


class Browser:
    """One tab. `messages` are those of the console, exceptions and refusals of the page's policy included.

    Args:
        profile: a directory for its files.
    """

    def __init__(self, profile: Path):
        self.messages: list[dict[str, Any]] = []
        self._loaded, self._unread, self._session = 0, b"", {}
        (commands, self._commands), (self._answers, answers) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", _LAUNCH, str(commands), str(answers), CHROMIUM, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}"], pass_fds=(commands, answers), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._numbers = itertools.count(1)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def open(self, url: str, *, width: int, is_dark: bool = False) -> None:
        """Loads a page in a window of this width."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        for page in ("about:blank", url):  # a new fragment alone would load nothing
            before = self._loaded
            self._call("Page.navigate", url=page)
            while self._loaded == before:
                self._read()

    def value(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def type(self, text: str) -> None:
        """Types into the element that has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Presses a key."""
        form = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        self._call("Input.dispatchKeyEvent", type="keyDown", text="\r" * (key == "Enter"), **form)
        self._call("Input.dispatchKeyEvent", type="keyUp", **form)

    def click(self, element: str) -> None:
        """Clicks in the middle of an element, an expression in the page."""
        self.value(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.value(f"{element}.getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", type=kind, **place)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        """The next message of the browser; events are noted."""
        while b"\0" not in self._unread:
            assert select.select([self._answers], [], [], _TIMEOUT)[0], "the browser does not answer"
            part = os.read(self._answers, 1 << 16)
            assert part, "the browser has ended"
            self._unread += part
        text, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(text)
        self._loaded += message.get("method") == "Page.loadEventFired"
        if message.get("method") in _MESSAGES:
            self.messages.append(message)
        return message
