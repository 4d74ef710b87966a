"""What an observer records of a request: its labels, its origin, and figures that are another engine's."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests import journals

from kvledger.audit import events as ev
from kvledger.audit.engines.configuration import CHARACTERS, GROUP, MOST_GROUPS, OTHER, LabelReader
from kvledger.audit.engines.configuration import pattern as pattern_in
from kvledger.audit.engines.pool.requirements import IsolationClasses
from kvledger.audit.events import RequestAdded, Snapshot
from kvledger.audit.hash_key import VARIABLE
from kvledger.audit.journal.host_folders import read
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.journals import audit_paths
from kvledger.audit.text import clean

pytest.importorskip("vllm")

from tests.engines.observed import audited, findings, observe
from tests.scenarios.driving import start

from kvledger.audit.engines.configuration import engine_index
from kvledger.audit.events import EngineStarted
from kvledger.audit.traffic.driver import Driver, tokens
from kvledger.audit.traffic.engine_setup import build_request

# --- the labels of a request: read once, bounded, and never a salt ----------------------------------------


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
    from tests.scenarios.driving import lora, start

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


# --- What is recorded about the origin of a request and an engine: trace context, KV transfer, engine index.


CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def arrival(**attributes: Any) -> RequestAdded:
    """The ``RequestAdded`` event of a request with these attributes."""

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        request = build_request("a", tokens(40, "a"), hasher=None, max_tokens=1)
        for name, value in attributes.items():
            setattr(request, name, value)
        driver.scheduler.add_request(request)
        return driver

    _, events = observe(scenario)
    (added,) = (event for event in events if isinstance(event, RequestAdded))
    return added


def recorded_traceparent(headers: dict[str, str] | None) -> str | None:
    return arrival(trace_headers=headers).traceparent


def test_the_trace_context_is_recorded_and_no_other_header() -> None:
    assert CONTEXT == recorded_traceparent(
        {"traceparent": CONTEXT, "tracestate": "secret=1", "authorization": "secret"}
    )


@pytest.mark.parametrize(
    "traceparent", ["", "the prompt itself", CONTEXT.upper(), CONTEXT + "\n", CONTEXT + "-more"]
)
def test_a_malformed_trace_context_is_not_recorded(traceparent: str) -> None:
    assert recorded_traceparent({"traceparent": traceparent}) is None


def test_a_request_without_headers_has_no_trace_context() -> None:
    assert recorded_traceparent(None) is None


@pytest.mark.parametrize(
    ("params", "transferred"),
    [
        ({"do_remote_prefill": True, "remote_engine_id": "p"}, True),
        ({"do_remote_decode": True}, False),
        (None, False),
    ],
)
def test_a_request_computed_by_a_prefill_engine_is_recorded_as_transferred(
    params: dict[str, Any] | None, transferred: bool
) -> None:
    assert transferred == arrival(kv_transfer_params=params).transferred


def test_the_engine_index_is_the_one_in_vllms_metrics() -> None:
    """The ranks of a dense model all have rank 0; only the index tells them apart."""
    assert 3 == engine_index(SimpleNamespace(data_parallel_index=3, data_parallel_rank=0))
    assert 2 == engine_index(SimpleNamespace(data_parallel_rank=2))
    assert 0 == engine_index(SimpleNamespace())


def test_the_engine_index_is_in_the_configuration() -> None:
    _, events = observe(start)
    (started,) = (event for event in events if isinstance(event, EngineStarted))

    assert 0 == started.configuration["engine_index"]


def test_a_long_request_id_is_cut_in_the_journal_and_stays_apart_from_another() -> None:
    """vLLM takes an id of any length from a client's header, and tells requests apart by its end."""
    long = ["r" * 10_000 + str(number) for number in range(2)]

    def scenario(attach: Any, **setup: Any) -> Driver:
        driver = start(attach, **setup)
        for request_id in long:
            driver.scheduler.add_request(
                build_request(request_id, tokens(40, "a"), hasher=None, max_tokens=1)
            )
        return driver

    _, events = observe(scenario)

    ids = [event.request_id for event in events if isinstance(event, RequestAdded)]
    assert [256, 256] == [len(request_id) for request_id in ids]
    assert 2 == len(set(ids))


# --- engine-reported prompt figures that are another engine's ---------------------------------------------


REMOTE_CACHED = 32


def decode_after_prefill(attach: Any, *, transfer: dict[str, Any] | None) -> Driver:
    """A request whose engine reports the cached tokens of the prefill engine, as vLLM#46898 proposes."""
    driver = start(attach)
    request = driver.add("r", 100, 3, transfer=transfer)
    take = request.take_prefill_stats

    def replaced() -> Any:
        figures = take()
        if figures is not None:
            figures.num_cached_tokens = figures.num_local_cached_tokens = REMOTE_CACHED
        return figures

    request.take_prefill_stats = replaced
    driver.run()
    return driver


def test_figures_of_the_prefill_engine_are_not_compared_with_this_engine() -> None:
    transfer = {"remote_num_cached_tokens": REMOTE_CACHED}
    _, events = observe(decode_after_prefill, transfer=transfer)

    assert [] == [event for event in events if isinstance(event, ev.Reported)]
    assert set() == findings(audited(events))


def test_wrong_figures_of_this_engine_are_found() -> None:
    _, events = observe(decode_after_prefill, transfer=None)

    assert {("tokens/set-once", "r")} <= findings(audited(events))


# --- what a client may ask for costs no event: an id that no encoding has, a priority beyond 64 bits ------


HUGE = 1 << 64
SURROGATE = "tenant-\ud800-\udfff"


def test_text_that_no_encoding_has_costs_no_event(tmp_path: Path) -> None:
    """A name in the environment may hold any bytes."""
    writer = JournalWriter(tmp_path / "engine-1-1-0")
    writer.rotate()
    started = replace(journals.STARTED, configuration={"instance": "\udcff", SURROGATE: 1})
    writer.write([started, Snapshot(0, 0, [], 0)])
    writer.close()
    (first, _) = (event for _, event in read(tmp_path / "engine-1-1-0"))

    assert 0 == writer.lost_events
    assert replace(started, configuration={"instance": r"\udcff", r"tenant-\ud800-\udfff": 1}) == first


@pytest.mark.parametrize("priority", [HUGE, -HUGE, 7])
@pytest.mark.parametrize("request_id", [SURROGATE, SURROGATE * 100, "été"])
def test_a_hostile_request_leaves_its_engine_clean(request_id: str, priority: int, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from tests.engines.observed import observe
    from tests.scenarios.driving import start

    def scenario(attach: object, **setup: object) -> object:
        driver = start(attach, **setup)
        transfer = {"do_remote_prefill": False, "remote_request_id": SURROGATE}
        driver.add(request_id, range(1, 41), max_tokens=2, priority=priority, transfer=transfer)
        driver.run()
        return driver

    _, stream = observe(scenario)
    writer = JournalWriter(tmp_path / "engine-1-1-0")
    writer.rotate()
    writer.write(stream)
    writer.close()

    assert 0 == writer.lost_events
    audit = audit_paths([tmp_path])
    assert "clean" == audit.verdict
    (added,) = (event for _, event in read(tmp_path / "engine-1-1-0") if isinstance(event, RequestAdded))
    assert priority == added.priority or abs(added.priority) == (1 << 63) - 1
