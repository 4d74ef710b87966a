"""Cut at any two instants, the parts of a journal together are judged no better than the whole of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests import journals
from tests.golden.outputs import corpora, unpacked
from tests.histories import weave

from kvledger.audit.events import EngineRaised, Event, Finished, Gap, HookFailed
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.windows import EVERYTHING, Window

WORSE = ["clean", "unknown", "violated"]
TWO = "a.A0+0 a.s40 a.o+ b.A16+0 b.s8 a.s1 b.o+ a.o+ a.F b.s1 b.o+ b.F"
TROUBLES = {
    "none": None,
    "events were lost": Gap(0, 5, "full"),
    "a hook failed": HookFailed(0, "schedule", "KeyError", False),
    "the observer was removed": HookFailed(0, "schedule", "KeyError", True),
    "the engine raised": EngineRaised(0, "schedule", "AssertionError", True),
    "the engine raised and lost nothing": EngineRaised(0, "schedule", "AssertionError", False),
}


def audited(path: Path, window: Window = EVERYTHING) -> EngineAudit:
    audit = EngineAudit(path, window=window)
    for _ in audit.replay():
        pass
    return audit


def check(path: Path, draw: random.Random, cuts: int) -> None:
    whole = audited(path)
    began = whole.began_seconds or 0.0
    for _ in range(cuts):
        first, second = sorted(began + draw.uniform(-1, whole.last_at / 1e6 + 1) for _ in range(2))
        windows = [Window(None, first), Window(first, second), Window(second, None)]
        verdicts = [audited(path, window).verdict for window in windows]
        assert max(map(WORSE.index, verdicts)) >= WORSE.index(whole.verdict), (
            f"{path} is {whole.verdict}, and cut at {first} and {second} {verdicts}"
        )


@pytest.mark.parametrize("corpus", corpora())
def test_recorded_journals(tmp_path: Path, corpus: str) -> None:
    unpacked(tmp_path, corpus)
    for path in find_journals([tmp_path / corpus]):
        check(path, random.Random(path.name), 2)


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "gone"])
def test_histories_with_trouble(tmp_path: Path, trouble: str, stopped: bool) -> None:
    draw = random.Random(f"{trouble} {stopped}")
    for number in range(8):
        stream: list[Event] = weave({0: 40, 1: 24}, TWO)
        place = draw.randrange(1, len(stream))
        event = TROUBLES[trouble]
        if event is not None:
            stream.insert(place, type(event)(stream[place - 1].at, *_rest(event)))
        if draw.random() < 0.3:
            stream = [each for each in stream if not isinstance(each, Finished)]
        path = journals.write(tmp_path / str(number), stream, stopped=stopped)
        check(path, draw, 4)


def _rest(event: Event) -> list[object]:
    return [getattr(event, name) for name in event.__struct_fields__[1:]]
