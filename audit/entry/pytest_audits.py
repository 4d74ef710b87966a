"""The engines that the running test built, each with its observer and its audit.

:class:`TestAudits` is what the fixture ``kvledger_audit`` gives to a test. :class:`KeptJournals` keeps the
journals of the tests that failed in pytest's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checks.auditor import Auditor, Found, Listed
from ..checks.coverage import ledger_coverage
from ..checks.registry import Violation
from ..engines.pool.pool_watch import ManagerObserver
from ..events import Event, HookFailed
from ..figures.totals import Totals
from ..journal.recorder import MemoryRecorder, write_journal
from ..ledger.account import AccountStatement
from ..replay.find import pick_request

WORST_LAST = ("clean", "unknown", "violated")


class AuditedInstance:
    """One scheduler or KV cache manager that a test built, its observer and its audit."""

    def __init__(self, observer: Any, sink: MemoryRecorder, *, keep_closed: bool = False) -> None:
        self._observer = observer
        self._sink = sink
        """Events that are not audited yet."""
        self._audited: list[list[Event]] = []
        """Events that are audited, for :meth:`save`."""
        self._failed_hooks: list[HookFailed] = []
        self.auditor = Auditor(keep_closed=keep_closed)
        """Audits the events."""
        observer.start()

    def catch_up(self) -> None:
        """Audit what was observed so far."""
        if self._observer.pools is not None:
            self._observer.pools.emit_all_calls()
        if getattr(self._observer, "content", None) is not None:
            self._observer.content.emit_counts()
        self._feed()

    def end(self) -> tuple[list[Violation], list[str]]:
        """The violations, and a phrase for each failure of a check or hook, which may hide further ones."""
        self._observer.stop("detached")
        self._feed()
        broken = [f"a check failed: {name}" for name in self.auditor.findings.check_failures]
        broken += [f"the hook on {each.hook} failed: {each.error}" for each in self._failed_hooks]
        return self.auditor.violations, broken

    def save(self, folder: Path) -> None:
        """Write the events so far as a journal. Raises OSError."""
        write_journal(folder, self._audited).close()

    @property
    def has_scheduler(self) -> bool:
        """Whether it is a scheduler, and no KV cache manager alone."""
        return not isinstance(self._observer, ManagerObserver)

    @property
    def own_class(self) -> str:
        """``MODULE:CLASS`` of a scheduler that is not vLLM's own; "" of one that is, and of a manager."""
        kind = type(self._observer.scheduler) if self.has_scheduler else object
        ours = kind is object or kind.__module__.partition(".")[0] == "vllm"
        return "" if ours else f"{kind.__module__}:{kind.__qualname__}"

    @property
    def examined(self) -> str:
        """What was examined of it, in words."""
        ledger = self.auditor.ledger
        return ledger_coverage(ledger).words

    @property
    def not_listed(self) -> list[Found]:
        """The invariants with more findings than :meth:`end` returns."""
        return [row for row in self.auditor.totals if row.is_cut]

    def _feed(self) -> None:
        events = self._sink.take()
        self._audited.append(events)
        self.auditor.feed_all(events)
        self._failed_hooks += [event for event in events if isinstance(event, HookFailed)]


class TestAudits(Listed):
    """The audits of the engines that the running test has built so far, summed up."""

    __test__ = False  # pytest must not collect this class where a test module imports it

    def __init__(self) -> None:
        self._audited: list[AuditedInstance] = []
        """Every engine that the test has built, oldest first."""

    def add(self, audited: AuditedInstance) -> None:
        """The test built one more engine."""
        self._audited.append(audited)

    @property
    def engines(self) -> int:
        """How many engines and KV cache managers are observed."""
        return len(self._audited)

    def _findings(self) -> list[Violation]:
        return [finding for auditor in self._auditors() for finding in auditor.violations]

    @property
    def totals(self) -> Totals:
        """Sums over the requests of all engines so far."""
        sums = Totals()
        for auditor in self._auditors():
            sums.merge(auditor.ledger.totals())
        return sums

    @property
    def verdict(self) -> str:
        """``clean``, ``violated`` or ``unknown``; ``unknown`` if no engine was observed."""
        verdicts = [str(auditor.verdict) for auditor in self._auditors()]
        return max(verdicts, key=WORST_LAST.index, default="unknown")

    def account(self, request_id: str) -> AccountStatement:
        """The account statement of one request, by any id that its client knows.

        Raises LedgerError if no request has that name, or several have.
        """
        accounts = [account for auditor in self._auditors() for account in auditor.ledger.accounts()]
        hints = [account.request_id for account in accounts]
        return pick_request(request_id, accounts, hints, "this test").freeze()

    def _auditors(self) -> list[Auditor]:
        for audited in self._audited:
            audited.catch_up()
        return [audited.auditor for audited in self._audited]


class KeptJournals:
    """The journals of failing tests, in pytest's cache: a folder a test, which has those of its last run."""

    def __init__(self, config: Any) -> None:
        self._config = config

    @property
    def folder(self) -> Path | None:
        """Where they are; None: nothing is kept, for pytest runs with ``-p no:cacheprovider``."""
        cache = getattr(self._config, "cache", None)
        return cache.mkdir("kvledger") if cache is not None else None

    def keep(self, test: str, audited: Sequence[AuditedInstance], finding: str) -> str:
        """Keep the journals of a test that failed; returns the next command. Raises OSError.

        ``finding``: the invariant that the test breaks, for `repro`; "": none that it can show.
        """
        folder = self.drop(test)
        assert folder is not None
        for number, instance in enumerate(audited, 1):
            instance.save(folder / f"engine-{number}")
        path = shlex.quote(os.path.relpath(folder))
        own = next((f" --scheduler {one.own_class}" for one in audited if one.own_class), "")
        return f"kvledger repro {path} --finding {finding}{own}" if finding else f"kvledger audit {path}"

    def drop(self, test: str) -> Path | None:
        """Remove what an earlier run kept of a test; returns the test's folder."""
        kept_in = self.folder
        if kept_in is None:
            return None
        words = re.sub(r"[^A-Za-z0-9_.]+", "-", test)[-60:].strip("-")
        folder = kept_in / f"{words}-{hashlib.sha256(test.encode()).hexdigest()[:6]}"
        if folder.exists():
            shutil.rmtree(folder)
        return folder
