"""Debian's Chromium without a window, driven by its DevTools protocol: what a page draws, logs and loads."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

NEEDS_CHROMIUM = "needs Chromium: apt-get install chromium"
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --disable-extensions "
    "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars "
    "--remote-debugging-port=0 --remote-allow-origins=* --force-color-profile=srgb "
    "--disable-features=IsolateSandboxedIframes"  # or a frame would be a page of its own
)
_PATIENCE_S = 90.0


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page; what went wrong in it is in `errors`, and every address that it asked for in `asked`."""

    def __init__(self, folder: Path):
        program = find_chromium()
        assert program, NEEDS_CHROMIUM
        self.errors, self.asked, self._number = [], [], 0
        self._frame = None  # where scripts of the newest frame run
        self._process = subprocess.Popen(
            [program, *_FLAGS.split(), f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        said, end = folder / "DevToolsActivePort", time.monotonic() + _PATIENCE_S
        while not (said.is_file() and "\n" in said.read_text()):
            assert time.monotonic() < end, "Chromium has not started"
            time.sleep(0.1)
        with urllib.request.urlopen(f"http://127.0.0.1:{said.read_text().split()[0]}/json/list") as answer:
            pages = [one for one in json.load(answer) if one["type"] == "page"]
        self._open = contextlib.ExitStack()
        self._socket = self._open.enter_context(connect(pages[0]["webSocketDebuggerUrl"], max_size=None))
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            self._open.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **params):
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            found = json.loads(self._socket.recv(timeout=_PATIENCE_S))
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._hear(found)

    def _hear(self, found):
        params = found.get("params", {})
        match found.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description", details["text"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(str(params["args"]))
            case "Runtime.executionContextCreated":
                self._frame = params["context"]["id"]
            case "Network.requestWillBeSent":
                self.asked.append(params["request"]["url"])

    def evaluate(self, expression: str, **where):
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, **where)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def in_frame(self, expression: str):
        """Evaluate in the frame of the page that was made last."""
        return self.evaluate(expression, contextId=self._frame)

    def wait(self, expression: str, evaluate=None):
        """Wait until an expression is true; return its value."""
        end = time.monotonic() + _PATIENCE_S
        while not (value := (evaluate or self.evaluate)(expression)):
            assert time.monotonic() < end, f"never true: {expression}; errors: {self.errors}"
            time.sleep(0.05)
        return value

    def look(self, width=1280, height=900, *, dark=False):
        """Set the size of the window and the theme that the machine prefers."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str):
        """Open a page of a run, and wait until it is drawn."""
        self.call("Page.navigate", url=url)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def leave(self):
        """Leave the page, and forget what it asked for and what went wrong in it."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.errors.clear()
        self.asked.clear()

    def press(self, key: str):
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def screenshot(self, file: Path, *, whole=False):
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(found["data"]))
