"""Runs the demo: a real engine in a process of its own, observed, then an audit of its journal.

Here: the folder, the process and its failures, and the comparison with the engine's own counters.
Not here: the requests (workload.py), nor anything printed.

An injected defect may crash the engine, as it crashed engines in production. Its journal is audited
all the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from .. import temporary
from ..analysis.source_differences import (
    Differences,
    Figures,
    Reconciliation,
    add_difference,
    between_settled_and_plan,
    ended_early,
    planned,
    why_reported,
)
from ..causes import UNEXPLAINED
from ..errors import LedgerError
from ..events import AdmissionFailed, Admitted, Event
from ..journal.host_folders import read
from ..ledger.account import Account
from ..ledger.ledger import Ledger
from ..planted.fault import PlantedFault
from ..replay.find import JOURNAL
from ..replay.journals import Audit, RequestStatement, audit_paths, statement
from ..replay.observers import KeptAccounts
from .workload import INJECTIONS

Progress = Callable[[int, int], None]
"""Called with the numbers of finished and of all requests; first with (0, 0), when the engine starts."""

COUNTER = 'vllm:prompt_tokens_by_source{{source="{source}"}}'
BY_SOURCE = {
    "local": "local_cache_hit",
    "external": "external_kv_transfer",
    "computed": "local_compute",
}
PREEMPTIONS = "vllm:num_preemptions"


class EngineFailed(LedgerError):
    """The demo's engine failed and left no journal to audit."""

    exit_code = 4


class Demo:
    """The outcome of one demo run.

    ``result`` is what the engine wrote at its end (engine.py); empty where it failed.
    """

    def __init__(
        self, folder: Path, injection: PlantedFault | None, result: dict[str, Any], failure: str | None
    ) -> None:
        self.journal = folder / JOURNAL
        """The folder of the engine's journal."""
        self.log = folder / "engine.log"
        """What the engine printed."""
        self.injection = injection
        """The injected defect; None without one."""
        self.failure = failure
        """How the engine failed; None where it did not."""
        self.version = str(result.get("version", ""))
        """The release of vLLM."""
        self.elapsed_seconds = float(result.get("elapsed_seconds", 0.0))
        """How long the engine served."""
        self.refusals: list[str] = result.get("refused_by_the_engines_counters", [])
        """What the engine's counters raised when they refused a figure."""
        self.audit: Audit = audit_paths([self.journal], (KeptAccounts,))
        """The audit of the journal."""
        self.accounts = [account for engine in self.audit.engines for account in engine.of(KeptAccounts).sums]
        """Every account of it."""
        exported: dict[str, float] = result.get("counters", {})
        self.counters = engine_counters(exported)
        """The engine's own counters of prompt tokens by source; None where it exported none."""
        self.to_counters: Differences = {}
        """The named differences that lead from the engine's reports to :attr:`counters`."""
        if self.counters is not None:
            self.to_counters = between_reported_and_counters(
                self.audit.reconciliation, self.counters, self.accounts
            )
        events = (row for engine in self.audit.engines for row in read(engine.path))
        self.lookups = LookupReport(events, exported)
        """Lookups of the prefix cache, by admission and as the engine counts them."""
        preemptions = exported.get(PREEMPTIONS)
        self.engine_preemptions = None if preemptions is None else int(preemptions)
        """The engine's own count of preemptions."""
        self.unreported_preemptions = sum(a.preemptions for a in self.accounts if ended_early(a))
        """Preemptions of requests that ended before any output; the engine's front end counts none."""
        self.statement = self._statement()
        """The account statement of one request, chosen by ``_statement``."""

    @property
    def defect_found(self) -> bool:
        """Whether the audit reports the injected defect."""
        return bool(self._violating_requests())

    def _violating_requests(self) -> set[str | None]:
        """Request ids in violations of the invariant that the injected defect breaks."""
        expected = self.injection.finds if self.injection else ()
        return {violation.request for violation in self.audit.violations if violation.id in expected}

    def _statement(self) -> RequestStatement | None:
        """The statement of the most instructive request.

        First choice is a request with the injected defect, then the most preempted one, then one that
        was settled otherwise than planned, then the one with the most tokens of rework and repeats.
        """
        violating = self._violating_requests()

        def rank(account: Account) -> tuple[bool, int, bool, int, int]:
            repeats = sum(account.rework.values()) + account.hit_again + account.loaded_again
            differs = bool(between_settled_and_plan(account, planned(account))) and account.reports > 0
            violates = account.request_id in violating
            return violates, account.preemptions, differs, repeats, -account.request

        if not self.accounts:
            return None
        return statement([self.journal], max(self.accounts, key=rank).request_id)


def run(inject: str | None, folder: Path | None, progress: Progress) -> Demo:
    """Run the engine, with the defect called ``inject`` put back, and audit its journal.

    ``folder`` receives journal, log and result, and is never removed; by default it is a new temporary
    folder. Raises :class:`LedgerError` where vLLM is missing or the engine does not start.
    """
    injection = _injection(inject)
    if importlib.util.find_spec("vllm") is None:
        raise LedgerError(
            "The demo runs a real vLLM engine, and vllm is not installed here; install it with: "
            "pip install vllm."
        )
    folder = _empty_folder(folder)
    result, failure = _run_engine(folder, injection, progress)
    journal = folder / JOURNAL
    if failure is not None and not (journal.is_dir() and any(journal.iterdir())):
        raise EngineFailed(f"The engine did not start: {failure}.")
    if not journal.is_dir():
        raise EngineFailed(
            f"The engine ran unobserved: kvledger's plugin was not loaded (see "
            f"{folder / 'engine.log'}; is kvledger installed in {sys.prefix}?)."
        )
    return Demo(folder, injection, result, failure)


def _injection(name: str | None) -> PlantedFault | None:
    if name is None:
        return None
    if name not in INJECTIONS:
        raise LedgerError(f"There is no injection {name!r}; the injections are {', '.join(INJECTIONS)}.")
    return INJECTIONS[name]


def _empty_folder(folder: Path | None) -> Path:
    if folder is None:
        return temporary.kept("kvledger-demo-")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise LedgerError(f"{folder} is not empty; the demo needs an empty folder.")
    except OSError as error:
        raise LedgerError(f"{folder} can't be used: {error.strerror}.") from error
    return folder.absolute()


def _run_engine(
    folder: Path, injection: PlantedFault | None, progress: Progress
) -> tuple[dict[str, Any], str | None]:
    """What the engine wrote at its end, and how it failed; None where it did not."""
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
        return {}, _last_line(errors, folder / "engine.log") or f"it ended with exit code {code}"
    written: dict[str, Any] = json.loads(result.read_text())
    return written, None


def _environment(folder: Path, injection: PlantedFault | None) -> dict[str, str]:
    environment = os.environ | {"KVLEDGER_DIR": str(folder / JOURNAL)}
    if injection is not None:
        environment["KVLEDGER_LEVEL"] = injection.level
        environment["KVLEDGER_CONTENT_STORE"] = "own"  # the folder of the demo's connector
        if "content/recomputed" in injection.finds:
            environment["KVLEDGER_CONTENT_SKETCH"] = "1"
    if chosen := environment.get("VLLM_PLUGINS"):
        environment["VLLM_PLUGINS"] = f"{chosen},kvledger"
    return environment


def _follow(process: subprocess.Popen[str], progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        try:
            report = json.loads(line)
            progress(int(report["done"]), int(report["of"]))
        except (ValueError, KeyError, TypeError):
            continue  # printed by something else in the engine


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_line(*logs: Path) -> str:
    """The last line of the first log that is not empty, where a traceback has its error, and its path."""
    for log in logs:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        messages = [line.strip() for line in lines if line.strip() and not line.startswith(" ")]
        if messages:
            return f"{messages[-1]} (see {log})"
    return ""


# --- the engine's own counters ------------------------------------------------------------------------


def engine_counters(exported: dict[str, float]) -> Figures | None:
    """Prompt tokens by source, from the engine's counters; None where one of them is missing."""
    names = {source: COUNTER.format(source=label) for source, label in BY_SOURCE.items()}
    if not set(names.values()) <= exported.keys():
        return None
    return Figures(**{source: int(exported[name]) for source, name in names.items()})


def between_reported_and_counters(
    reconciliation: Reconciliation, counters: Figures, accounts: list[Account]
) -> Differences:
    """The named differences between what the engine reported and what its counters show.

    The front end sums up the reports of one iteration and increments computed, local and external, in
    this order. A counter refuses a negative sum with an error, and the sums after it are not counted.
    The counters include requests whose accounts are unknown; the ledger's totals leave these out.
    """
    differences: Differences = {}
    iterations: dict[int, Figures] = {}
    requests: dict[int, int] = {}
    for account in accounts:
        if account.reported is None:
            continue
        if account.unknown is not None:
            add_difference(differences, "unknown_here", Figures(*account.reported))
        if account.settlements:
            iteration = account.settlements[0].step
            iterations.setdefault(iteration, Figures()).add(Figures(*account.reported))
            requests[iteration] = requests.get(iteration, 0) + 1
    for iteration, sums in iterations.items():
        if sums.local < 0:
            refused = Figures(local=-sums.local, external=-sums.external)
            add_difference(differences, "refused", refused, requests[iteration])
    left = Figures()
    left.add(counters)
    left.add(reconciliation.reported, -1)
    for difference in differences.values():
        left.add(difference.figures, -1)
    if left:
        add_difference(differences, UNEXPLAINED, left, 0)
    return differences


# --- The prefix-cache lookups of every admission of a run, beside the engine's own counters of lookups.
#
# Here: the totals and the named differences, from the journal's events and the engine's counters. Not
# here: anything printed.
#
# A lookup queries the engine's own prefix cache with the whole sequence, and the KV connector with the
# tokens that the cache missed. The engine exports its counts for the lookups of first admissions
# (``vllm:prefix_cache_queries``, ``vllm:external_prefix_cache_queries`` and the two ``_hits``). It also
# counts the lookups of resumed requests, but does not export them.

COUNTERS = {
    "local_queries": "vllm:prefix_cache_queries",
    "local_hits": "vllm:prefix_cache_hits",
    "external_queries": "vllm:external_prefix_cache_queries",
    "external_hits": "vllm:external_prefix_cache_hits",
}


class LookupTotals(msgspec.Struct):
    """Tokens queried and hit in both caches; ``lookups`` is the number of lookups (-1: not counted)."""

    lookups: int = 0
    local_queries: int = 0
    local_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0

    def __add__(self, other: LookupTotals) -> LookupTotals:
        """The sum of both."""
        return LookupTotals(*(a + b for a, b in zip(self._values(), other._values(), strict=True)))

    def __sub__(self, other: LookupTotals) -> LookupTotals:
        """The difference; figures may be negative."""
        return LookupTotals(*(a - b for a, b in zip(self._values(), other._values(), strict=True)))

    def __bool__(self) -> bool:
        """Whether any tokens are counted; ``lookups`` alone does not matter."""
        return any(getattr(self, name) for name in COUNTERS)

    def _values(self) -> tuple[int, ...]:
        return msgspec.structs.astuple(self)


LookupDifferences = dict[str, LookupTotals]
"""Signed differences by cause, as in :mod:`~kvledger.audit.analysis.source_differences`."""


class LookupReport:
    """Lookups of admissions, of the engine's counters and of its reports, and the differences."""

    def __init__(self, events: Iterable[tuple[int, Event]], counters: dict[str, float]) -> None:
        self.admitted = LookupTotals()
        """Lookups of every observed admission."""
        self.counters: LookupTotals | None = None
        """The engine's own counters; None where they are not known."""
        self.reported: LookupTotals | None = None
        """The engine-reported prompt figures, taken as one lookup per request; None if it never reports."""
        self.to_counters: LookupDifferences = {}
        """The differences that lead from :attr:`admitted` to :attr:`counters`."""
        self.to_reported: LookupDifferences = {}
        """The differences that lead from :attr:`counters` to :attr:`reported`."""
        self._resumed = LookupTotals()
        """Lookups after a preemption, which the engine's counters leave out."""
        self._failed = LookupTotals()
        """Lookups of attempts that led to no admission."""
        self._first: dict[int, LookupTotals] = {}
        """Lookups of admissions that are not after a preemption, by request."""
        accounts = self._read(events)
        if set(COUNTERS.values()) <= counters.keys():
            exported = {name: int(counters[metric]) for name, metric in COUNTERS.items()}
            self.counters = LookupTotals(-1, **exported)
            events_lost = any(account.unknown is not None for account in accounts)
            self.to_counters = self._explain_counters(self.counters, events_lost)
            if any(account.reported is not None for account in accounts):
                self.reported = LookupTotals()
                for account in accounts:
                    self._add_report(account)

    def _read(self, events: Iterable[tuple[int, Event]]) -> list[Account]:
        """Sum up the lookups of all admissions; returns every account."""
        ledger = Ledger(keep_closed=True)
        for number, event in events:
            for entry in ledger.apply(event, number):
                if isinstance(entry.subject, Admitted | AdmissionFailed) and entry.account is not None:
                    self._add_lookup(entry.subject, entry.account)
        return list(ledger.accounts())

    def _add_lookup(self, event: Admitted | AdmissionFailed, account: Account) -> None:
        tokens, local = account.sequence_tokens, event.local_tokens
        if isinstance(event, AdmissionFailed):
            if not account.preemptions:
                attempts = event.attempts
                self._failed += LookupTotals(attempts, attempts * tokens, attempts * local)
            return
        lookup = LookupTotals(1, tokens, local, tokens - local, event.external_tokens)
        if not event.counted:
            lookup.local_queries = lookup.local_hits = 0
        self.admitted += lookup
        if event.resumed:
            self._resumed += lookup
        else:
            self._first[account.request] = self._first.get(account.request, LookupTotals()) + lookup

    def _explain_counters(self, counters: LookupTotals, events_lost: bool) -> LookupDifferences:
        """Name the lookups that the engine does not export, or counts more than once."""
        named: LookupDifferences = {}
        if self._resumed:
            named["resumed"] = LookupTotals() - self._resumed
        left = counters - self.admitted + self._resumed
        left.lookups = 0
        if not left:
            return named
        if left == msgspec.structs.replace(self._failed, lookups=0):
            named["failed_attempts"] = self._failed
        else:
            named["unknown_here" if events_lost else UNEXPLAINED] = left
        return named

    def _add_report(self, account: Account) -> None:
        """Add what the engine reported of one request, and name its difference from the first lookup."""
        assert self.reported is not None
        lookup = self._first.get(account.request, LookupTotals())
        report = LookupTotals()
        figures = None if account.reported is None else Figures(*account.reported)
        if figures is not None and account.unknown is None:
            report = LookupTotals(
                1, figures.total, figures.local, figures.total - figures.local, figures.external
            )
            self.reported += report
        if report == lookup:
            return
        cause = "unknown_here"
        if account.unknown is None:
            cause = why_reported(account, planned(account), figures)
        self.to_reported[cause] = self.to_reported.get(cause, LookupTotals()) + report - lookup
