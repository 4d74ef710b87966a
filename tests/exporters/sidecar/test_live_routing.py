"""The sidecar's figures of routing are those of ``kvledger check routing`` over the same journals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tests.exporters.sidecar.routed_engines import Fleet
from tests.exporters.sidecar.test_follower import following

from kvledger.audit.analysis import routing as routers
from kvledger.audit.analysis.routing import EVENT_LOST, OTHER_SALT, RESTARTED, UNKNOWN, TokensIndex
from kvledger.audit.ledger.kv_events import KVEventCounts
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.recorded_events import routing
from kvledger.exporters.sidecar.follower import Follower

REQUESTS = 160


def counts(follower: Follower) -> KVEventCounts:
    """The figures of all engines together."""
    together = KVEventCounts()
    for audit in follower.audits:
        together.merge(audit.metrics.kv_events)
    return together


def same(folder: Path, live: KVEventCounts) -> dict[str, int]:
    """Compare with the whole journals; returns the causes of both sides."""
    whole = routing(journals_at([folder]))
    causes = whole.causes()
    assert len(whole.rows) == live.routed
    assert sum(row.predicted for row in whole.rows) == live.predicted
    assert sum(row.found for row in whole.rows) == live.found
    for side, found in (("missed", live.missed), ("surplus", live.surplus)):
        assert {cause: tokens for (of, cause), (_, tokens) in causes.items() if of == side} == found
    assert live.predicted - live.found == sum(live.missed.values()) - sum(live.surplus.values())
    return dict(Counter(live.missed) + Counter(live.surplus))


@pytest.mark.parametrize("lose", [False, True], ids=["whole", "with lost batches"])
def test_the_figures_of_the_sidecar_are_those_of_the_command(tmp_path: Path, lose: bool) -> None:
    fleet = Fleet(tmp_path, 1, lose=lose)
    fleet.serve(REQUESTS)
    fleet.stop()

    with following(tmp_path) as follower:
        live = counts(follower)
        causes = same(tmp_path, live)
    assert (REQUESTS, 0) == (live.routed, live.not_routed)
    assert lose == (EVENT_LOST in causes)


def test_the_figures_rise_while_the_engines_run(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 7, lose=True)
    before = 0
    with following(tmp_path) as follower:
        for _ in range(8):
            fleet.serve(REQUESTS // 8)
            follower.poll()
            follower.poll()
            now = counts(follower).routed
            assert before <= now < REQUESTS
            before = now
        assert before
        fleet.stop()
        follower.poll()
        follower.poll()
        assert 0 == counts(follower).not_routed
        same(tmp_path, counts(follower))


def test_an_engine_takes_no_batch_of_the_ones_that_were_started_after_it(tmp_path: Path) -> None:
    """All journals are there when the sidecar begins to read the first."""
    fleet = Fleet(tmp_path, 0, lose=False)
    for _ in range(3):
        fleet.serve(REQUESTS // 4)
        fleet.restart()
    fleet.serve(REQUESTS // 4)
    fleet.stop()

    with following(tmp_path) as follower:
        live = counts(follower)
        same(tmp_path, live)
    assert (0, sum(live.announced.values())) == (live.not_compared, live.agreed)


def test_the_first_request_of_a_restarted_engine_finds_nothing_of_what_was_announced(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 5, lose=False)
    fleet.serve(REQUESTS // 2)
    fleet.restart()
    fleet.serve(REQUESTS // 2)
    fleet.stop()

    with following(tmp_path) as follower:
        live = counts(follower)
        causes = same(tmp_path, live)
    assert (REQUESTS, 0) == (live.routed, live.not_routed)
    assert 0 < causes[RESTARTED] <= 5 * 16


@pytest.mark.parametrize(("lose", "restart"), [(False, False), (True, True)], ids=["whole", "with losses"])
def test_what_is_cached_under_another_salt_is_neither_predicted_nor_missed(
    tmp_path: Path, lose: bool, restart: bool
) -> None:
    """Hash ids tell salts from each other. An index of tokens, which the command has too, can't."""
    fleet = Fleet(tmp_path, 11, lose=lose, salted=True)
    fleet.serve(REQUESTS // 2)
    if restart:
        fleet.restart()
    fleet.serve(REQUESTS // 2)
    fleet.stop()

    with following(tmp_path) as follower:
        live = counts(follower)
        causes = same(tmp_path, live)
    assert (REQUESTS, 0) == (live.routed, live.not_routed)
    assert OTHER_SALT not in causes and UNKNOWN not in causes
    by_tokens = routing(journals_at([tmp_path]), TokensIndex)
    assert by_tokens.causes()["missed", OTHER_SALT][1] > 0
    assert sum(row.found for row in by_tokens.rows) == live.found


def test_an_engine_that_got_no_request_promises_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 5, lose=False)
    fleet.serve(REQUESTS // 2)
    fleet.restart()
    fleet.stop()

    with following(tmp_path) as follower:
        assert RESTARTED not in same(tmp_path, counts(follower))


def test_after_a_restart_no_counter_falls_and_open_requests_are_counted(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, 3, lose=True)
    fleet.serve(REQUESTS // 2)
    with following(tmp_path) as follower:
        follower.save()
        before = counts(follower)
    fleet.serve(REQUESTS // 2)
    fleet.stop()
    with following(tmp_path) as follower:
        now = counts(follower)

    assert REQUESTS == now.routed + now.not_routed
    assert 0 < now.not_routed < 30 and before.routed < now.routed
    assert now.predicted - now.found == sum(now.missed.values()) - sum(now.surplus.values())


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "MOST_RECENT", 50)
    fleet = Fleet(tmp_path, 3, lose=False)
    fleet.serve(REQUESTS)
    with following(tmp_path) as follower:
        for audit in follower.audits:
            events = audit.live_events
            assert len(events.cache.recent._order) <= 50 and len(events.announced._order) <= 50
            assert len(events.cache.requests) + len(events.cache.complete) <= 20
        now = counts(follower)
    assert now.not_routed and now.routed + now.not_routed <= REQUESTS
