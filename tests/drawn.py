"""Events of random histories that vLLM's real scheduler was driven through, recorded once.

``python -m tests.drawn`` plays the first histories of :mod:`tests.differential` on the installed vLLM and
writes them again, as the segment of a journal. Reading them needs no vLLM.
"""

from __future__ import annotations

import logging
import lzma
import tempfile
from functools import cache
from pathlib import Path

from kvledger.audit.events import EngineStarted, Event
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.writer import JournalWriter

RECORDED = Path(__file__).parent / "drawn.kvl.xz"
SEGMENT = "00000001.kvl"
HISTORIES = 150


@cache
def drawn_histories() -> tuple[tuple[Event, ...], ...]:
    """The events of each history: of one engine, from its start to its end."""
    histories: list[list[Event]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, SEGMENT).write_bytes(lzma.decompress(RECORDED.read_bytes()))
        for _, event in read(folder):
            if isinstance(event, EngineStarted):
                histories.append([])
            histories[-1].append(event)
    return tuple(map(tuple, histories))


def main() -> None:
    """Play the histories and write their events."""
    from tests.differential.player import play
    from tests.differential.random_histories import draw
    from tests.engines.observed import observe

    logging.disable(logging.ERROR)  # vLLM reports every failed load
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(Path(folder))
        for seed in range(HISTORIES):
            history = draw(seed)
            writer.write(observe(lambda attach, history=history: play(history, attach).driver)[1])
        writer.close()
        RECORDED.write_bytes(lzma.compress(Path(folder, SEGMENT).read_bytes(), preset=9))


if __name__ == "__main__":
    main()
