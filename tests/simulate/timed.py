"""Requests that come at given times to the conformance engine of any release, on a clock of its own.

Usage: python scripts/releases.py run 0.23.0 -- python -m tests.simulate.timed DIR [OPTION...]

Writes a journal of level blocks: conversations that share system prompts, for a pool that is too small for
all of them. --set NAME=VALUE gives a setting of EngineSetup; the value is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.scenarios.driving import start

from kvledger.audit import events as ev
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.traffic.driver import Observation

STEP_US, TOKEN_US, DECODE_US = 4_000, 20, 150
"""How long a step takes, and how much longer for each scheduled token and each request that decodes."""


class Arrival(NamedTuple):
    """A request: when it comes, in seconds, the tokens of its prompt, and how many it outputs."""

    at: float
    prompt: list[int]
    output: int


def recorded(
    arrivals: Sequence[Arrival], *, noise: float = 0.0, seed: int = 0, **setup: Any
) -> list[ev.Event]:
    """The events of an engine that the requests come to. ``noise``: by which share steps are longer or
    shorter at most."""
    dice = random.Random(seed)
    now = 0
    observation = Observation("blocks", clock=lambda: now * 1000)
    driver = start(observation, **setup)
    place = 0
    while place < len(arrivals) or driver.scheduler.has_requests():
        while place < len(arrivals) and arrivals[place].at * 1e6 <= now:
            driver.add(f"r{place}", arrivals[place].prompt, arrivals[place].output)
            place += 1
        if not driver.scheduler.has_requests():
            now = math.ceil(arrivals[place].at * 1e6)
            continue
        step = list(driver.schedule().num_scheduled_tokens.values())
        took = STEP_US + TOKEN_US * sum(step) + DECODE_US * sum(tokens == 1 for tokens in step)
        now += round(took * (1 + noise * (2 * dice.random() - 1)))
        driver.output()
    return observation.stop()


def conversations(requests: int, rate: float, seed: int) -> list[Arrival]:
    """Turns of conversations at random times, ``rate`` a second."""
    dice = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [dice.randrange(10, 30_000) for _ in range(count)]

    systems = [tokens(dice.randrange(32, 160)) for _ in range(8)]
    running = [list(dice.choice(systems)) for _ in range(24)]
    at, found = 0.0, []
    for _ in range(requests):
        at += dice.expovariate(rate)
        which = dice.randrange(len(running))
        if dice.random() < 0.15 or len(running[which]) > 420:
            running[which] = list(dice.choices(systems, [1 / (rank + 1) for rank in range(8)])[0])
        running[which] += tokens(dice.randrange(8, 48))
        found.append(Arrival(at, list(running[which]), dice.randrange(4, 40)))
    return found


def write(folder: Path, events: Sequence[ev.Event]) -> Path:
    """A journal of the events."""
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write(list(events))
    writer.close()
    return folder


def main() -> None:
    """Record conversations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    setup: dict[str, Any] = {
        "blocks": 90,
        "max_running": 16,
        "max_batched_tokens": 256,
        "max_model_len": 1024,
    }
    setup |= {name: json.loads(value) for name, _, value in (word.partition("=") for word in given.set)}
    arrivals = conversations(given.requests, given.rate, given.seed)
    write(given.folder, recorded(arrivals, noise=given.noise, seed=given.seed, **setup))


if __name__ == "__main__":
    main()
