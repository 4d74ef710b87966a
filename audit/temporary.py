"""The one place that makes temporary folders.

Other users can write in the folder of temporary files, and can prepare every name there that they can guess.
So a folder of ours has a random name, is made by this process for this user alone, and nothing in it is a
link of somebody else. It goes with the command, also when that is ended by SIGTERM.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path


def folder(prefix: str = "kvledger-", within: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A folder that goes at the end of a ``with``; its name is random behind the prefix."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir=within, ignore_cleanup_errors=True)


def kept(prefix: str) -> Path:
    """A folder that stays, for what the user reads later."""
    return Path(tempfile.mkdtemp(prefix=prefix))


@functools.cache
def _of_process(process_id: int) -> Path:
    made = kept("kvledger-")

    def remove() -> None:
        if os.getpid() == process_id:  # a fork has its parent's exit handlers
            shutil.rmtree(made, ignore_errors=True)

    atexit.register(remove)
    return made


def of_process(name: str) -> Path:
    """A folder of this name that is for this process, and goes when it ends."""
    found = _of_process(os.getpid()) / name
    found.mkdir(mode=0o700, exist_ok=True)
    return found
