"""The engine's counters and the ledger: every difference has a cause, and only faults are unexplained.

The clock is that of a small world: a scheduler whose events come to the ledger late, and a front end
that counts late, throws away what comes for clients that have gone, and may err.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests import journals
from tests.examples import examples

from kvledger.audit.analysis.source_differences import ComparedCounter
from kvledger.audit.causes import UNEXPLAINED
from kvledger.audit.checks import figures
from kvledger.audit.events import (
    Admitted,
    Delivered,
    Event,
    Finished,
    Gap,
    LookupsCounted,
    Preempted,
    Reported,
    RequestAdded,
    Snapshot,
    SnapshotRow,
    Stepped,
    TiersReported,
)
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.exporters.sidecar.engine_metrics import (
    SETTLE_SECONDS,
    WINDOW_SECONDS,
    CounterComparison,
    Scrape,
)

SCRAPE_SECONDS = 15
PROMPT = 100
FIGURES = tuple(row.figure for figure in figures.FIGURES for row in figure.compared)


@dataclass
class World:
    """One engine, its front end, and the comparison of both. Times are seconds."""

    dice: random.Random
    front_end_lag: float = 0.0
    journal_lag: float = 0.0
    drop: float = 0.0
    preempt: float = 0.0
    zero: bool = True
    now: float = 1_000.0
    requests: int = 0
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0.0))
    to_read: list[tuple[float, Event]] = field(default_factory=list)
    to_count: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    rows: list[tuple[float, ComparedCounter]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine_audit = FollowedAudit(Path("nowhere"))
        self.number = 0
        self.feed(journals.STARTED)
        rows = [] if self.zero else [SnapshotRow(99, "before", PROMPT, False, 10, 0, 0, PROMPT, 0)]
        self.feed(Snapshot(0, 0, rows, 0))
        self.comparison = CounterComparison(self.engine_audit, zero=self.zero)
        if not self.zero:
            self.counters = {figure: float(self.dice.randrange(10_000)) for figure in FIGURES}

    def feed(self, event: Event) -> None:
        self.engine_audit.feed(self.number, event)
        self.number += 1

    def request(self) -> None:
        """Run one whole request at the present time."""
        request, self.requests = self.requests, self.requests + 1
        at = round(self.now * 1e6)
        local, again = self.dice.choice((0, 32, 64)), self.dice.choice((0, 32))
        step = 3 * request + 1
        preempted = self.dice.random() < self.preempt
        gone = self.dice.random() < self.drop
        first = [] if not preempted else self.life(at, request, step, local, 0, resumed=False, ends=False)
        local = again if preempted else local
        last = self.life(at, request, step + 1, local, int(preempted), resumed=preempted, ends=True)
        outcome = "aborted" if gone and self.dice.random() < 0.5 else "stopped"
        reported = Reported(at, request, PROMPT, local, 0, PROMPT - local, local)
        events: list[Event] = [
            RequestAdded(at, request, f"r{request}", PROMPT),
            *first,
            *last,
            reported,
            Finished(at, request, outcome, PROMPT, 0, 0, PROMPT + 1, 1),
        ]
        read = late(self.now + self.dice.random() * self.journal_lag, self.to_read)
        self.to_read += [(read, event) for event in events]
        heard = {
            "local_queried_tokens": PROMPT,
            "local_hit_tokens": first[0].local_tokens if first and isinstance(first[0], Admitted) else local,
        }
        heard["device_hit_tokens"] = heard["local_hit_tokens"]
        heard["external_queried_tokens"] = PROMPT - heard["local_hit_tokens"]
        if not gone:
            heard |= {
                "prompt_tokens": PROMPT,
                "local_tokens": local,
                "computed_tokens": PROMPT - local,
                "cached_tokens": local,
                "preemptions": int(preempted),
                "requests": 1,
                "output_tokens": 1,
            }
        counted = late(self.now + self.dice.random() * self.front_end_lag, self.to_count)
        self.to_count.append((counted, heard))

    def life(
        self, at: int, request: int, step: int, local: int, held: int, *, resumed: bool, ends: bool
    ) -> list[Event]:
        """Admitted, and run to its first output or preempted before it."""
        stepped = [
            Admitted(at, request, step, resumed, local, 0, False, local),
            LookupsCounted(at, step, 1, PROMPT, local, 1, PROMPT - local, 0),
            Stepped(at, step, [request, PROMPT - local, 0, PROMPT], []),
            Delivered(at, [request, int(ends)], []),
        ]
        if not ends:
            stepped.append(Preempted(at, request, step, "blocks", PROMPT, 0, 0, 0, 0, True))
        return stepped

    def until(self, seconds: float, per_second: float = 0.0) -> None:
        """Let time pass, with so many requests a second."""
        while self.now < seconds:
            for _ in range(int(per_second) + (self.dice.random() < per_second % 1)):
                self.request()
            self.settle()
            self.engine_audit.read_seconds = self.now - self.journal_lag
            self.comparison.note(self.now)
            if round(self.now) % SCRAPE_SECONDS == 0:
                self.comparison.scraped(Scrape(self.now, self.now, dict(self.counters)))
            if self.engine_audit.engine_counters is not None:
                self.rows += [(self.now, row) for row in self.engine_audit.engine_counters.rows]
            self.now += 1

    def settle(self) -> None:
        while self.to_read and self.to_read[0][0] <= self.now:
            self.feed(self.to_read.pop(0)[1])
        while self.to_count and self.to_count[0][0] <= self.now:
            for figure, amount in self.to_count.pop(0)[1].items():
                self.counters[figure] += amount

    @property
    def alarms(self) -> list[tuple[float, str, float]]:
        return [(at, row.figure, row.drift[UNEXPLAINED]) for at, row in self.rows if row.drift[UNEXPLAINED]]

    @property
    def last(self) -> dict[str, ComparedCounter]:
        assert self.engine_audit.engine_counters is not None
        return {row.figure: row for row in self.engine_audit.engine_counters.rows}


def late(seconds: float, queue: Sequence[tuple[float, object]]) -> float:
    """A delayed time that keeps the order of the queue."""
    return max(seconds, queue[-1][0]) if queue else seconds


worlds = st.builds(
    World,
    dice=st.integers(0, 2**32).map(random.Random),
    front_end_lag=st.floats(0, WINDOW_SECONDS - 1),
    journal_lag=st.floats(0, SETTLE_SECONDS - 1),
    drop=st.sampled_from((0.0, 0.01, 0.5)),
    preempt=st.sampled_from((0.0, 0.3)),
    zero=st.booleans(),
)


simulated = examples(12, phases=(Phase.explicit, Phase.generate))
"""A world is seconds of work to shrink, and its seed says all."""


@simulated
@given(worlds, st.floats(0.1, 3))
def test_a_correct_engine_has_no_unexplained_difference(world: World, per_second: float) -> None:
    """Under traffic, after it, and in a second burst, whatever the delays."""
    world.until(1_200, per_second)
    world.until(1_400)
    world.until(1_500, per_second)
    world.until(1_700)

    assert [] == world.alarms
    assert world.last.keys() >= {"prompt_tokens", "local_queried_tokens", "preemptions", "requests"}
    for _, row in world.rows:
        assert row.counted == pytest.approx(row.ledger + sum(row.drift.values()))


@simulated
@given(worlds, st.sampled_from(("prompt_tokens", "local_hit_tokens", "requests", "preemptions")))
def test_overcounting_is_unexplained(world: World, figure: str) -> None:
    """To the token once the traffic pauses, if no client disconnected."""
    world.drop = 0.0
    world.until(1_200, 0.5)
    world.counters[figure] += 10_000
    world.until(1_500, 0.5)
    world.until(1_700)

    assert {figure} == {of for _, of, _ in world.alarms}
    unexplained = world.last[figure].drift[UNEXPLAINED]
    if world.zero and figure != "preemptions":
        assert 10_000 == unexplained
    assert 0 < unexplained <= 10_000


@simulated
@given(worlds, st.sampled_from(("computed_tokens", "local_queried_tokens")))
def test_undercounting_is_unexplained(world: World, figure: str) -> None:
    """If no client disconnected. A falling counter would be a restart, so the counter lags instead."""
    world.drop = 0.0
    world.until(1_200, 0.5)
    world.until(1_400)
    world.to_count.append((world.now, {figure: 0.0}))
    for _ in range(100):
        world.request()
    world.to_count[-100:] = [
        (at, {**heard, figure: 0.0} if figure in heard else heard) for at, heard in world.to_count[-100:]
    ]
    world.until(1_700)

    assert {figure} == {of for _, of, _ in world.alarms}
    assert world.last[figure].drift[UNEXPLAINED] < 0


def after_ten_clients_left() -> World:
    """The front end has dropped the output of ten requests, and the engine has been idle since."""
    world = World(random.Random(1))
    world.until(1_100, 0.5)
    world.drop = 1.0
    world.until(1_110, 1)
    world.until(1_400)
    return world


def test_disconnected_clients_are_the_cause_dropped() -> None:
    world = after_ten_clients_left()

    dropped = world.last["prompt_tokens"].drift
    assert {"dropped", UNEXPLAINED} == set(dropped)
    assert -10 * PROMPT == dropped["dropped"]
    assert 0 == dropped[UNEXPLAINED]


def test_outputs_of_disconnected_clients_are_the_cause_dropped() -> None:
    world = after_ten_clients_left()
    assert {"dropped": -10, UNEXPLAINED: 0} == world.last["output_tokens"].drift

    world.drop = 0.0
    world.until(1_450, 1)
    world.counters["output_tokens"] += 25
    world.until(1_700)

    assert 15 == world.last["output_tokens"].drift[UNEXPLAINED], "what was dropped hides as many"


def test_lookups_after_a_preemption_are_the_cause_resumed() -> None:
    world = World(random.Random(1), preempt=1.0)
    world.until(1_010, 1)
    world.until(1_300)

    row = world.last["local_queried_tokens"]
    assert (20 * PROMPT, 10 * PROMPT) == (row.ledger, row.counted)
    assert {"resumed": -10 * PROMPT, UNEXPLAINED: 0} == row.drift


def test_external_tokens_are_compared_by_tier() -> None:
    """vLLM counts 40 tokens whose tiers have 20 as ``external_unspecified``."""
    world = World(random.Random(1))
    world.until(1_010, 1)
    world.feed(TiersReported(round(world.now * 1e6), 0, 1, 96, ["host", "disk"], [64, 32]))
    world.feed(TiersReported(round(world.now * 1e6), 0, 1, 40, ["host"], [20]))
    world.counters["host_hit_tokens"] += 64
    world.counters["disk_hit_tokens"] += 32
    world.counters["unspecified_hit_tokens"] += 40
    world.until(1_300)

    assert [] == world.alarms
    rows = {figure: (row.ledger, row.counted) for figure, row in world.last.items()}
    assert [(64, 64), (32, 32), (0, 0)] == [rows[f"{tier}_hit_tokens"] for tier in ("host", "disk", "p2p")]
    assert rows["local_hit_tokens"] == rows["device_hit_tokens"]
    assert {"tiers_do_not_sum": 40, UNEXPLAINED: 0} == world.last["unspecified_hit_tokens"].drift


def test_tokens_that_vllm_counts_in_another_tier_are_unexplained() -> None:
    world = World(random.Random(1))
    world.until(1_010, 1)
    world.feed(TiersReported(round(world.now * 1e6), 0, 1, 96, ["host"], [96]))
    world.counters["disk_hit_tokens"] += 96
    world.until(1_300)

    assert 96 == world.last["disk_hit_tokens"].drift[UNEXPLAINED]
    assert -96 == world.last["host_hit_tokens"].drift[UNEXPLAINED]


def test_a_restarted_engine_gets_a_new_baseline() -> None:
    """The engine's counters restart at zero; the ledger's figures continue."""
    world = World(random.Random(2))
    world.until(1_200, 1)
    world.until(1_300)
    world.counters = dict.fromkeys(FIGURES, 0.0)
    world.until(1_600, 1)
    world.until(1_800)

    assert [] == world.alarms
    row = world.last["requests"]
    assert row.ledger < 350
    assert abs(row.counted - row.ledger) <= WINDOW_SECONDS + SETTLE_SECONDS, "one request a second"


def test_lost_events_restart_the_comparison() -> None:
    """The engine's counters include lost events; the ledger does not."""
    world = World(random.Random(3))
    world.until(1_200, 1)
    world.settle()
    for _ in range(50):
        world.request()
    lost = {id(event) for _, event in world.to_read}
    world.to_read = [row for row in world.to_read if id(row[1]) not in lost]
    world.feed(Gap(round(world.now * 1e6), 50, "the recorder was full"))
    world.feed(Snapshot(round(world.now * 1e6), 3 * world.requests, [], 0))
    world.until(1_600, 1)
    world.until(1_800)

    assert [] == world.alarms
    assert (
        world.engine_audit.engine_counters is not None
        and world.engine_audit.engine_counters.baseline_seconds > 1_200
    )


def test_an_engine_that_does_not_answer_is_not_up() -> None:
    world = World(random.Random(4))
    world.until(1_100, 1)
    world.comparison.missed()

    assert world.engine_audit.engine_counters is not None and not world.engine_audit.engine_counters.answered
    assert world.engine_audit.engine_counters.rows


PROMPTS = {"prompt_tokens", "local_tokens", "external_tokens", "computed_tokens", "cached_tokens"}
LOCAL = {"local_queried_tokens", "local_hit_tokens"}
EXTERNAL = {"external_queried_tokens", "external_hit_tokens"}
TIERS = {f"{tier}_hit_tokens" for tier in ("device", "host", "p2p", "disk", "unspecified")}
ALWAYS = {"requests", "preemptions", "output_tokens"}


@pytest.mark.parametrize(
    ("version", "compared"),
    [
        ("0.12.0", ALWAYS),
        ("0.18.1", ALWAYS | EXTERNAL),
        ("0.24.0", ALWAYS | EXTERNAL | PROMPTS),
        ("0.31.0", ALWAYS | EXTERNAL | PROMPTS | LOCAL),
        ("0.32.0", ALWAYS | EXTERNAL | PROMPTS | LOCAL | TIERS),
    ],
)
def test_only_counters_with_the_ledgers_meaning_are_compared(version: str, compared: set[str]) -> None:
    world = World(random.Random(5))
    world.engine_audit.auditor.ledger.engine = replace(journals.STARTED, version=version)
    world.until(1_100, 1)

    assert compared == set(world.last)
