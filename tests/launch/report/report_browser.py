"""Headless Chromium over its debugging pipe, with the standard library alone."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

EXECUTABLE = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)


class Browser:
    """One browser process; a context manager.

    Messages are JSON with a NUL behind each, on file descriptors 3 (in) and 4 (out), see
    https://chromedevtools.github.io/devtools-protocol/.

    Attributes:
        seen: Requests and messages of the console since the last `open`.
    """

    def __enter__(self) -> "Browser":
        # Its children may still write when it has ended.
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        # Out of the way of 3 and 4, where the browser looks for them.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (to_browser, from_browser)]

        def place() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [
                str(EXECUTABLE), "--headless", "--remote-debugging-pipe", "--no-sandbox",
                "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                f"--user-data-dir={self._profile.name}", "about:blank",
            ],
            pass_fds=(3, 4),
            preexec_fn=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (to_browser, from_browser, *ends):
            os.close(fd)
        self._rest, self._number = b"", 0
        self.seen: list[dict[str, Any]] = []
        pages = self._call("Target.getTargets", root=True)["targetInfos"]
        target = next(p["targetId"] for p in pages if p["type"] == "page")
        arguments = {"targetId": target, "flatten": True}
        self._session = self._call("Target.attachToTarget", root=True, **arguments)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Load a page in a window of a size; below 600 it is a phone's."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self.seen.clear()
        self._call("Page.navigate", url=page.resolve().as_uri())
        while not any(e["method"] == "Page.loadEventFired" for e in self.seen):
            self.seen.append(self._receive())

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        found = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, *, root: bool = False, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if not root:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        while (answer := self._receive()).get("id") != self._number:
            self.seen.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
