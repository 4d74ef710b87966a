"""Drives one workload through a real scheduler, observed, and tells what was found.

The drivers of ``audit/traffic`` carry out the script. This module adds a workload's requests, whose tokens
are made by family, and an audit after every operation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..checks.auditor import Auditor
from ..checks.registry import Violation
from ..events import Event
from ..ledger.account import Line
from ..traffic import lmcache
from ..traffic.driver import Driver, Observation, tokens
from ..traffic.driver_v0 import V0Driver, V0Setup
from ..traffic.engine_setup import EngineSetup, setup_of
from ..traffic.script import OUT, Check, Request, Segment, Workload
from . import assertions

MOST_STEPS = 4_000
"""A script that schedules more steps than this is not driven to its end."""


class Found(msgspec.Struct, frozen=True):
    """One finding, and after how many operations it was found."""

    id: str
    request: str
    message: str
    after: int


class Outcome(msgspec.Struct, frozen=True):
    """What a workload led to. ``check``: the assertion that shows the wanted finding; None without it."""

    found: tuple[Found, ...]
    check: Check | None
    raised: str
    steps: int
    seconds: float
    statement: str = ""

    def wordings(self, finding: str) -> set[str]:
        """The wordings of its messages of this finding."""
        return {assertions.wording(each.message, each.request) for each in self.found if each.id == finding}


class Engine(Driver):
    """One scheduler under a script; also what a probe reads (see ``engine_figures.py``)."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        """What the engine is led through."""
        self.requests: dict[str, Any] = {}
        """vLLM's request objects, by the names of the script."""
        self.steps: list[Any] = []
        """Every SchedulerOutput so far, oldest first."""
        self.raised = ""
        """The exception that ended the script; empty if none did."""
        self._chunks: dict[str, int] = {}
        """By request: how many of its prompt and chunks were added."""
        self._outputs: dict[str, list[int]] = {}
        """By request: the tokens that it will generate."""
        with self._setup() as setup:
            super().__init__(setup)
        runner = self.runner
        runner.content = lambda name, _, place: self.output_token(name, place)
        for name, request in workload.requests.items():
            self.expect(name, request.answers, hold=request.hold)

    @property
    def outputs(self) -> dict[str, list[Any]]:
        """What the engine returned of each request, oldest first."""
        return self.delivered

    @contextlib.contextmanager
    def _setup(self) -> Iterator[EngineSetup]:
        engine = self.workload.engine
        if not str(engine.get("connector")).startswith("lmcache"):
            yield setup_of(engine, "Workload" if engine.get("connector") == "scripted" else "")
            return
        store = StoreOfWorkload(self.workload.requests)
        with lmcache.answered_by(store, **engine) as setup:
            yield setup_of(setup)
        store.requests = self.scheduler.requests

    def schedule(self) -> Any:
        self.steps.append(super().schedule())
        return self.steps[-1]

    def output_token(self, name: str, place: int) -> int:
        """The token that a request generates at a place of its output."""
        known = self._outputs.get(name, [])
        if place >= len(known):
            known = self._outputs[name] = tokens(max(64, 2 * place + 1), name + OUT)
        return known[place]

    def come(self, name: str) -> None:
        """A request comes, or its next chunk."""
        request = self.workload.requests[name]
        prompts = (request.prompt, *request.chunks)
        number = self._chunks.get(name, 0)
        if number == len(prompts) or (number > 0) != (name in self.scheduler.requests):
            return
        self._chunks[name] = number + 1
        added = self.add(
            name,
            tokens_of(prompts[number]),
            request.max_tokens,
            stop_at=request.stop_at,
            resumable=request.resumable,
            priority=request.priority,
            of_request=_of_request(request),
        )
        self.requests.setdefault(name, added)


class EngineOfV0(V0Driver):
    """One v0 scheduler under a script; also what a probe reads."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        """What the engine is led through."""
        self.in_flight = 0
        """Scheduled steps without an output: there are none."""
        self.raised = ""
        """The exception that ended the script; empty if none did."""
        engine = {name: value for name, value in workload.engine.items() if name != "scheduler"}
        if any(request.lora for request in workload.requests.values()):
            engine.setdefault("max_loras", 1)
        super().__init__(V0Setup(**engine))

    @property
    def requests(self) -> dict[str, Any]:
        """vLLM's sequence groups, by the names of the script."""
        return self.groups

    def come(self, name: str) -> None:
        """A request comes."""
        request = self.workload.requests[name]
        most = min(request.max_tokens, request.stop_at or request.max_tokens)
        self.add(name, tokens_of(request.prompt), most, priority=request.priority, lora=request.lora)


class StoreOfWorkload(lmcache.StoreTable):
    """LMCache's store, as the answers of a workload's requests: the n-th holds after n preemptions."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        super().__init__()
        self.answers = {name: request.answers for name, request in requests.items() if request.answers}
        """By request: the tokens that the store has of its prompt, after each preemption."""

    def answer(self, request: Any) -> int | None:
        answers = self.answers[request.request_id]
        answer: Any = answers[min(request.num_preemptions, len(answers) - 1)]
        return None if answer is None else int(answer)


def tokens_of(prompt: tuple[Segment, ...]) -> list[int]:
    """The invented tokens of a prompt."""
    return [token for family, count in prompt for token in tokens(count, family)]


def _of_request(request: Request) -> dict[str, Any]:
    more: dict[str, Any] = {"cache_salt": request.salt} if request.salt else {}
    if request.lora:
        from vllm.lora.request import LoRARequest

        more["lora_request"] = LoRARequest(f"lora{request.lora}", request.lora, "/nowhere")
    return more


def drive(workload: Workload, finding: str, *, statement: bool = False) -> Outcome:
    """Drive a workload to the end of its script, or to the exception that ends it.

    ``statement``: the outcome has the account statement of the finding's request.
    """
    began = time.monotonic()
    v0 = workload.engine.get("scheduler") == "v0"
    engine: Engine | EngineOfV0 = EngineOfV0(workload) if v0 else Engine(workload)
    watch = _Watch(engine, finding, statement=statement)
    for number, op in enumerate(workload.script[: 3 * MOST_STEPS], 1):
        try:
            engine.carry_out(op)
        except Exception as error:
            engine.raised = f"{type(error).__name__}: {error}"
        watch.look(number)
        if engine.raised:
            break
    watch.end()
    seconds = time.monotonic() - began
    found = tuple(watch.found)
    return Outcome(found, watch.check, engine.raised, len(engine.steps), seconds, watch.statement())


class _Watch:
    """The observer and the audit of one engine, and the search for the wanted finding's check."""

    def __init__(self, engine: Any, finding: str, *, statement: bool) -> None:
        self.found: list[Found] = []
        """Every finding so far."""
        self.check: Check | None = None
        """What a test of the wanted finding asserts; None until it is found."""
        self._engine = engine
        self._finding = finding
        self._observation = Observation("")
        """Has the events that are not audited yet."""
        self._auditor = Auditor(keep_closed=True, watch=(lambda name: True) if statement else None)
        self._wanted: list[Violation] = []
        """Findings of the wanted id for which there is no check yet."""
        self._wrong: dict[str, tuple[int, Any]] = {}
        """Claims of what an earlier operation made wrong: after which operation, and the figure."""
        self._observation(engine.scheduler)

    def look(self, number: int) -> None:
        """Audit what operation ``number`` emitted, and read the figures of what it led to."""
        if self._finding == "tokens/stale-lookup":
            self._note_wrong(number)
        self._audit(self._observation.take(), number)

    def _audit(self, events: list[Event], number: int) -> None:
        for violation in self._auditor.feed_all(events):
            self.found.append(Found(violation.id, violation.request or "", violation.message, number))
            if violation.id != self._finding:
                continue
            self._wanted.append(violation)
            if self.check is None:
                self._claim(violation, "now", number)
            if self.check is None and (wrong := self._wrong.get("kept_lookups")):
                claim = assertions.CLAIMS[violation.id][0]
                self.check = assertions.check_of((claim, wrong[1], 0), violation, wrong[0])

    def end(self) -> None:
        """Audit what the end of observation emits; then read what is read at the end."""
        self._audit(self._observation.stop(), len(self._engine.workload.script))
        for violation in self._wanted:
            if self.check is None and not self._engine.in_flight:
                self._claim(violation, "end", -1)

    def _claim(self, violation: Violation, when: assertions.When, after: int) -> None:
        claimed = assertions.claim(self._engine, violation, self._account(violation), when)
        if claimed is not None:
            self.check = assertions.check_of(claimed, violation, after)

    def _account(self, violation: Violation) -> Any:
        accounts = self._auditor.ledger.accounts()
        return next((each for each in accounts if each.request_id == violation.request), None)

    def statement(self) -> str:
        """Every posting to the account of the check's request, one a line; "" if postings were not kept."""
        name = self.check.request if self.check is not None else ""
        accounts = (each for each in self._auditor.ledger.accounts() if each.request_id == name)
        lines = next((each.lines for each in accounts if each.lines), None) or []
        return "".join(_statement_line(line) for line in lines)

    def _note_wrong(self, number: int) -> None:
        from .engine_figures import kept_lookups

        try:
            kept = kept_lookups(self._engine, "")
        except AttributeError:
            return
        if not kept:
            self._wrong.pop("kept_lookups", None)
        elif "kept_lookups" not in self._wrong:
            self._wrong["kept_lookups"] = (number, kept)


def _statement_line(line: Line) -> str:
    change = f"+{line.credit}" if line.credit else f"-{line.debit}" if line.debit else ""
    return f"step {line.step:3}  life {line.life}  {line.text:<60} {change:>6} {line.balance:6}\n"
