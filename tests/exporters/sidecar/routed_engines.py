"""Two engines with small prefix caches to which requests are sent at random, and their KV events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from tests import journals

from kvledger.audit import events as ev
from kvledger.audit.journal.writer import JournalWriter

BEGAN = journals.STARTED.wall_seconds
SIZE = 16
BLOCKS = 24
"""Of one engine; a prompt has two to eight."""
SALT = 1_000_000
"""Added to the hash ids of a prompt under a salt."""


class RoutedEngine:
    """One engine: allocates the block that was released longest ago, and publishes after each request."""

    def __init__(self, folder: Path, number: int, lost: Sequence[int], began: int = 0) -> None:
        settings = {"hash_key": "0123456789abcdef", "kv_events_port": 5557 + number, "model": f"m{number}"}
        self.engine = JournalWriter(folder / f"engine-{began}-{number}-0")
        self.recording = JournalWriter(folder / f"events-{began}-{number}-0")
        self.began = began
        started = replace(
            journals.STARTED, level="blocks", configuration=settings, wall_seconds=BEGAN + began
        )
        for writer in (self.engine, self.recording):
            writer.rotate()
            writer.write([started, ev.Snapshot(0, 0, [], 0)])
        self.engine.write([ev.PoolSeen(0, 0, 0, BLOCKS + 1, 0, BLOCKS, 0, [0, SIZE, 2])])
        self.free = list(range(1, BLOCKS + 1))
        self.hash_of: dict[int, int] = {}
        self.requests = self.sequence = 0
        self.lost = frozenset(lost)
        self.said: list[int] = []
        self.names_tokens = False
        """Whether KV events name the tokens of their blocks, by keyed ids."""
        self.contents: list[int] = []
        self.received = 0.0

    def serve(self, hashes: Sequence[int], second: int, delay: float) -> None:
        """One request, half a second before its step. Its events are received ``delay`` seconds later."""
        number, step, at = self.requests, self.requests + 1, (second - self.began) * 1_000_000
        self.requests += 1
        prompt = len(hashes) * SIZE + 5
        blocks = {hash_id: block for block, hash_id in self.hash_of.items()}
        hits: list[int] = []
        for hash_id in hashes:
            if hash_id not in blocks:
                break
            hits.append(blocks[hash_id])
        self.free = [block for block in self.free if block not in hits]
        new, self.free = self.free[: len(hashes) - len(hits) + 1], self.free[len(hashes) - len(hits) + 1 :]
        for block in new:
            self._say(ev.REMOVED_BLOCKS, self.hash_of.pop(block, 0))
        rows = []
        for place, block in enumerate(new[:-1], len(hits)):
            self.hash_of[block] = hashes[place]
            rows += [block, hashes[place], (place + 1) * SIZE]
            self._say(ev.STORED, hashes[place], hashes[place - 1] if place else 0)
        local = len(hits) * SIZE
        table = [*hits, *new]
        self.engine.write(
            [
                ev.RequestAdded(at - 500_000, number, f"r-{second}-{number}", prompt),
                ev.BlocksTouched(at, step, 0, number, 0, "allocate", hits, [1] * len(hits)),
                ev.BlocksAllocated(at, step, 0, "allocate", [number, 0, len(new), *new]),
                ev.BlocksCached(at, step, 0, [number, 0, prompt, len(rows) // 3, *rows]),
                ev.Admitted(at, number, step, False, local, 0, False, local),
                ev.Stepped(at, step, [], []),
                ev.BlocksFreed(at, step, 0, number, 0, "free", table[::-1], [0] * len(table)),
                ev.Finished(at, number, "stopped", -1, -1, -1, prompt + 1, 1),
            ]
        )
        self.free += table[::-1]
        self._publish(second, delay)

    def reset(self, second: int) -> None:
        """The cache is reset; the next batch says so."""
        self.engine.write([ev.PoolReset((second - self.began) * 1_000_000, self.requests + 1, 0, True)])
        self.hash_of.clear()
        self.said += [ev.CLEARED, -1, -1, 0, 0, 0]

    def _say(self, kind: int, hash_id: int, parent: int = 0) -> None:
        if hash_id:
            self.said += [kind, 0, 0, SIZE, parent, 1, hash_id]
            self.contents += [hash_id % SALT] if self.names_tokens and kind == ev.STORED else []

    def _publish(self, second: int, delay: float) -> None:
        published = second + 0.1
        self.received = max(self.received, published + delay)  # batches arrive in order
        at = round((self.received - self.began) * 1e6)
        batch = ev.KVEventsReceived(
            at, 0, self.sequence, BEGAN + published, 0, ["GPU"], self.said, contents=self.contents
        )
        if self.sequence not in self.lost:
            self.recording.write([batch])
        self.sequence, self.said, self.contents = self.sequence + 1, [], []

    def stop(self, second: int) -> None:
        """The engine ends in good order."""
        self.engine.write([ev.EngineStopped((second - self.began) * 1_000_000, "shutdown")])
        for writer in (self.engine, self.recording):
            writer.close()


class Fleet:
    """Requests of six families go to two engines by chance.

    ``salted``: each under one of two salts, and KV events name the tokens of their blocks.
    """

    def __init__(self, folder: Path, seed: int, *, lose: bool, salted: bool = False) -> None:
        self._folder, self._salted = folder, salted
        self._choose = random.Random(seed)
        lost = [sorted(self._choose.sample(range(3, 90), 12)) if lose else [] for _ in range(2)]
        self.engines = [RoutedEngine(folder, number, lost[number]) for number in range(2)]
        for engine in self.engines:
            engine.names_tokens = salted
        self.second = 1

    def serve(self, requests: int) -> None:
        """Send so many requests; some batches come late, and now and then a cache is reset."""
        for _ in range(requests):
            self.second += 1
            family, engine = self._choose.randrange(6), self._choose.choice(self.engines)
            shared = [family * 100 + place + 1 for place in range(self._choose.randrange(1, 6))]
            own = [self.second * 1000 + place for place in range(self._choose.randrange(1, 4))]
            salt = self._choose.choice((0, SALT)) if self._salted else 0
            engine.serve(
                [salt + each for each in (*shared, *own)], self.second, self._choose.choice((0.05, 0.05, 3.0))
            )
            if self._choose.random() < 0.03:
                engine.reset(self.second)

    def restart(self) -> None:
        """The first engine ends, and another one starts at its address two seconds later."""
        self.engines[0].stop(self.second + 1)
        self.second += 3
        self.engines[0] = RoutedEngine(self._folder, 0, [], self.second)

    def stop(self) -> None:
        """Both engines end."""
        for engine in self.engines:
            engine.stop(self.second + 1)
