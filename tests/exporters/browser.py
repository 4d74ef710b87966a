"""A headless Chromium for tests, asked by its DevTools protocol over a pipe; and axe-core of npm.

Both skip a test where they can't be had: Chromium is an installed one, or one from Debian.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
AXE = "axe-core@4.14.1"


def installed() -> str:
    """The browser's path. Skips the test if there is none and none can be installed."""
    found = _found()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
        for command in (["apt-get", "update"], install):
            subprocess.run(command, capture_output=True, check=False, timeout=600)
        found = _found()
    if found is None:
        pytest.skip("there is no Chromium here, and apt-get can't install one")
    return found


def _found() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def axe_core(folder: Path) -> str:
    """The script of axe-core, which finds what a page withholds from people with a disability."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here, which has axe-core")
    done = subprocess.run(
        [npm, "pack", "--silent", AXE], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode:
        pytest.skip(f"npm can't get {AXE}: {done.stderr.strip()[-200:]}")
    with tarfile.open(folder / done.stdout.strip()) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


class Browser:
    """One process of Chromium with one page. ``console`` has the errors of the page, and what it logs."""

    def __init__(self, folder: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Chromium reads commands of descriptor 3 and writes answers to 4; pass_fds can't choose the numbers.
        words = ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', installed(), *FLAGS]
        self._process = subprocess.Popen(
            [*words, f"--user-data-dir={folder}"],
            pass_fds=(commands, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._received = b""
        self._sent = 0
        self._session = ""
        self.console: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End the process."""
        os.close(self._commands)
        self._process.wait(timeout=30)
        os.close(self._answers)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._sent += 1
        number = self._sent
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write(message)
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def open(self, url: str, *, width: int, dark: bool, height: int = 900) -> None:
        """Load a page in a window of this size and color scheme."""
        self.console.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, which may be a promise of one."""
        answer = self.ask("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key that types no character."""
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page."""
        data = self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def _write(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]

    def _read(self) -> dict[str, Any]:
        """The next message. A complaint of the page goes to the console's lines."""
        while b"\0" not in self._received:
            more = os.read(self._answers, 1 << 16)
            assert more, "the browser has ended"
            self._received += more
        line, self._received = self._received.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        about = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.console.append(about["entry"]["text"])
        elif message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.console.append(json.dumps(about))
        return message
