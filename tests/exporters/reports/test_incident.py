"""`kvledger incident`: planted incidents are named first, and quiet traffic has no cause."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.command_line import exit_code
from tests.exporters.sidecar.routed_engines import BEGAN, Fleet
from tests.incidents.planted import CONTROLS, PLANTED, Incident
from tests.incidents.recorded import GROUPS, recorded, said

from kvledger.audit import causes
from kvledger.audit.analysis.step_times import Work
from kvledger.audit.replay.journals import Audit
from kvledger.audit.text import utc
from kvledger.exporters.facts.sides import ADAPTER, JOURNAL, PRIORITY, TENANT, Side
from kvledger.exporters.reports.diff import SettingChange
from kvledger.exporters.reports.incident import NOTHING, RULES, Change, felt, incident, likeliest
from kvledger.exporters.reports.incident import Incident as Found


@pytest.fixture(autouse=True)
def tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLEDGER_GROUP", GROUPS)


@functools.cache
def found_in(name: str) -> Found:
    """What `incident` finds in a recorded incident, from its beginning on."""
    return said(PLANTED[name])


QUICK = (
    "pool cut",
    "engine killed",
    "noisy neighbour",
    "prefix broken, at level blocks",
    "store lost",
    "router restarted",
    "wrong KV",
    "slow steps",
)
"""One incident of each kind; the others are read in the slower suites."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.golden) for name in PLANTED]
)
def test_the_first_sentence_names_the_planted_cause(name: str) -> None:
    found = found_in(name)

    assert PLANTED[name].cause == found.causes[0].name
    assert PLANTED[name].says in found.causes[0].text


def test_an_incident_is_driven_as_it_was_recorded(tmp_path: Path) -> None:
    """A real scheduler serves the requests of the plan."""
    pytest.importorskip("vllm")
    planted = PLANTED["pool cut"]
    driven = incident([planted.write(tmp_path)], since=planted.since, at=planted.at)

    assert figures_of(driven) == figures_of(found_in("pool cut"))


def figures_of(found: Found) -> Any:
    """What `incident` compares, on either side."""
    return [(cause.name, cause.text) for cause in found.causes], found.felt


@pytest.mark.golden
@pytest.mark.parametrize("quiet", CONTROLS.values(), ids=CONTROLS)
def test_nothing_changed_in_quiet_traffic(quiet: Incident, tmp_path: Path) -> None:
    assert [] == [cause.name for cause in said(quiet).causes]


def test_lost_kv_events_are_named_first(tmp_path: Path) -> None:
    """Two engines publish all batches for a minute, and then one of them loses some."""
    fleet = Fleet(tmp_path, 1, lose=False)
    fleet.serve(60)
    fleet.engines[1].lost = frozenset(range(fleet.engines[1].sequence + 3, fleet.engines[1].sequence + 9))
    since = BEGAN + fleet.second
    fleet.serve(60)
    fleet.stop()

    found = incident([tmp_path], since=f"{utc(since).replace(' UTC', 'Z').replace(' ', 'T')}")
    quiet = incident([tmp_path], since="2023-11-14T22:13:40Z", at="2023-11-14T22:14:15Z")

    assert "events-lost" == found.causes[0].name
    assert "events/gap" in found.causes[0].text
    assert "events-lost" not in [cause.name for cause in quiet.causes]


# --- each rule from both sides --------------------------------------------------------------------------

REQUESTS = 100
FIGURES = {
    "requests": REQUESTS,
    "prompt_tokens": 10_000,
    "local": 8_000,
    "scheduled": 4_000,
    "rejected": 100,
    "promised": 2_000,
    "voided": 20,
    "first_output": 1_000,
    "output_tokens": 1_100,
    "later_tokens": 1_000,
    "prefill_own_microseconds": 30_000_000,
    "decode_own_microseconds": 40_000_000,
    "first_tokens": REQUESTS,
    "first_token_microseconds": REQUESTS * 20_000,
    "remote_load_microseconds": REQUESTS * 2_000,
}
WORK = Work(steps=1_000, prefill_tokens=2_000, decode_requests=1_000)
TENANTS = {
    name: {"requests": 25, "local": 2_000, "external": 0, "prompt_tokens": 2_500, "scheduled": 1_000}
    for name in "abcd"
}
SIDE = Side(
    audit=Audit([]),
    seconds=100.0,
    figures=FIGURES,
    missed={causes.NOT_KNOWABLE: 1_000, causes.EVICTED: 1_000},
    labels={
        TENANT: TENANTS,
        ADAPTER: {"sql": {"requests": 50, "local": 0, "external": 0, "prompt_tokens": 0}},
        PRIORITY: {
            name: {"requests": 50, "first_tokens": 50, "queued_microseconds": 50 * 4_000} for name in "05"
        },
    },
    by_engine={(tenant, f"engine-{tenant}"): row for tenant, row in TENANTS.items()},
    outcomes={"stopped": 95, "aborted": 5},
    engines=2,
    work=WORK,
    busy_us=40_000_000,
    levels=["blocks"],
)


def figures(**more: int) -> Side:
    return replace(SIDE, figures={**FIGURES, **more})


def loading(wait: int, promised: int = 2_000) -> Side:
    """First tokens are as much later as the loads, of as many tokens, take longer."""
    waits = {"first_token_microseconds": 18_000 + wait, "remote_load_microseconds": wait}
    return figures(promised=promised, **{name: REQUESTS * us for name, us in waits.items()})


def hits(local: int, **more: object) -> Side:
    return replace(figures(local=local), **more)


def queued(late: int) -> Side:
    waits = {"0": 50 * 4_000, "5": 50 * late}
    rows = {
        name: {"requests": 50, "first_tokens": 50, "queued_microseconds": us} for name, us in waits.items()
    }
    return replace(SIDE, labels={**SIDE.labels, PRIORITY: rows})


def tenant_sends(requests: int) -> Side:
    rows = {**TENANTS, "a": {name: number * requests // 25 for name, number in TENANTS["a"].items()}}
    scheduled = 3_000 + rows["a"]["scheduled"]
    return replace(figures(requests=75 + requests, scheduled=scheduled), labels={**SIDE.labels, TENANT: rows})


def adapter(name: str, requests: int, local: int) -> Side:
    """Of 2,000 tokens of the adapter none hit if ``local`` is less than before."""
    own = {"local": 0, "external": 0, "prompt_tokens": 2_000}
    rows = {name: {"requests": requests, **own}}
    return hits(local, labels={**SIDE.labels, ADAPTER: {**SIDE.labels[ADAPTER], **rows}})


def missed(not_seen: int, evicted: int, **more: object) -> Side:
    missed = {causes.NOT_KNOWABLE: not_seen, causes.EVICTED: evicted}
    return hits(10_000 - not_seen - evicted, missed=missed, **more)


def found(id: str, number: int) -> Side:
    return replace(SIDE, findings={id: number})


def spread(here: int) -> dict[tuple[str, str], dict[str, int]]:
    """Requests of one tenant, of whose tokens those of one engine hit as before, and of another not."""
    hit = {"requests": here, "local": 4_000, "external": 0, "prompt_tokens": 5_000}
    return {("a", "one"): hit, ("a", "two"): {**hit, "requests": 100 - here, "local": 3_000}}


def started(local: int) -> Side:
    rows = {"one": {**FIGURES, "external": 0, "local": local}}
    return hits(local, started=frozenset(rows), labels={**SIDE.labels, JOURNAL: rows})


def busier(side: Side) -> Side:
    """Twice as much engine time, for twice the work."""
    return replace(side, busy_us=80_000_000, work=Work(*(2 * amount for amount in side.work)))


BOTH_SIDES = {
    "wrong-kv": (found("blocks/read-invalid", 1), found("metrics/prompt-missing", 50)),
    "no-progress": (found("requests/standstill", 1), found("metrics/prompt-missing", 50)),
    "violations": (found("tokens/negative", 3), found("metrics/prompt-missing", 50)),
    "events-lost": (found("events/gap", 2), SIDE),
    "died": (replace(SIDE, died=["one raised KeyError"]), SIDE),
    "restart": (started(7_000), started(8_000)),
    "resets": (missed(3_000, 1_000, resets=2), replace(SIDE, resets=2)),
    "loads-fail": (
        replace(figures(voided=200), voided={causes.FAILED: 200}),
        replace(figures(voided=200), voided={causes.PREEMPTED: 200}),
    ),
    "store-lost": (
        hits(6_500, figures={**FIGURES, "promised": 500, "local": 6_500}),
        figures(promised=1_600),
    ),
    "drafts-rejected": (
        busier(replace(figures(rejected=400), work=WORK._replace(decode_requests=3_000))),
        busier(figures(rejected=200)),
    ),
    "flood": (busier(tenant_sends(90)), tenant_sends(90)),
    "new-adapter": (adapter("sql-2", 20, 7_000), adapter("sql-2", 20, 8_000)),
    "traffic": (busier(replace(SIDE, seconds=60.0)), busier(replace(SIDE, seconds=80.0))),
    "longer-prompts": (
        busier(figures(prompt_tokens=16_000, local=12_800)),
        busier(figures(prompt_tokens=12_000, local=9_600)),
    ),
    "longer-outputs": (busier(figures(first_output=1_600)), busier(figures(first_output=1_200))),
    "routing": (hits(7_000, by_engine=spread(50)), replace(SIDE, by_engine=spread(50))),
    "slow-steps": (replace(SIDE, busy_us=60_000_000), replace(SIDE, busy_us=44_000_000)),
    "slow-loads": (loading(22_000), loading(22_000, promised=20_000)),
    "starved": (queued(50_000), queued(6_000)),
    "prefix": (missed(3_000, 1_000), missed(1_200, 1_000)),
    "evicted": (missed(1_000, 3_000), missed(1_000, 1_200)),
    "preempted": (figures(preemptions=20), figures(preemptions=4)),
    "aborted": (replace(SIDE, outcomes={"aborted": 20}), replace(SIDE, outcomes={"aborted": 8})),
}


def named(after: Side, before: Side = SIDE, settings: tuple[SettingChange, ...] = ()) -> list[str]:
    said, _ = likeliest(Change(before=before, after=after, settings=settings))
    return [cause.name for cause, _ in said]


@pytest.mark.parametrize("cause", BOTH_SIDES)
def test_a_cause_is_named_and_nothing_just_below(cause: str) -> None:
    after, near_miss = BOTH_SIDES[cause]

    assert cause in named(after)
    assert cause not in named(near_miss)


def test_every_rule_is_tested_from_both_sides() -> None:
    assert [] == named(SIDE)
    assert len(RULES) == len(BOTH_SIDES) + len(["settings"])


def test_a_setting_is_a_cause_if_it_does_harm() -> None:
    blocks = (SettingChange(setting="blocks", before="9", after="5"),)

    assert ["settings"] == named(started(7_000), settings=blocks)
    assert [] == named(started(8_000), settings=blocks)
    assert ["restart"] == named(
        started(7_000), settings=(SettingChange(setting="level", before="tokens", after="blocks"),)
    )


def test_what_follows_from_a_cause_is_not_said_beside_it() -> None:
    """After a restart blocks are missing because the cache began empty."""
    after = replace(started(7_000), missed={causes.NOT_KNOWABLE: 2_000, causes.EVICTED: 1_000})

    assert ["restart"] == named(after)
    assert ["prefix"] == named(replace(after, started=frozenset()))


def test_a_cause_begins_inside_the_window() -> None:
    """What was so just before an incident is no cause of it, and is said apart."""
    after, _ = BOTH_SIDES["traffic"]
    beside_the_day = Change(before=SIDE, after=after)

    said, older = likeliest(beside_the_day, Change(before=after, after=after))
    assert ([], ["traffic"]) == (said, [cause.name for cause in older])
    said, older = likeliest(beside_the_day, Change(before=SIDE, after=after))
    assert (["traffic"], []) == ([cause.name for cause, _ in said], older)


def test_the_share_that_a_cause_explains_is_counterfactual() -> None:
    """Half of the tokens that no longer hit are those of a new adapter."""
    [(cause, effect)], _ = likeliest(Change(before=SIDE, after=adapter("sql-2", 20, 4_800)))

    assert effect is not None and ("new-adapter", "hits") == (cause.name, effect.figure)
    assert (0.8, 0.48, 0.64) == pytest.approx((effect.before, effect.now, effect.undone))
    assert 0.5 == pytest.approx(effect.share)


def test_a_finding_that_was_as_frequent_before_is_not_new() -> None:
    assert [] == named(found("tokens/negative", 3), before=found("tokens/negative", 3))
    assert ["violations"] == named(found("tokens/negative", 9), before=found("tokens/negative", 3))


def test_few_requests_conclude_nothing_from_means() -> None:
    few = replace(figures(requests=19, preemptions=19, local=0), seconds=1.0, outcomes={"aborted": 19})
    assert [] == named(few)
    assert [] == list(felt(Change(before=SIDE, after=few)))


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_prints_the_cause_first_and_what_to_run_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = PLANTED["pool cut"]
    folder = recorded(planted)

    assert 0 == exit_code("incident", folder, "--since", planted.since)
    lines = capsys.readouterr().out.splitlines()
    assert "Likeliest cause: Engines run with other settings: blocks from 400 to 60." == lines[0]
    assert "  Undone, the share of prompt tokens that hit would be 81.5 %: that explains" in lines[1]
    assert lines[3].startswith("  Next: kvledger why ")

    assert 0 == exit_code("incident", folder, "--since", planted.since, "--format", "json")
    said = json.loads(capsys.readouterr().out)
    assert [("settings", "hits")] == [(cause["name"], cause["figure"]) for cause in said["causes"]]
    assert [{"setting": "blocks", "before": "400", "after": "60"}] == said["settings"]


def test_quiet_traffic_is_said_to_be_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = CONTROLS["quiet"]

    assert 0 == exit_code("incident", recorded(quiet), "--since", quiet.since)
    assert NOTHING == capsys.readouterr().out.splitlines()[0]


def test_the_time_before_may_be_yesterday_or_another_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = PLANTED["prefix broken by a timestamp"]
    good = recorded(CONTROLS["quiet, other requests"])
    folder = recorded(planted)

    assert 0 == exit_code("incident", folder, "--since", planted.since, "--against", good)
    assert "Prompts no longer begin with a prefix that was seen before" in capsys.readouterr().out
    yesterday = ("--at", "2026-01-01T00:01:05Z", "--since", "20s", "--against", "yesterday")
    assert 2 == exit_code("incident", folder, *yesterday)
    assert "no request ended at the same time yesterday" in capsys.readouterr().err
    assert 2 == exit_code("incident", folder, "--since", "2025-12-01")
    assert "no request ended in the day before 2025-12-01" in capsys.readouterr().err
    assert 2 == exit_code("incident", folder)
    assert "There is nothing to compare with" in capsys.readouterr().err


def test_the_time_before_may_be_a_span(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = recorded(PLANTED["prefix broken by a timestamp"])
    at = ("--at", "2026-01-01T00:01:05Z", "--since", "20s")

    assert 0 == exit_code("incident", folder, *at, "--against", "15s")
    shown = " ".join(capsys.readouterr().out.split())
    assert "Prompts no longer hit" in shown and "Compared with the 15s before: " in shown


def test_an_age_counts_from_the_time_of_the_alarm(tmp_path: Path) -> None:
    planted = PLANTED["prefix broken by a timestamp"]
    found = incident([recorded(planted)], at="2026-01-01T00:01:05Z", since="20s")

    assert "prefix" == found.causes[0].name
    assert 20.0 == (found.until or 0.0) - (found.since or 0.0)
