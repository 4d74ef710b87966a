"""Records faults of one release, reproduces them, and writes their files: `python -m tests.repro.prove`.

Runs in the release that has the faults. FOLDER/FAULT gets the `journal`, the `test_repro.py` and the `bug.md`
that the command line `kvledger repro` writes for it, and `result.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.repro.crowds import record
from tests.repro.faults import FAULTS, Fault

FILE = "test_repro.py"
REPORT = "bug.md"
RESULT = "result.json"


def prove(fault: Fault, folder: Path, *, requests: int, level: str, budget: float) -> dict[str, Any]:
    """What became of one fault; ``wrong`` says why there is no file."""
    journal = folder / "journal"
    if not (folder / "recorded.json").exists():
        shutil.rmtree(journal, ignore_errors=True)
        recorded = record(fault, journal, requests=requests, level=level)
        if not recorded["found"]:
            return {"wrong": f"not recorded in {recorded['attempts']} attempts"}
        (folder / "recorded.json").write_text(json.dumps(recorded))
    command = ("repro", str(journal), "--finding", fault.finding, "--budget", f"{budget:g}s")
    files = ("-o", str(folder / FILE), "--issue", str(folder / REPORT), "--yes", "--format", "json")
    program = [sys.executable, "-m", "kvledger", *command, *files]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    try:
        made = json.loads(done.stdout)
    except ValueError:
        return {"wrong": f"exit {done.returncode}: {done.stderr.strip()[-500:]}"}
    result = {
        "before": [made["requests_before"], made["steps_before"]],
        "after": [made["requests_after"], made["steps_after"]],
        "first_seconds": made["first_seconds"],
        "seconds": made["seconds"],
        "driven": made["driven"],
        "wrong": made["reason"]
        or ("" if done.returncode == 0 else f"exit {done.returncode}: {made['test']}"),
    }
    for file in (FILE, REPORT):
        text = (folder / file).read_text() if (folder / file).exists() else ""
        request = made["seen"]["request_id"]
        if "chatcmpl" in text or (request and request in text):
            result["wrong"] = f"{file} has an id of a request"
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Prove some faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("faults", nargs="+", choices=list(FAULTS))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--level", choices=("blocks", "tokens"), default="blocks")
    parser.add_argument("--budget", type=float, default=120.0)
    options = vars(parser.parse_args(arguments))
    parent = options.pop("folder")
    for name in options.pop("faults"):
        folder = parent / name
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                result = prove(FAULTS[name], folder, **options)
            except Exception as error:
                traceback.print_exc()
                result = {"wrong": f"{type(error).__name__}: {error}"}
        (folder / RESULT).write_text(json.dumps(result))
        print(json.dumps({"fault": name, **result}), flush=True)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # LMCache may have left threads
