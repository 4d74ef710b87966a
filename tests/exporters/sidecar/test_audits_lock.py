"""A journal whose batch is never posted: it hides no other engine, and the sidecar still obeys a signal."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import journals
from tests.time_limits import HANGS

from kvledger.exporters.sidecar import follower, http_server, serve
from kvledger.exporters.sidecar.follower import FollowedJournal, Follower
from kvledger.exporters.sidecar.pages import Site


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follower]:
    """Two engines, and a short patience."""
    monkeypatch.setattr(follower, "PATIENCE_SECONDS", 0.05)
    journals.clean(tmp_path / "engine-1-1-0")
    journals.write(tmp_path / "engine-2-2-0", [], version="0.33.0", configuration={"model": "second"})
    made = Follower(tmp_path)
    made.catch_up()
    yield made
    made.close()


@contextlib.contextmanager
def being_posted(journal: FollowedJournal) -> Iterator[None]:
    with journal.lock:
        yield


def test_a_journal_that_is_being_posted_is_left_out_of_a_look(followed: Follower) -> None:
    with being_posted(followed.journals["engine-1-1-0"]), followed.lock:
        assert ["vllm 0.33.0"] == [audit.name[:11] for audit in followed.audits]
        assert ["engine-1-1-0: a batch of it is still being posted"] == followed.problems

    with followed.lock:
        assert 2 == len(followed.audits)
        assert [] == followed.problems


def test_metrics_of_the_other_engines_are_served_meanwhile(followed: Follower) -> None:
    server = http_server.listen("127.0.0.1:0", Site(followed))
    try:
        with being_posted(followed.journals["engine-1-1-0"]):
            began = time.monotonic()
            with urllib.request.urlopen(f"{server.url}/metrics", timeout=HANGS) as answer:
                text = answer.read().decode()
        assert time.monotonic() - began < HANGS
        assert "vllm 0.33.0" in text and "vllm 0.32.0" not in text
    finally:
        server.shutdown()
        server.server_close()


def test_a_stuck_reader_is_not_healthy(followed: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    server = http_server.listen("127.0.0.1:0", Site(followed))
    try:
        with urllib.request.urlopen(f"{server.url}/-/healthy", timeout=HANGS) as answer:
            assert 200 == answer.status
        monkeypatch.setattr(follower, "HEARTBEAT_SECONDS", -1.0)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url}/-/healthy", timeout=HANGS)
    finally:
        server.shutdown()
        server.server_close()


def test_a_signal_ends_the_sidecar_while_a_journal_keeps_it_busy(
    followed: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "STOP_SECONDS", 0.2)
    for_ever, entered = threading.Event(), threading.Event()

    def stuck(*_: object) -> None:
        entered.set()
        for_ever.wait(2 * HANGS)

    monkeypatch.setattr(followed, "catch_up", stuck)
    reading, received = serve._Reading(followed), []
    threading.Timer(0.3, lambda: received.append(15)).start()
    began = time.monotonic()

    ended = reading.until(received)

    assert entered.is_set() and not ended
    assert time.monotonic() - began < HANGS
    for_ever.set()


def test_an_exception_of_the_reading_thread_is_raised_in_the_main_thread(
    followed: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("it broke")

    monkeypatch.setattr(followed, "catch_up", fail)

    with pytest.raises(RuntimeError, match="it broke"):
        serve._Reading(followed).until([])
