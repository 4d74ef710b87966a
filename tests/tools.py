"""Programs from outside Python that tests need: installed on the machine, or downloaded into ``.tools``.

Nothing is installed into the system, and no service is started. If a program can't be downloaded, the
test is skipped with the reason; under CI, which must run every test, it fails.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".tools"


def debian(package: str, program: str) -> Path:
    """A program of a Debian package, unpacked from the archive if the machine has none."""
    installed = shutil.which(program)
    if installed:
        return Path(installed)
    unpacked = FOLDER / package
    path = unpacked / "usr" / "bin" / program
    with _alone(package):
        if not path.exists():
            unpacked.mkdir(parents=True, exist_ok=True)
            _fetch(package, unpacked)
    return path


def _fetch(package: str, unpacked: Path) -> None:
    download = ["apt-get", "download", "--quiet", "-o", "APT::Sandbox::User=root", package]
    try:
        if _failed(download, unpacked):  # the package lists may be missing or old
            _run(["apt-get", "update", "--quiet"], unpacked)
            _run(download, unpacked)
        for archive in unpacked.glob("*.deb"):
            _run(["dpkg-deb", "--extract", archive.name, "."], unpacked)
            archive.unlink()
    except (OSError, subprocess.CalledProcessError) as error:
        missing(f"Debian's package {package} can't be downloaded: {error}")


def npm(pins: Path) -> Path:
    """The ``node_modules`` with the packages of ``pins``, a package.json."""
    folder = FOLDER / pins.stem
    with _alone(pins.stem):
        installed = folder / "package.json"
        if not installed.exists() or installed.read_text() != pins.read_text():
            folder.mkdir(parents=True, exist_ok=True)
            draft = folder / "package.json"
            draft.write_text(pins.read_text())
            try:
                _run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"], folder)
            except (OSError, subprocess.CalledProcessError) as error:
                draft.unlink()
                missing(f"npm's packages of {pins.name} can't be downloaded: {error}")
    return folder / "node_modules"


def wheel(name: str, version: str) -> zipfile.ZipFile:
    """A released package of PyPI, to read its files; it is not installed."""
    folder = FOLDER / f"{name}-{version}"
    with _alone(folder.name):
        if not folder.exists():
            draft = folder.with_suffix(".new")
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", draft.name]
            try:
                _run([*pip, f"{name}=={version}"], FOLDER)
                draft.rename(folder)
            except (OSError, subprocess.CalledProcessError) as error:
                missing(f"{name} {version} can't be downloaded from PyPI: {error}")
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def environment(name: str, *requirements: str) -> Path:
    """The ``bin`` folder of a virtual environment with packages of PyPI."""
    folder = FOLDER / name
    with _alone(name):
        if not (folder / "ready").exists():
            try:
                _run([sys.executable, "-m", "venv", "--clear", name], FOLDER)
                _run([f"{name}/bin/python", "-m", "pip", "install", "--quiet", *requirements], FOLDER)
                (folder / "ready").touch()
            except (OSError, subprocess.CalledProcessError) as error:
                missing(f"{', '.join(requirements)} can't be downloaded from PyPI: {error}")
    return folder / "bin"


def missing(reason: str) -> None:
    """Skip this test, or fail it under CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def _alone(name: str) -> Iterator[None]:
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _failed(command: list[str], folder: Path) -> bool:
    return subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode != 0


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
