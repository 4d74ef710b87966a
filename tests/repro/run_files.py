"""Runs files of `kvledger repro` in one release: `python tests/repro/run_files.py OUTPUT NAME=FILE...`.

vLLM is imported once; each file runs in a fork of this process, in which kvledger can't be imported. Writes
the exit code and the last lines of each as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

SECONDS = 1_800
"""A file that takes longer hangs."""

LAST = 6
"""Lines of output that are kept."""


def run(file: Path) -> tuple[int, str]:
    """The exit code of a file, run in a fork, and the end of what it printed."""
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if not child:
            _in_the_child(file, printed.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed.seek(0)
        lines = printed.read().decode(errors="replace").strip().splitlines()
    return code, "\n".join(lines[-LAST:])


def _in_the_child(file: Path, descriptor: int) -> NoReturn:
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.modules["kvledger"] = None  # type: ignore[assignment]
    sys.argv = [str(file)]
    signal.alarm(SECONDS)
    code = 0
    try:
        runpy.run_path(str(file), run_name="__main__")
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 2
    except BaseException:
        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Run the files."""
    output, *named = sys.argv[1:]
    for module in ("vllm.v1.core.sched.async_scheduler", "vllm.core.scheduler"):
        with contextlib.suppress(ImportError):  # a release has only one of them
            importlib.import_module(module)
    files = dict(each.split("=", 1) for each in named)
    Path(output).write_text(json.dumps({name: run(Path(file)) for name, file in files.items()}))


if __name__ == "__main__":
    main()
