"""The labels of a request: read once, bounded, and never a salt."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvledger.audit import events as ev
from kvledger.audit.engines.pool.isolation import IsolationClasses
from kvledger.audit.engines.request_labels import CHARACTERS, GROUP, MOST_GROUPS, OTHER, LabelReader
from kvledger.audit.engines.request_labels import pattern as pattern_in
from kvledger.audit.hash_key import VARIABLE
from kvledger.audit.text import clean


def request(request_id: str = "cmpl-tenant-a-1", salt: str = "", lora: str = "", priority: int = 0) -> Any:
    adapter = SimpleNamespace(lora_name=lora, lora_path="/adapters/x") if lora else None
    return SimpleNamespace(request_id=request_id, cache_salt=salt, lora_request=adapter, priority=priority)


def reader(pattern: str = "") -> LabelReader:
    return LabelReader(IsolationClasses(), re.compile(pattern) if pattern else None)


def test_a_request_without_labels_has_none() -> None:
    assert reader().of(request()) is None


def test_adapter_priority_and_group_are_read() -> None:
    labels = reader(r"tenant-(\w)").of(request(lora="french", priority=-3))

    assert ev.RequestLabels("french", 0, "a", -3) == labels


def test_a_salt_is_recorded_as_a_keyed_class_only() -> None:
    one, other = reader(), reader()
    labels, again = one.of(request(salt="secret")), one.of(request(salt="secret"))

    assert labels is not None and again is not None
    assert labels.salt_class == again.salt_class != 0
    elsewhere = other.of(request(salt="secret"))
    assert elsewhere is not None and elsewhere.salt_class != labels.salt_class
    assert b"secret" not in msgspec.msgpack.encode(labels)


def test_the_class_of_a_salt_is_that_of_the_isolation_classes() -> None:
    classes = IsolationClasses()
    labels = LabelReader(classes).of(request(salt="secret"))

    assert labels is not None and classes.of_salt("secret") == labels.salt_class


def test_the_class_of_a_salt_is_that_of_other_processes_only_with_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def classes() -> set[int]:
        return {IsolationClasses().of_salt("secret") for _ in range(3)}

    monkeypatch.delenv(VARIABLE, raising=False)
    assert 3 == len(classes())
    monkeypatch.setenv(VARIABLE, "short")
    assert 3 == len(classes())
    monkeypatch.setenv(VARIABLE, "a key of 16 letters")
    (one,) = classes()
    monkeypatch.setenv(VARIABLE, "another key of 16 letters")
    assert {one} != classes()


def test_groups_beyond_the_most_are_one() -> None:
    read = reader(r"\d+")
    found = [read.of(request(f"request-{number}")) for number in range(MOST_GROUPS + 5)]

    groups = [labels.group for labels in found if labels is not None]
    assert [OTHER] * 5 == groups[MOST_GROUPS:]
    assert MOST_GROUPS == len(set(groups[:MOST_GROUPS]))
    known = read.of(request("request-3"))
    assert known is not None and "3" == known.group


def test_a_request_that_the_pattern_does_not_match_has_no_group() -> None:
    assert reader("tenant").of(request("somebody-1")) is None


def test_a_request_that_can_not_be_read_has_no_labels() -> None:
    assert reader().of(SimpleNamespace(cache_salt=5)) is None


def test_a_request_of_a_release_without_priorities_has_the_other_labels() -> None:
    request = SimpleNamespace(request_id="one", lora_request=SimpleNamespace(lora_name="french"))

    assert ev.RequestLabels("french") == reader().of(request)


def test_a_label_is_short_and_can_be_encoded() -> None:
    labels = reader(".+").of(request("r" * 5000, lora="x\ud800" + "y" * 100))

    assert labels is not None and len(labels.group) == len(labels.lora) == CHARACTERS
    msgspec.msgpack.encode(labels)


def test_a_session_is_vllms_own_or_found_in_the_request_id() -> None:
    named = request("chat-7-2")
    named.session_id = "agent 9"
    read = LabelReader(IsolationClasses(), None, re.compile(r"^(chat-\d+)-"))

    assert ev.RequestLabels(session="agent 9") == read.of(named)
    assert ev.RequestLabels(session="chat-7") == read.of(request("chat-7-2"))
    assert read.of(request("other")) is None


def test_two_long_session_ids_stay_apart() -> None:
    one, other = request(), request()
    one.session_id, other.session_id = "s" * 5000 + "1", "s" * 5000 + "2"
    labels, others = reader().of(one), reader().of(other)

    assert labels is not None and others is not None
    assert labels.session != others.session and len(labels.session) < 300


@pytest.mark.parametrize(("text", "found"), [("", None), ("(", None), (r"^(\w+)-", r"^(\w+)-")])
def test_a_pattern_that_is_no_regular_expression_is_ignored(
    text: str, found: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVLEDGER_GROUP", text)
    pattern = pattern_in(GROUP)

    assert found == (pattern.pattern if pattern else None)
    assert ("no regular expression" in caplog.text) == (text == "(")


def test_labels_are_made_printable_when_they_are_read() -> None:
    labels = ev.RequestLabels("fr\x1b[31m", 0, "a\u202e")
    row = ev.SnapshotRow(1, "two", 5, True, 0, 0, 0, 5, 0, labels=labels)
    batch: list[Any] = [ev.RequestAdded(0, 0, "one", 5, labels=labels), ev.Snapshot(0, 0, [row], 0)]

    clean(batch)

    for safe in (batch[0].labels, batch[1].rows[0].labels):
        assert (safe.lora + safe.group).isprintable()


def test_events_without_labels_are_read_as_before() -> None:
    old = [4, 10, 0, "one", 5]

    assert msgspec.convert(old, ev.RequestAdded).labels is None


def test_the_labels_of_requests_of_a_real_scheduler_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.v1.core.sched.scheduler", exc_type=ImportError)
    from tests.engines.observed import observe
    from tests.scenarios.driving import Driver, lora, start

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(policy="priority", **setup)
        driver.add("team-a-1", 40, 2, priority=3, of_request={"cache_salt": "secret", **lora("sql", 1)})
        attach(driver.scheduler)
        driver.add("team-b-1", 40, 2, priority=3, of_request={"cache_salt": "secret", **lora("sql", 1)})
        driver.add("nobody", 40, 2)
        driver.run()
        return driver

    monkeypatch.setenv("KVLEDGER_GROUP", "^team-(.)")
    _, events = observe(scenario)

    (snapshot,) = (event for event in events if isinstance(event, ev.Snapshot))
    before = snapshot.rows[0].labels
    arrived = {event.request_id: event.labels for event in events if isinstance(event, ev.RequestAdded)}
    assert before is not None and ("sql", "a", 3) == (before.lora, before.group, before.priority)
    assert ev.RequestLabels("sql", before.salt_class, "b", 3) == arrived["team-b-1"]
    assert arrived["nobody"] is None
    assert b"secret" not in msgspec.msgpack.encode(events)
