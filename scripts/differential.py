"""Compares the ledger with the oracle over random histories, in releases of the matrix.

Usage: .venv/bin/python scripts/differential.py HISTORIES [--first SEED] [RELEASE...]

Plays that many random histories (tests/differential) on the scheduler of each release, or of the one in
.venv, and prints one line for each. `all` are all that have a v1 scheduler. `turn` are two of them, each day
two others, with the same histories each day. `sglang-0.5.23` and other releases of SGLang are played by name,
on SGLang's own engine. Exits with 1 if a release shows a difference.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from releases import BIN, MATRIX, ROOT, SGLANG, build, environ

WITH_V1 = [name for name in MATRIX if not name.endswith("-v0") and not name.startswith("lmcache-")]
IN_VENV = next(name for name in WITH_V1 if not MATRIX[name].wheel)
AT_A_TURN = 2
FIRST_OF_TURNS = 5_000
"""A turn plays known histories, so that only a change of the code can make it fail."""


def turn(day: int) -> list[str]:
    """The releases of a day."""
    return [WITH_V1[(day * AT_A_TURN + each) % len(WITH_V1)] for each in range(AT_A_TURN)]


def run(name: str, histories: int, first: int) -> bool:
    """Compare in one release, and print how it went; whether nothing differs."""
    command = [str(BIN / "python"), "-m", "tests.differential.compare", str(histories), "--first", str(first)]
    environment = environ(name)
    if name in SGLANG:
        from kvledger.audit.demo.sglang.run import ENVIRON

        environment |= ENVIRON
        command += ["--engine", "sglang"]
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT / "src")])
    done = subprocess.run(
        [*command, "--processes", "2"], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    *reports, last = done.stdout.strip().splitlines() or [""]
    if done.returncode:
        print(*reports, *([] if last else [done.stderr.strip()]), sep="\n")
    print(f"{name}: {last or 'the comparison ended with an exception'}", flush=True)
    return done.returncode == 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("histories", type=int)
    parser.add_argument("--first", type=int, help="the first seed; otherwise from the clock")
    parser.add_argument("releases", nargs="*", default=[IN_VENV])
    options = parser.parse_intermixed_args(arguments)
    names, first = options.releases, options.first
    if names == ["turn"]:
        names, first = turn(time.gmtime().tm_yday), FIRST_OF_TURNS if first is None else first
    elif names == ["all"]:
        names = WITH_V1
    build(names)
    if first is None:
        first = int(time.time())
    agree = [run(name, options.histories, first) for name in names]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
