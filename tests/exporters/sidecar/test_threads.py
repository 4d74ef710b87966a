"""A thread of the sidecar that fails is said, makes it unhealthy, and begins again."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from tests import journals

from kvledger.exporters.metrics.values import Health, ThreadHealth
from kvledger.exporters.sidecar import threads
from kvledger.exporters.sidecar.follower import Follower
from kvledger.exporters.sidecar.pages import Site
from kvledger.exporters.sidecar.threads import Threads


def test_a_thread_that_raises_begins_again_with_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    health, stop = Health(), threading.Event()
    paused: list[float] = []
    monkeypatch.setattr(stop, "wait", lambda seconds: paused.append(seconds) or False)
    rounds = 0

    def work(beat: threads.Beat) -> None:
        nonlocal rounds
        rounds += 1
        if rounds < 9:
            raise RuntimeError("canary, as a line of a log would be")
        beat()
        stop.set()

    thread = Threads(health, said.append, stop).start("compact", work)
    thread.join(10)

    assert [1, 2, 4, 8, 16, 32, 60, 60] == paused
    assert (8, False) == (health.threads["compact"].restarts, health.threads["compact"].failed)
    assert said[0].startswith("The compact thread failed (RuntimeError at test_threads.py:")
    assert "canary" not in "".join(said)


def test_a_thread_that_is_told_to_stop_ends() -> None:
    health, stop = Health(), threading.Event()
    thread = Threads(health, print, stop).start("compact", lambda beat: stop.wait(10) and beat())
    stop.set()
    thread.join(5)

    assert not thread.is_alive()
    assert not health.threads["compact"].is_dead


def test_the_sidecar_is_unhealthy_while_a_thread_is_dead(tmp_path: Path) -> None:
    journals.write(tmp_path / "engine-0", journals.CLEAN)
    follower = Follower(tmp_path, None)
    follower.catch_up()
    site = Site(follower)

    def healthy() -> tuple[int, bytes]:
        status, _, body = site._healthy()
        return status, body

    assert 200 == healthy()[0]
    one = follower.health.threads["reconcile"] = ThreadHealth(time.time(), 60.0)
    assert 200 == healthy()[0]
    one.failed = True
    assert (503, b"Not at work: reconcile. The log says why.\n") == healthy()
    one.failed = False
    assert 200 == healthy()[0]
    one.beat_at -= 61
    assert 503 == healthy()[0]
    follower.close()
