"""The sidecar over journals of a prefill and a decode engine, and of data parallel ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests import journals
from tests.exporters.sidecar.test_follower import following
from tests.histories import events

from kvledger.audit.events import RequestAdded
from kvledger.exporters.metrics.table import METRICS
from kvledger.exporters.sidecar.follower import Follower

PROMPT = 100
SOURCES = ("local", "external", "computed", "unattained")
PREFILL, DECODE = "A32+0 s68 o+ F", "A0+96 L s4 o+ s1 o+ F"


def journal(folder: Path, words: str, *, kv_role: str = "kv_both", rank: int = 0, **marks: Any) -> None:
    """The journal of an engine with one request of a prompt of 100 tokens."""
    stream = [
        replace(each, **marks) if isinstance(each, RequestAdded) else each for each in events(PROMPT, words)
    ]
    settings = {"model": "tiny", "kv_role": kv_role, "engine_index": rank}
    journals.write(folder, stream, configuration=settings)


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
    left = {source: shared["decode", source] + shared["consumer", source] for source in SOURCES}
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
