"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no package, no port.

Where no Chromium is installed, `find_browser` is None and the tests that need one skip.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def find_browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page of a Chromium process, and all that it logged as an error."""

    def __init__(self, timeout_s: float = 60.0):
        self.timeout_s, self.errors, self._id = timeout_s, [], 0
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def __enter__(self) -> "Browser":
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Chromium reads its descriptor 3 and writes its descriptor 4; high ones first, so that neither is overwritten.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_browser, from_browser)]
        shell = f'exec 3<&{ends[0]} 4>&{ends[1]}; exec "$@"'
        command = ["bash", "-c", shell, "bash", find_browser(), *FLAGS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen([*command, "about:blank"], pass_fds=ends, stderr=subprocess.DEVNULL)
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self._buffer, self._session = b"", None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *error) -> None:
        os.close(self._write)
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._read)
        self._profile.cleanup()

    def send(self, method: str, **params):
        """One command and its result; what the page logs meanwhile goes to `errors`."""
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self.timeout_s
        while time.monotonic() < deadline:
            answer = self._receive()
            self._note(answer)
            if answer.get("id") == self._id:
                assert "error" not in answer, answer
                return answer["result"]
        raise TimeoutError(method)

    def evaluate(self, expression: str):
        """The value of a JavaScript expression (a promise is awaited)."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 30.0):
        """Until the expression is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := self.evaluate(expression):
                return value
            time.sleep(0.1)
        raise TimeoutError(expression)

    def open(self, url: str, width: int, height: int, dark: bool = False, scale: float = 1.0) -> None:
        mobile = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def screenshot(self, path: str | Path, full_page: bool = True) -> None:
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full_page)["data"]
        Path(path).write_bytes(base64.b64decode(data))

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            chunk = os.read(self._read, 1 << 16)
            assert chunk, f"{find_browser()} ended with {self._process.poll()}"
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def _note(self, message: dict) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
