"""Runs a generated file: without network, in a folder of its own, with bounded memory and time.

Such a file holds text of a journal as constants only (``exporters/repro/pytest_file.py`` sees to that).
What is here holds even if that law were broken. It hides no files: the file runs as
the user.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import site
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

from .. import temporary
from ..errors import LedgerError

LAUNCHER = Path(__file__).with_name("launcher.py")

LIMIT_SECONDS = 600.0
"""Importing vLLM took up to five minutes where ten processes shared two cores."""
MEMORY_BYTES = 8 << 30
"""Private memory of each process. A scheduler of vLLM takes 0.6 GiB, with CUDA's libraries some more."""
FILE_BYTES = 64 << 20
"""The longest file that it can write, its output included."""
READ_BYTES = 1 << 20
"""What is read of its output, from the end."""


class Ended(msgspec.Struct, frozen=True):
    """How a process ended. ``code`` None: it was ended because its time was over."""

    code: int | None
    out: str
    err: str
    seconds: float


@functools.cache
def network_open() -> str:
    """Why a process can't be kept from the network here; empty: it can."""
    asked = subprocess.run([sys.executable, "-I", str(LAUNCHER)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() if not asked.returncode else "the attempt failed"


def bounds(limit: float = LIMIT_SECONDS) -> str:
    """What holds for a file that runs here for ``limit`` seconds at most, in a sentence."""
    network = (
        f"with your network, which can't be closed here ({network_open()})"
        if network_open()
        else "without network"
    )
    return f"{network}, in an empty folder, with at most {MEMORY_BYTES >> 30} GiB of memory and {limit:.0f} s"


def run(command: Sequence[str], limit: float = LIMIT_SECONDS, importable: Sequence[str | Path] = ()) -> Ended:
    """Run a command, and end what it leaves behind. ``importable``: folders whose modules it may import."""
    program = shutil.which(command[0])
    if program is None:
        raise LedgerError(f"{command[0]} can't be run: there is no such program")
    began = time.monotonic()
    with temporary.folder() as place, contextlib.ExitStack() as files:
        work = Path(place, "work")
        work.mkdir()
        out, err = (files.enter_context(open(Path(place, each), "w+b")) for each in ("out", "err"))
        launch = [sys.executable, "-I", str(LAUNCHER), "open" if network_open() else "closed"]
        launch += [str(MEMORY_BYTES), str(FILE_BYTES), str(int(limit + 1) * (os.cpu_count() or 1))]
        process = subprocess.Popen(
            [*launch, os.path.abspath(program), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=work,
            env=_environ(work, importable),
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(code, _end(out), _end(err), time.monotonic() - began)


def _environ(work: Path, importable: Sequence[str | Path]) -> dict[str, str]:
    """This process's environment with the folder as home; packages of the user's home are still found."""
    ours = ("KVLEDGER_", "XDG_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    base = environ.get("PYTHONUSERBASE") or site.getuserbase()
    found = [*importable, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    paths = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, found))} if found else {}
    return environ | paths | {"HOME": str(work), "TMPDIR": str(work), "PYTHONUSERBASE": base}


def _end(file: IO[bytes]) -> str:
    """The end of what was written."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
    return file.read().decode(errors="replace")
