"""From a finding in a journal to the smallest workload that leads the released scheduler into it again."""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..errors import LedgerError
from ..replay.parallel import cores
from ..traffic.script import Check, Workload
from . import assertions
from .choose_finding import Seen, choose
from .drive import Found, Outcome
from .rebuild import HIT_OF_UNSEEN, Cut, NotRebuilt, Rebuilt, candidates, cut, engine_of, require_rebuildable
from .shrink import Shrinker, renamed
from .workers import OutOfTime, Pool

Progress = Callable[[str, int, int, int], None]
"""Called with the phase, the candidates driven, and the requests and steps of the smallest so far."""

BUDGET_SECONDS = 120.0
SEARCH_SHARE = 0.6
"""The part of the time that is left when vLLM is imported in which a first reproduction must be found."""


class OtherRelease(LedgerError):
    """The vLLM that would drive the workload is not the journal's."""


class Reproduction(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a finding. ``reason``: why it was refused or not reproduced, as one sentence.

    ``seen``: the finding and its place in the journal of ``release``. ``workload``: the smallest that leads
    to it, and ``check``: what its test asserts. ``nearest``: another finding that the workloads led to.
    ``assumed``: what the journal did not have. ``messages``: the findings of the reproduction itself.
    ``statement``: the account of its request. ``whole``: the figures ``before`` are of the journal up to the
    finding, not only of a part of it. ``first_seconds``: until a first workload led to it; ``seconds``:
    altogether. ``driven``: how many workloads were driven. ``configuration``: the engine's, as recorded.
    ``interrupted``: by Ctrl-C.
    """

    status: Literal["reproduced", "not reproduced", "refused"]
    seen: Seen
    release: str
    reason: str = ""
    workload: Workload | None = None
    check: Check | None = None
    assumed: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    nearest: Found | None = None
    requests_before: int = 0
    requests_after: int = 0
    steps_before: int = 0
    steps_after: int = 0
    seconds: float = 0.0
    first_seconds: float = 0.0
    driven: int = 0
    statement: str = ""
    configuration: dict[str, Any] = {}
    interrupted: bool = False
    whole: bool = True


def reproduce(
    path: Path,
    *,
    finding: str | None = None,
    request: str | None = None,
    seen: Seen | None = None,
    budget: float = BUDGET_SECONDS,
    workers: int | None = None,
    python: str | None = None,
    any_release: bool = False,
    scheduler: str = "",
    progress: Progress | None = None,
) -> Reproduction:
    """Rebuild one finding of the journals at ``path`` and shrink what leads to it.

    ``scheduler``: ``MODULE:CLASS`` of the recorded scheduler, if it is not vLLM's own.

    ``budget``: seconds for all of it. As long as vLLM took to start is left of them, at most half of what is
    left then: the test that is made of the answer imports vLLM again. ``workers`` 0 drives in this process.
    Ctrl-C ends the search and keeps the smallest workload so far.
    """
    began = time.monotonic()
    _tell(progress, "reading the journal")
    seen = seen or choose(path, finding, request)
    refused = assertions.refusal(seen.id)
    if refused:
        return Reproduction(status="refused", seen=seen, release=seen.release, reason=refused)
    try:
        part = cut(seen)
        part.scheduler_class = scheduler
        require_rebuildable(part)
    except NotRebuilt as error:
        return Reproduction(status="refused", seen=seen, release=seen.release, reason=str(error))
    count = cores() if workers is None else workers
    with Pool(count, python or sys.executable) as pool:
        _tell(progress, "starting vLLM")
        starts = time.monotonic()
        version = pool.version(v0=engine_of(part).get("scheduler") == "v0", seconds=began + budget - starts)
        if not any_release:
            _require_release(version, seen)
        ready, over = time.monotonic(), began + budget
        end = max(over - (ready - starts), ready + (over - ready) / 2)
        return _Search(part, pool, began, end, progress).run()


def _require_release(version: str, seen: Seen) -> None:
    if _plain(version) != _plain(seen.release):
        raise OtherRelease(
            f"The journal is of vLLM {seen.release}, and {version} would drive the workload: give the "
            "interpreter of an environment that has it with --python."
        )


def _plain(version: str) -> str:
    """The numbers of a version, without what a build adds."""
    matched = re.match(r"\d+(\.\d+)*", version)
    return matched.group() if matched else version


def _tell(progress: Progress | None, phase: str, done: int = 0, requests: int = 0, steps: int = 0) -> None:
    if progress is not None:
        progress(phase, done, requests, steps)


class _Search:
    """Finds a first reproduction of one cut, then shrinks it."""

    def __init__(self, part: Cut, pool: Pool, began: float, end: float, progress: Progress | None) -> None:
        self._cut = part
        self._pool = pool
        self._began = began
        """When the reproduction began, by the monotonic clock, as all times here."""
        ready = time.monotonic()
        self._deadline = end
        """When shrinking ends."""
        self._search_until = ready + (end - ready) * SEARCH_SHARE
        """When the search for a first reproduction ends."""
        self._progress = progress
        """Called after each workload that was driven."""
        self._nearest: Found | None = None
        """A finding of the first workload, of the same family if there is one: what comes nearest to ours."""
        self._other_wording: list[tuple[Workload, Outcome]] = []
        """The first workload that led to the finding with another symptom; taken if no better one comes."""
        self._rebuilt: Rebuilt | None = None
        """The candidate that led to the finding first."""
        self._phase = "searching"
        self._size = (0, 0)
        pool.on_driven = self._driven

    def run(self) -> Reproduction:
        try:
            first = self._first()
        except KeyboardInterrupt:
            return self._failed("It was interrupted before a first reproduction.", interrupted=True)
        if first is None:
            return self._failed(self._why_not())
        first_seconds = time.monotonic() - self._began
        workload, outcome = first
        self._pool.deadline = self._deadline
        self._phase = "shrinking"
        self._note(workload)
        shrinker = Shrinker(workload, outcome, self._wording(outcome), self._pool, self._note)
        shrinker.run()
        return self._reproduced(shrinker, first_seconds)

    def _why_not(self) -> str:
        if self._pool.driven and self._pool.failed == self._pool.driven:
            return f"No workload could be driven: {self._pool.error}."
        if not self._pool.driven:
            return "The time was over before a workload was driven: give more with --budget."
        return "No workload that the journal allows led to the finding."

    def _first(self) -> tuple[Workload, Outcome] | None:
        rebuilt: list[Rebuilt] = []

        def workloads() -> Iterator[Workload]:
            for each in candidates(self._cut):
                rebuilt.append(each)
                yield each.workload

        self._pool.deadline = self._search_until
        found = None
        with contextlib.suppress(OutOfTime):
            found = self._pool.first(workloads(), self._cut.seen.id, self._accept)
        if found is None and self._other_wording:
            found = self._other_wording[0]
        if found is not None:
            self._rebuilt = next(each for each in rebuilt if each.workload is found[0])
        return found

    def _accept(self, workload: Workload, outcome: Outcome) -> bool:
        if self._nearest is None:
            family = self._cut.seen.id.partition("/")[0]
            near = [each for each in outcome.found if each.id.startswith(family)] or list(outcome.found)
            self._nearest = near[0] if near else None
        if outcome.check is None:
            return False
        seen = self._cut.seen
        if assertions.wording(seen.message, seen.request_id) in outcome.wordings(seen.id):
            return True
        self._other_wording = self._other_wording or [(workload, outcome)]
        return False

    def _wording(self, outcome: Outcome) -> str:
        """The wording that a smaller workload must lead to as well."""
        seen = self._cut.seen
        wanted, wordings = assertions.wording(seen.message, seen.request_id), outcome.wordings(seen.id)
        return wanted if wanted in wordings else min(wordings)

    def _reproduced(self, shrinker: Shrinker, first_seconds: float) -> Reproduction:
        workload = renamed(shrinker.best)
        outcome = self._pool.drive(workload, self._cut.seen.id, statement=True)
        if outcome is None or outcome.check is None:  # the names themselves mattered, which no scheduler does
            workload, outcome = shrinker.best, shrinker.outcome
        assert outcome.check is not None
        assumed = self._rebuilt.assumed if self._rebuilt is not None else ()
        return Reproduction(
            status="reproduced",
            workload=workload,
            check=outcome.check,
            assumed=_still_true(assumed, workload),
            messages=tuple(each.message for each in outcome.found if each.id == outcome.check.finding),
            requests_after=len(workload.requests),
            steps_after=_steps_until_check(workload, outcome.check),
            first_seconds=first_seconds,
            statement=outcome.statement,
            interrupted=shrinker.interrupted,
            **self._common(),
        )

    def _failed(self, reason: str, *, interrupted: bool = False) -> Reproduction:
        return Reproduction(
            status="not reproduced",
            reason=reason,
            nearest=self._nearest,
            interrupted=interrupted,
            **self._common(),
        )

    def _common(self) -> dict[str, Any]:
        part = self._cut
        return {
            "seen": part.seen,
            "release": part.seen.release,
            "requests_before": part.came,
            "steps_before": part.steps,
            "seconds": time.monotonic() - self._began,
            "driven": self._pool.driven,
            "configuration": part.configuration,
            "whole": part.whole,
        }

    def _driven(self) -> None:
        _tell(self._progress, self._phase, self._pool.driven, *self._size)

    def _note(self, workload: Workload) -> None:
        self._size = (len(workload.requests), workload.steps)


def _steps_until_check(workload: Workload, check: Check) -> int:
    script = workload.script if check.after < 0 else workload.script[: check.after]
    return sum(op.do == "schedule" for op in script)


def _still_true(assumed: tuple[str, ...], workload: Workload) -> tuple[str, ...]:
    """What was assumed, without what shrinking changed."""
    changed = {"The pool has ": "blocks", "A step has ": "max_batched_tokens"}
    families = [{family for family, _ in each.prompt} for each in workload.requests.values()]
    shares = any(one & other for one, other in itertools.combinations(families, 2))
    return tuple(
        each
        for each in assumed
        if shares or HIT_OF_UNSEEN not in each
        if not (setting := next((changed[begin] for begin in changed if each.startswith(begin)), ""))
        or str(workload.engine.get(setting)) == each.split()[3]
    )
