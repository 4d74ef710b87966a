"""The sidecar over journals of a prefill and a decode engine, and of data parallel ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.exporters.sidecar.test_follower import following
from tests.histories import events

from kvledger.audit.events import Event, Gap, RequestAdded, Snapshot, SnapshotRow
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay import metrics_state
from kvledger.audit.replay.metrics_state import SharedPrompts, WaitingPrompt
from kvledger.exporters.metrics.metric_list import METRICS
from kvledger.exporters.sidecar.follower import Follower

PROMPT = 100
SOURCES = ("local", "external", "computed", "unattained")
PREFILL, DECODE = "A32+0 s68 o+ F", "A0+96 L s4 o+ s1 o+ F"


def journal(
    folder: Path,
    words: str,
    *,
    kv_role: str = "kv_both",
    rank: int = 0,
    model: str = "tiny",
    before: Sequence[Event] = (),
    wall_seconds: float = journals.STARTED.wall_seconds,
    **marks: Any,
) -> None:
    """The journal of an engine with one request of a prompt of 100 tokens, and events ``before`` it."""
    stream = [*before] + [
        replace(each, **marks) if isinstance(each, RequestAdded) else each for each in events(PROMPT, words)
    ]
    settings = {"model": model, "kv_role": kv_role, "engine_index": rank}
    journals.write(folder, stream, configuration=settings, wall_seconds=wall_seconds)


def sums(follower: Follower, name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """The samples of a metric, summed over the engines, by these labels."""
    metric = next(each for each in METRICS if each.name == name)
    found: Counter[tuple[str, ...]] = Counter()
    for sample in metric.read(follower.audits):
        row = dict(zip(metric.labels, sample.labels, strict=True))
        found[tuple(row[label] for label in labels)] += sample.value
    return found


def once(follower: Follower) -> dict[str, float]:
    """Prompt tokens by source, each prompt once: the rule of docs/sidecar.md."""
    every = sums(follower, "kvledger_prompt_tokens", "source")
    shared = sums(follower, "kvledger_disaggregated_prompt_tokens", "role", "source")
    roles = "decode", "consumer", "unknown"
    left = {source: sum(shared[role, source] for role in roles) for source in SOURCES}
    return {source: every[(source,)] - left[source] for source in SOURCES if every[(source,)] - left[source]}


@pytest.mark.parametrize(
    "decode",
    [DECODE, "A0+96 L0 A0+0 s100 o+ s1 o+ F", "A64+32 L s4 o+ F"],
    ids=["transferred", "lost and computed again", "in part its own hits"],
)
def test_a_prompt_of_two_engines_counts_once_with_the_sources_of_its_prefill(
    tmp_path: Path, decode: str
) -> None:
    journal(tmp_path / "engine-1", PREFILL, remote_decode=True)
    journal(tmp_path / "engine-2", decode, transferred=True)

    with following(tmp_path) as follower:
        assert {"local": 32, "computed": 68} == once(follower)
        every = sums(follower, "kvledger_prompt_tokens", "source")
        assert 2 * PROMPT == every.total(), "each engine also has its own figures"
        follower.save()
    with following(tmp_path) as restarted:
        assert {"local": 32, "computed": 68} == once(restarted)


def test_engines_with_a_shared_store_have_the_roles_of_their_connector(tmp_path: Path) -> None:
    journal(tmp_path / "engine-1", PREFILL, kv_role="kv_producer")
    journal(tmp_path / "engine-2", DECODE, kv_role="kv_consumer")

    with following(tmp_path) as follower:
        shared = +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")
        assert {("producer",): PROMPT, ("consumer",): PROMPT} == shared
        assert {"local": 32, "computed": 68} == once(follower)


def test_a_prompt_that_no_prefill_engine_had_counts_in_its_decode_engine(tmp_path: Path) -> None:
    """Both engines have a prompt of that length, of two calls."""
    journal(tmp_path / "engine-1", PREFILL, kv_role="kv_producer", request_id="cmpl-one-0-0a1b2c3d")
    journal(tmp_path / "engine-2", DECODE, kv_role="kv_consumer", request_id="cmpl-two-0-0a1b2c3d")

    with following(tmp_path) as follower:
        shared = +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")
        assert {("producer",): PROMPT} == shared
        assert {"local": 32, "computed": 72, "external": 96} == once(follower)
        follower.save()
    with following(tmp_path) as restarted:
        assert {"local": 32, "computed": 72, "external": 96} == once(restarted)


def test_of_two_uses_of_an_id_each_has_a_prefill_of_its_own(tmp_path: Path) -> None:
    """The second use went straight to the decode engine."""
    name = {"request_id": "cmpl-one-0-0a1b2c3d"}
    journal(tmp_path / "engine-1", PREFILL, kv_role="kv_producer", **name)
    journal(tmp_path / "engine-2", DECODE, kv_role="kv_consumer", request_id="cmpl-one-0-99999999")
    journal(tmp_path / "engine-3", DECODE, kv_role="kv_consumer", rank=1, **name)

    with following(tmp_path) as follower:
        shared = +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")
        assert {("producer",): PROMPT, ("consumer",): PROMPT} == shared
        assert 2 * PROMPT == sum(once(follower).values())


@pytest.mark.parametrize("part", ["no prefill engine", "another model", "events lost", "observed later"])
def test_a_prompt_whose_prefill_engine_is_not_known_is_unknown(tmp_path: Path, part: str) -> None:
    other = {"kv_role": "kv_producer", "request_id": "cmpl-one-0-0a1b2c3d"}
    if part == "another model":
        journal(tmp_path / "engine-1", PREFILL, model="other", **other)
    elif part == "events lost":
        journal(tmp_path / "engine-1", PREFILL, before=[Gap(1, 2, "queue full")], **other)
    elif part == "observed later":
        writer = JournalWriter(tmp_path / "engine-1")
        writer.rotate()
        settings = {"model": "tiny", "kv_role": "kv_producer"}
        running = SnapshotRow(99, "r-99", 40, False, 40, 0, 0, 41, 0)
        writer.write([replace(journals.STARTED, configuration=settings), Snapshot(0, 7, [running], 0)])
        writer.close()
    journal(tmp_path / "engine-2", DECODE, kv_role="kv_consumer", request_id="cmpl-two-0-0a1b2c3d")

    with following(tmp_path) as follower:
        shared = +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")
        assert PROMPT == shared["unknown",] and 0 == shared["consumer",]


def test_a_prompt_waits_until_its_prefill_engine_was_read(tmp_path: Path) -> None:
    """Also over a restart of the sidecar; until then it is in no role."""
    now = {"wall_seconds": time.time()}
    journal(tmp_path / "engine-2", DECODE, kv_role="kv_consumer", **now)
    with following(tmp_path) as follower:
        assert {} == +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")
        follower.save()
    with following(tmp_path) as follower:
        journal(tmp_path / "engine-1", PREFILL, kv_role="kv_producer", **now)
        follower.poll()
        shared = +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")
        assert {("producer",): PROMPT, ("consumer",): PROMPT} == shared
        follower.save()
    with following(tmp_path) as follower:
        follower.poll()
        assert shared == +sums(follower, "kvledger_disaggregated_prompt_tokens", "role")


def test_what_waits_and_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_state, "MOST_PREFILLED", 2)
    monkeypatch.setattr(metrics_state, "MOST_WAITING", 2)
    shared = SharedPrompts()
    for number in range(5):
        shared.prefill(f"cmpl-{number}-0-0a1b2c3d", PROMPT, float(number), suffixed=True)
        shared.wait(WaitingPrompt(number, 0.0, 0.0, {"local": 1}))

    assert (2, 2.0) == (len(shared.prefilled), shared.since)
    assert (2, 3) == (len(shared.waiting), len(shared.unknown))


def test_a_request_of_one_engine_is_left_as_it_is(tmp_path: Path) -> None:
    """What a connector loads from a store is a hit, unless a prefill engine handed it over."""
    journal(tmp_path / "engine-1", DECODE)

    with following(tmp_path) as follower:
        assert {"external": 96, "computed": 4} == once(follower)
        assert {0} == set(sums(follower, "kvledger_disaggregated_prompt_tokens", "role").values())
        assert 0 == sums(follower, "kvledger_transferred_prompt_tokens").total()


def test_data_parallel_ranks_are_engines_of_their_own(tmp_path: Path) -> None:
    """Both ranks computed the prompt, so it counts in both; each rank has a label."""
    for rank in (0, 1):
        journal(tmp_path / f"engine-{rank}", PREFILL, kv_role="", rank=rank)

    with following(tmp_path) as follower:
        by_engine = sums(follower, "kvledger_prompt_tokens", "engine")
        assert {("tiny / engine 0",): PROMPT, ("tiny / engine 1",): PROMPT} == by_engine
        assert {"local": 64, "computed": 136} == once(follower)


def test_ranks_of_a_prefill_and_a_decode_server_count_each_prompt_once(tmp_path: Path) -> None:
    for rank in (0, 1):
        journal(tmp_path / f"engine-{rank}", PREFILL, rank=rank, remote_decode=True)
        journal(tmp_path / f"engine-{rank}0", DECODE, rank=rank, transferred=True)

    with following(tmp_path) as follower:
        assert {"local": 64, "computed": 136} == once(follower)
