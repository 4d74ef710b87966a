"""Drives a real scheduler through a random history."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from tests.differential.random_histories import (
    Abort,
    Add,
    ChangeWeights,
    Chunk,
    Defer,
    History,
    Operation,
    Output,
    Preempt,
    ResetCache,
    Schedule,
    Step,
    Store,
)
from tests.scenarios.driving import Driver, engine_setup, images
from tests.scenarios.scripted_connector import LookupCall

from kvledger.audit.engines.weights_watch import mark_weights
from kvledger.audit.traffic.connector import PlannedLoads
from kvledger.audit.traffic.engine_setup import lacking

MAX_STEPS = 300
"""Most steps that a history may take to finish after its last operation."""
PLACEHOLDER = 32_000 - 1
"""The token of a prompt that stands for a part of an encoder input. Before 0.19 only this token says where an
input lies in a block: the block's hash has nothing but the name of the input."""


@dataclass
class Played:
    """How a history went."""

    driver: Driver
    raised: str = ""
    """The exception that the engine raised, if any; the history ends there."""
    idle: bool = False
    """Whether every request ended, and no step is in flight."""


def _setup(history: History) -> dict[str, Any]:
    """The history's setup, without what this release can't run."""
    groups = history.setup.get("groups", ())
    if "replay" not in groups or not lacking(["replayed window"]):
        return history.setup
    return {**history.setup, "groups": tuple("sliding" if kind == "replay" else kind for kind in groups)}


def tiers_of(name: str, tokens: int) -> dict[str, int]:
    """The tiers that hold external tokens of a request: one of two, or both."""
    both = {"host": tokens // 2, "disk": tokens - tokens // 2}
    return ({"host": tokens}, {"disk": tokens}, both)[crc32(name.encode()) % 3]


def play(history: History, attach: Callable[[Any], object] = id) -> Played:
    """Drive a real scheduler, passed to ``attach`` first, through a history and leave it idle."""
    driver = Driver(engine_setup(**_setup(history)), seed=history.seed, record=False)
    if history.depth > 1 and getattr(driver.scheduler, "defer_block_free", None) is False:
        # An engine with as many batches in flight defers the freeing of blocks that a load may fill.
        transfers = driver.scheduler.vllm_config.kv_transfer_config
        driver.scheduler.defer_block_free = transfers is not None and transfers.is_kv_consumer
    if driver.connector is not None:
        driver.connector.script.sources = tiers_of
    attach(driver.scheduler)
    played = Played(driver)
    player = _Player(driver, history)
    try:
        for operation in history.operations:
            player.play(operation)
        played.idle = player.finish()
    except Exception as raised:
        played.raised = f"{type(raised).__name__}: {raised}".split("\n")[0]
    return played


@dataclass
class _Player:
    driver: Driver
    history: History
    names: list[str] = field(default_factory=list)
    sessions: set[str] = field(default_factory=set)
    chunks: int = 0
    unreported: list[str] = field(default_factory=list)
    """Requests whose load failed, but is not reported finished yet."""

    def play(self, operation: Operation) -> None:
        driver = self.driver
        match operation:
            case Add():
                self.add(operation)
            case Store(which, stored, asynchronous) if name := self.living(which):
                driver.connector.store(name, stored, asynchronous=asynchronous)
            case Defer(which) if name := self.living(which):
                driver.connector.answer_lookups(name, None)
            case Chunk(which, tokens, max_tokens):
                self.chunk(which, tokens, max_tokens)
            case Schedule():
                self.schedule()
            case Output():
                self.output(operation)
            case Step(output):
                if not self.schedule() or len(driver.in_flight) >= self.history.depth:
                    self.output(output)
            case Abort(which) if name := self.living(which):
                driver.abort(name)
            case Preempt(which, drop):
                self.preempt(which, drop)
            case ResetCache(running):
                self.reset(running)
            case ChangeWeights():
                mark_weights()
                getattr(driver.scheduler, "note_weights", mark_weights)()
            case _:
                pass

    def living(self, which: int) -> str:
        """One of the requests that have not ended; "" if there is none."""
        requests = self.driver.scheduler.requests
        names = [n for n in self.names if n in requests and not requests[n].is_finished()]
        return names[which % len(names)] if names else ""

    def add(self, add: Add) -> None:
        driver = self.driver
        if driver.connector is not None:
            driver.connector.store(add.name, add.stored, asynchronous=add.asynchronous)
            if add.delay_free:
                driver.connector.script.delay_free.add(add.name)
        resumable = add.resumable
        self.names.append(add.name)
        if resumable:
            self.sessions.add(add.name)
        prompt = driver.prompt(add.name, add.prompt, (f"family {add.family}", add.shared))
        inputs = add.images if driver.setup.encoder_tokens else ()
        for _, first, tokens in inputs:
            prompt[first : first + tokens] = [PLACEHOLDER] * tokens
        driver.add(
            add.name,
            prompt,
            add.max_tokens,
            stop_at=add.stop_at,
            resumable=resumable,
            priority=add.priority,
            of_request=images(*inputs) if driver.setup.encoder_tokens else None,
        )

    def chunk(self, which: int, tokens: int, max_tokens: int) -> None:
        living = [name for name in self.names if name in self.sessions and self.is_open(name)]
        if not living:
            return
        name = living[which % len(living)]
        if not tokens:
            self.sessions.discard(name)
            self.driver.close(name)
            return
        self.chunks += 1
        prompt = random.Random(self.chunks).choices(range(3, 32_000), k=tokens)
        self.driver.runner.stop_at.pop(name, None)
        self.driver.add(name, prompt, max_tokens, resumable=True)

    def is_open(self, name: str) -> bool:
        request = self.driver.scheduler.requests.get(name)
        return request is not None and not request.is_finished()

    def schedule(self) -> bool:
        """Whether a step was scheduled; its batch may be empty."""
        driver = self.driver
        if len(driver.in_flight) >= self.history.depth or not driver.scheduler.has_requests():
            return False
        driver.schedule()
        return True

    def preempt(self, which: int, drop: bool) -> None:
        scheduler = self.driver.scheduler
        if not scheduler.running:
            return
        request = scheduler.running[which % len(scheduler.running)]
        can_free = getattr(scheduler, "_request_blocks_can_be_freed", None)
        if can_free is not None and not can_free(request):
            return  # The scheduler would not preempt it now.
        dropping = drop and not lacking(["dropped output"])
        self.driver.preempt(request.request_id, drop=True if dropping else None)

    def reset(self, running: bool) -> None:
        with contextlib.suppress(RuntimeError):  # A request waits for its load, or holds blocks.
            self.driver.reset_prefix_cache(running=running)

    # Output, and what the connector's workers report with it.

    def output(self, output: Output) -> None:
        driver = self.driver
        if not driver.in_flight:
            return
        transfers: dict[str, Any] = {}
        if driver.connector is not None:
            transfers = self.transfers(output)
        driver.output(accepted=output.accepted, **transfers)

    def transfers(self, output: Output) -> dict[str, Any]:
        driver = self.driver
        ordered = driver.in_flight[0].scheduled.kv_connector_metadata.loads
        loading = [*driver.runner.loading, *(load.request_id for load in ordered if load.asynchronous)]
        loading = sorted(set(loading))
        finished = {0: [], 1: loading, 2: loading[:1]}[output.finish]
        reports: dict[str, Any] = {"finished_sending": "all" if output.sent else ()}
        if output.failure:
            reports |= self.failure(output, ordered, loading)
            if "request" in reports:
                name = reports.pop("request")
                finished = [n for n in finished if n != name] + ([] if output.late else [name])
        if reports.get("failed_recving"):
            finished = [name for name in finished if name not in reports["failed_recving"]]
        reports["finished_recving"] = [name for name in loading if name in finished]
        return reports

    def failure(self, output: Output, ordered: Any, loading: list[str]) -> dict[str, Any]:
        """The report of a load that fails: of one that this step orders, or of one that is under way."""
        driver = self.driver
        dice = random.Random(output.failure)
        now = [load.request_id for load in ordered if not load.asynchronous]
        candidates = [*now, *(name for name in loading if self.is_open(name))]
        if not candidates:
            return {}
        name = dice.choice(candidates)
        if len(driver.setup.groups) > 1:
            if name in now or lacking(["failed load as a whole"]):
                return {}
            return {"failed_recving": [name]}
        blocks = self.blocks_of_load(name, ordered if name in now else ())
        if not blocks:
            return {}
        first = dice.randrange(len(blocks))
        last = dice.choice((len(blocks), dice.randint(first + 1, len(blocks))))
        report: dict[str, Any] = {"invalid_blocks": blocks[first:last]}
        if name not in now:
            report["request"] = name
        return report

    def blocks_of_load(self, name: str, ordered: Any) -> list[int]:
        """The blocks that a load of the request fills: one of ``ordered``, or else the last one."""
        local, size = 0, self.history.setup["block_size"]
        blocks: list[int] = []
        for call in self.driver.connector.script.calls:
            if isinstance(call, LookupCall) and call.request_id == name:
                local = call.local_tokens
            if isinstance(call, PlannedLoads):
                for load in call.loads:
                    if load.request_id == name and (not ordered or load in ordered):
                        end = -(-(local + load.external_tokens) // size)
                        blocks = list(load.block_ids[0][local // size : end])
        return blocks

    # The end.

    def finish(self) -> bool:
        """Finish every request; whether the engine is idle then."""
        driver = self.driver
        for number in range(MAX_STEPS):
            for name in sorted(self.sessions):
                self.sessions.discard(name)
                if self.is_open(name):
                    driver.close(name)
            if not driver.in_flight and not driver.scheduler.has_requests():
                return True
            if number == MAX_STEPS // 2:
                for name in self.names:
                    if self.is_open(name):
                        driver.abort(name)
            if not self.schedule() or len(driver.in_flight) >= self.history.depth:
                self.output(Output())
        return False
