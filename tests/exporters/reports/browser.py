"""A headless Chromium for tests: an installed one, or one from Debian; else the test is skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr")


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


class Visit:
    """One look at a page: ``dom`` after its scripts ran, ``console`` lines, or a picture."""

    def __init__(
        self, page: Path, folder: Path, *, width: int, height: int = 2400, dark: bool = False
    ) -> None:
        self.picture = folder / f"{page.stem}-{width}{'-dark' if dark else ''}.png"
        words = [
            installed(),
            *FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            f"--window-size={width},{height}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        ]
        shot = self._run([*words, f"--screenshot={self.picture}", page.as_uri()])
        dump = self._run([*words, "--dump-dom", page.as_uri()])
        self.dom = dump.stdout
        self.console = [line for line in (shot.stderr + dump.stderr).splitlines() if ":CONSOLE" in line]

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
        assert 0 == done.returncode, done.stderr
        return done
