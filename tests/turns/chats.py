"""Chats on real schedulers over planned time, each with one planted cause of what its turns miss.

What is expected of a turn is computed here from token ids: how many tokens it shares with the turn before,
and what that left. Nothing of it is read from blocks or events.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tests.incidents.serving import nanoseconds, planned_clock
from tests.scenarios.driving import Driver, engine_setup

from kvledger.audit.engines import choose, host_version
from kvledger.audit.engines.configuration import SESSION
from kvledger.audit.journal.recorder import MemoryRecorder
from kvledger.audit.journal.writer import JournalWriter

BLOCK = 16
STEP_SECONDS = 0.01
BATCH = 100
"""Events of one batch of a journal."""


@dataclass
class Sent:
    """One turn as it was sent. ``sequence``: its prompt and answer; ``ended``: when, in planned seconds."""

    request_id: str
    prompt: list[int]
    sequence: list[int] = field(default_factory=list)
    arrived: float = 0.0
    ended: float = 0.0


class Engine:
    """One real engine. Outputs are generated; time is planned: ``token_seconds`` for each token of a step."""

    def __init__(self, name: str, *, token_seconds: float = 0.0, **setup: Any) -> None:
        self.name, self.now, self.token_seconds = name, 0.0, token_seconds
        # Releases without sessions have them in their request ids; so has every chat here.
        with planned_clock(self), patch.dict(os.environ, {SESSION: r"^(.+)-\d+$"}):
            options: dict[str, Any] = {"blocks": 2_000, "max_running": 8, "block_size": BLOCK} | setup
            self.driver = Driver(engine_setup(**options), record=False)
            self.sink = MemoryRecorder()
            self.observer = choose(self.driver.scheduler)(
                self.driver.scheduler,
                self.sink,
                version=host_version(),
                level="blocks",
                clock=lambda: nanoseconds(self),
            )
            self.observer.start()

    def send(self, request_id: str, prompt: Sequence[int], output: int = 20, **more: Any) -> Sent:
        """Send a request and wait for its answer."""
        (sent,) = self.send_all([(request_id, prompt)], output, **more)
        return sent

    def send_all(
        self, requests: Iterable[tuple[str, Sequence[int]]], output: int = 20, **more: Any
    ) -> list[Sent]:
        """Send requests at once and wait for all answers."""
        with planned_clock(self):
            known = {
                name: (
                    Sent(name, list(prompt), arrived=self.now),
                    self.driver.add(name, prompt, output, **more),
                )
                for name, prompt in requests
            }
            for _, request in known.values():
                self.added(request)
            while self.driver.scheduler.has_requests() or self.driver.in_flight:
                tokens = 0
                if self.driver.scheduler.has_requests():
                    tokens = self.driver.schedule().total_num_scheduled_tokens
                self.now += STEP_SECONDS + self.token_seconds * tokens
                self.driver.output()
        for sent, request in known.values():
            sent.sequence, sent.ended = list(request.all_token_ids), self.now
        return [sent for sent, _ in known.values()]

    def added(self, request: Any) -> None:
        """A request was added, and no step was scheduled since."""

    def reset(self) -> None:
        """Reset the prefix cache."""
        with planned_clock(self):
            assert self.driver.reset_prefix_cache()

    def stop(self, folder: Path) -> None:
        """Write the journal, in batches."""
        with planned_clock(self):
            self.driver.schedule()  # delivers what was buffered
            self.observer.stop("shutdown")
        events, writer = self.sink.take(), JournalWriter(folder / self.name)
        writer.rotate()
        for first in range(0, len(events), BATCH):
            writer.write(events[first : first + BATCH])
        writer.close()


def words(dice: Random, count: int) -> list[int]:
    """So many random tokens."""
    return [dice.randrange(100, 30_000) for _ in range(count)]


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@dataclass(frozen=True)
class Expected:
    """What a turn must miss: reusable tokens, and how many of them by the planted cause and below a block."""

    reusable: int
    lost: dict[str, int]


def hits(before: Sent, turn: Sent) -> int:
    """Tokens of the turn before that a turn can hit: whole blocks that both share, below its last token."""
    whole = min(shared(before.sequence, turn.prompt), len(before.sequence) - 1, len(turn.prompt) - 1)
    return whole // BLOCK * BLOCK


def expected(before: Sent, turn: Sent, cause: str, hit: int) -> Expected:
    """What a turn misses of the turn before.

    ``cause``: why the prompts part, or why the engine has none of what they share. ``hit``: what it hits.
    """
    reusable = min(len(before.sequence) - 1, len(turn.prompt) - 1)
    whole = reusable // BLOCK * BLOCK
    hit, lost = min(hit, reusable), dict[str, int]()
    if hits(before, turn) < whole:  # they part before the last block that could be hit
        lost[cause] = reusable - hit
    else:
        lost[cause] = whole - hit
        lost["below_block"] = reusable - whole
    return Expected(reusable, {name: tokens for name, tokens in lost.items() if tokens})


def chat(
    engine: Engine,
    session: str,
    dice: Random,
    turns: int,
    change: Callable[[int, list[int]], list[int]] = lambda _, prompt: prompt,
    **more: Any,
) -> list[Sent]:
    """A chat that grows by its answers and new questions. ``change`` rewrites the prompt of each turn."""
    prompt, sent = words(dice, dice.randrange(80, 200)), list[Sent]()
    for number in range(1, turns + 1):
        now = engine.send(
            f"{session}-{number}", change(number, prompt), dice.randrange(5, 40), **of(session), **more
        )
        sent.append(now)
        prompt = now.sequence + words(dice, dice.randrange(10, 60))
        engine.now += dice.uniform(1, 20)
    return sent


def of(session: str, **more: Any) -> dict[str, Any]:
    """The arguments of a request of a session, for releases that have sessions."""
    return {"of_request": {"session_id": session, **more}}
