"""The demo: the real engine in a process of its own under observation, then its journal replayed.

Here: the folder, the process and its failures, and the comparison with the engine's own counters.
Not here: what the engine is asked (workload.py), nor anything printed.

The engine may well die of an injected defect, as engines did; its journal is audited all the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..analysis.reconciliation import (
    Figures,
    Reconciliation,
    Step,
    between_settled_and_plan,
    ended_early,
    planned,
)
from ..causes import UNEXPLAINED
from ..errors import LedgerError
from ..journal.folder import read
from ..ledger.account import Account
from ..replay.find import JOURNAL
from ..replay.journals import Audit, RequestStatement, audit_paths, statement
from .injections import INJECTIONS, Injection
from .lookups import Lookups

Progress = Callable[[int, int], None]
"""Told how many requests are done, and of how many; first (0, 0), when the engine starts."""

COUNTER = 'vllm:prompt_tokens_by_source{{source="{source}"}}'
BY_SOURCE = {
    "local": "local_cache_hit",
    "external": "external_kv_transfer",
    "computed": "local_compute",
}
PREEMPTIONS = "vllm:num_preemptions"


class EngineFailed(LedgerError):
    """The demo's engine did not come to its end, and left nothing to audit."""

    exit_code = 4


class Demo:
    """What one run of the demo gave.

    ``counters`` are the engine's own, None if it had none to tell; ``to_counters`` are the named
    differences from what it reported. ``lookups`` is the like of what the caches were asked for.
    ``counted_preemptions`` is the engine's figure; its front end never hears of the
    ``untold_preemptions``, of requests that ended before any output. ``failure`` says how the engine
    ended, where it did not end well; ``refusals`` is what its counters said of figures that they did
    not take.
    """

    def __init__(
        self, folder: Path, injection: Injection | None, told: dict[str, Any], failure: str | None
    ) -> None:
        self.journal = folder / JOURNAL
        self.log = folder / "engine.log"
        self.injection = injection
        self.failure = failure
        self.version = str(told.get("version", ""))
        self.elapsed_seconds = float(told.get("elapsed_seconds", 0.0))
        self.refusals: list[str] = told.get("refused_by_the_engines_counters", [])
        self.audit: Audit = audit_paths([self.journal], keep=True)
        self.accounts = [account for engine in self.audit.engines for account in engine.accounts]
        told_counters: dict[str, float] = told.get("counters", {})
        self.counters = engine_counters(told_counters)
        self.to_counters = Step()
        if self.counters is not None:
            self.to_counters = between_reported_and_counters(
                self.audit.reconciliation, self.counters, self.accounts
            )
        events = (row for engine in self.audit.engines for row in read(engine.path))
        self.lookups = Lookups(events, told_counters)
        counted = told_counters.get(PREEMPTIONS)
        self.counted_preemptions = None if counted is None else int(counted)
        self.untold_preemptions = sum(a.preemptions for a in self.accounts if ended_early(a))
        self.statement = self._statement()

    @property
    def found(self) -> bool:
        """Whether the audit names the injected defect."""
        wanted = self.injection.expected_invariant if self.injection else None
        return any(violation.id == wanted for violation in self.audit.violations)

    def _statement(self) -> RequestStatement | None:
        """Of the most preempted request: of several one that did not go as planned, if there is one,
        and then the one to which most happened twice.

        Where requests show the injected defect it is one of them.
        """
        wanted = self.injection.expected_invariant if self.injection else None
        showing = {v.request for v in self.audit.violations if v.id == wanted}

        def rank(account: Account) -> tuple[bool, int, bool, int, int]:
            again = sum(account.rework.values()) + account.hit_again + account.loaded_again
            astray = bool(between_settled_and_plan(account, planned(account))) and account.reports > 0
            shows = account.request_id in showing
            return shows, account.preemptions, astray, again, -account.request

        if not self.accounts:
            return None
        return statement([self.journal], max(self.accounts, key=rank).request_id)


def run(inject: str | None, folder: Path | None, progress: Progress) -> Demo:
    """Run the engine, with the defect called ``inject`` put back, and audit what it did.

    ``folder`` gets journal, log and result; by default a new one among the temporary files. It is
    never removed. Raises :class:`LedgerError` where vLLM is missing or the engine does not come up.
    """
    injection = _injection(inject)
    if importlib.util.find_spec("vllm") is None:
        raise LedgerError(
            "The demo runs a real vLLM engine, and vllm is not installed here; install it with: "
            "pip install 'kvledger[vllm]'."
        )
    folder = _empty_folder(folder)
    told, failure = _run_engine(folder, injection, progress)
    journal = folder / JOURNAL
    if failure is not None and not (journal.is_dir() and any(journal.iterdir())):
        raise EngineFailed(f"The engine did not come up: {failure}.")
    if not journal.is_dir():
        raise EngineFailed(
            f"The engine ran unobserved: kvledger's plugin was not loaded (see "
            f"{folder / 'engine.log'}; is kvledger installed in {sys.prefix}?)."
        )
    return Demo(folder, injection, told, failure)


def _injection(name: str | None) -> Injection | None:
    if name is None:
        return None
    if name not in INJECTIONS:
        raise LedgerError(f"No injection is called {name!r}; there are {', '.join(INJECTIONS)}.")
    return INJECTIONS[name]


def _empty_folder(folder: Path | None) -> Path:
    if folder is None:
        return Path(tempfile.mkdtemp(prefix="kvledger-demo-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LedgerError(f"{folder} is not empty; a demo wants a folder of its own.")
    except OSError as error:
        raise LedgerError(f"{folder} can't be used: {error.strerror}.") from error
    return folder.absolute()


def _run_engine(
    folder: Path, injection: Injection | None, progress: Progress
) -> tuple[dict[str, Any], str | None]:
    """What the engine told at its end, and how it failed if it did."""
    result, errors = folder / "result.json", folder / "engine.err"
    command = [sys.executable, "-m", "kvledger.audit.demo.engine"]
    command += ["--output", str(result), "--log", str(folder / "engine.log")]
    command += ["--inject", injection.name] if injection else []
    with errors.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=sink, env=_environment(folder, injection), text=True
        )
        try:
            progress(0, 0)
            _follow(process, progress)
            code = process.wait()
        finally:
            _stop(process)
    if code:
        return {}, _last_words(errors, folder / "engine.log") or f"it ended with exit code {code}"
    told: dict[str, Any] = json.loads(result.read_text())
    return told, None


def _environment(folder: Path, injection: Injection | None) -> dict[str, str]:
    environment = os.environ | {"KVLEDGER_DIR": str(folder / JOURNAL)}
    if injection is not None:
        environment["KVLEDGER_LEVEL"] = injection.level
    if chosen := environment.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = f"{chosen},kvledger"
    return environment


def _follow(process: subprocess.Popen[str], progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            said = json.loads(line)
            progress(int(said["done"]), int(said["of"]))
        except (ValueError, KeyError, TypeError):
            continue  # not ours: something in the engine printed


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(*logs: Path) -> str:
    """The last line that says something, tracebacks end in one, and where it stands."""
    for log in logs:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        said = [line.strip() for line in lines if line.strip() and not line.startswith(" ")]
        if said:
            return f"{said[-1]} (see {log})"
    return ""


# --- the engine's own counters ------------------------------------------------------------------------


def engine_counters(told: dict[str, float]) -> Figures | None:
    """Prompt tokens by source, as the engine's counters have them; None if it has no such ones."""
    names = {ours: COUNTER.format(source=theirs) for ours, theirs in BY_SOURCE.items()}
    if not set(names.values()) <= told.keys():
        return None
    return Figures(**{ours: int(told[name]) for ours, name in names.items()})


def between_reported_and_counters(
    reconciliation: Reconciliation, counters: Figures, accounts: list[Account]
) -> Step:
    """The named differences between what the engine reported and what its counters show.

    The front end adds up one iteration's reports and increments computed, local and external, in
    this order; a negative sum is refused with an error, and what comes after it is not counted. The
    counters include requests whose accounts are unknown, and no figure of ours does.
    """
    step = Step()
    iterations: dict[int, Figures] = {}
    requests: dict[int, int] = {}
    for account in accounts:
        if account.reported is None:
            continue
        if account.unknown is not None:
            step.add("unknown_here", Figures(*account.reported))
        if account.settlements:
            at = account.settlements[0].step
            iterations.setdefault(at, Figures()).add(Figures(*account.reported))
            requests[at] = requests.get(at, 0) + 1
    for at, told in iterations.items():
        if told.local < 0:
            step.add("refused", Figures(local=-told.local, external=-told.external), requests[at])
    left = Figures()
    left.add(counters)
    left.add(reconciliation.reported, -1)
    for difference in step.differences.values():
        left.add(difference.figures, -1)
    if left:
        step.add(UNEXPLAINED, left, 0)
    return step
