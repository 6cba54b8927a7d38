"""A page in headless Chromium, by its debugging protocol over pipes; nothing beyond the browser is needed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe")
ERRORS = ("Runtime.exceptionThrown", "Log.entryAdded")  # and calls of console.error


class Page:
    """One tab. `errors` collects what its console shows as an error."""

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO) -> None:
        self._to, self._from, self._session, self._number = to_browser, from_browser, "", 0
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command. Raises RuntimeError with the browser's message if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._receive()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        """The next message, of which errors of the page are kept."""
        content = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            content += byte
        message: dict[str, Any] = json.loads(content)
        called = message.get("method") == "Runtime.consoleAPICalled" and message["params"]["type"] == "error"
        if called or message.get("method") in ERRORS:
            self.errors.append(json.dumps(message["params"]))
        return message

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Loads a file in a window of this size, and waits until it is complete."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """What the script evaluates to; a promise is awaited. Raises RuntimeError if it throws."""
        done = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"]))
        return done["result"].get("value")

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose files are in `profile`."""
    (child_in, write), (read, child_out) = os.pipe(), os.pipe()
    command = f'exec "$0" "$@" 3</dev/fd/{child_in} 4>/dev/fd/{child_out}'
    arguments = [PROGRAM, *OPTIONS, f"--user-data-dir={profile}"]
    with subprocess.Popen(
        ["/bin/sh", "-c", command, *arguments], pass_fds=(child_in, child_out), stderr=subprocess.DEVNULL
    ) as process:
        os.close(child_in)
        os.close(child_out)
        with open(write, "wb") as to_browser, open(read, "rb") as from_browser:
            try:
                yield Page(to_browser, from_browser)
            finally:
                process.terminate()
