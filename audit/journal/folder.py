"""Read a whole journal, or follow one as it grows.

Code that needs positions, batches or damage uses :class:`~kvledger.audit.journal.reader.Reader` itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from ..pool_calls import AnyEvent
from .reader import Damage, Position, Reader


def read(
    path: str | Path, start: Position | None = None, damage: list[Damage] | None = None
) -> Iterator[tuple[int, AnyEvent]]:
    """Yield (event number, event) of everything written by now, and append what is damaged to ``damage``.

    A Gap that the reader puts in has the number of the first event that is missing.
    """
    with Reader(path, start) as reader:
        if damage is not None:
            reader.damage = damage
        for batch in reader.poll():
            yield from enumerate(batch.events, batch.first_event)


def tail(
    path: str | Path,
    poll_seconds: float = 0.25,
    stop: threading.Event | None = None,
    start: Position | None = None,
    damage: list[Damage] | None = None,
) -> Iterator[tuple[int, AnyEvent]]:
    """Like :func:`read`, and continue as the journal grows.

    Ends when the writer is gone and everything was read, or after ``stop`` was set.
    """
    stop = stop or threading.Event()
    with Reader(path, start) as reader:
        if damage is not None:
            reader.damage = damage
        while not stop.is_set():
            for batch in reader.poll():
                yield from enumerate(batch.events, batch.first_event)
                if stop.is_set():
                    return
            if reader.ended:
                return
            stop.wait(poll_seconds)
