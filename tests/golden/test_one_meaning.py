"""A figure that several commands print is one figure: all of them print the same number.

docs/analysis.md has the table of these figures. The run is a real scheduler of vLLM 0.32.0 with 300 blocks,
to which 60 chats sent 3,060 requests, more than the pool can keep.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.golden.outputs import HERE, printed, unpacked

EVICTED = "evicted-0.32.0"
CORPORA = (EVICTED, "demo-0.32.0-negative-local-hit", "scheduler-0.32.0-tokens", "scheduler-0.32.0-blocks")
WINDOW = "--since", "2026-01-01T00:01:00Z", "--until", "2026-01-01T00:02:00Z"
"""The second minute of the run with evictions."""

pytestmark = pytest.mark.golden

Command = tuple[str, ...]
Read = Callable[[Any], int]


SQL: Command = (
    "query",
    "{}",
    "select count(*), sum(local), sum(missed), sum(rework), "
    "(select sum(tokens) from causes where figure = 'missed'), "
    "(select coalesce(sum(tokens), 0) from causes where figure = 'missed' and cause = 'evicted') "
    "from requests",
)


def column(place: int) -> Read:
    return lambda answer: int(answer["rows"][0][place])


def of_cause(cause: str) -> Read:
    return lambda found: sum(row["tokens"] for row in found["causes"] if row["cause"] == cause)


AUDIT, SUMMARY, WHY, TURNS = (("audit", "{}"), ("summary", "{}"), ("why", "{}"), ("why", "turns", "{}"))
REQUESTS: dict[Command, Read] = {
    AUDIT: lambda found: found["requests"],
    SUMMARY: lambda found: found[0]["requests"],
    WHY: lambda found: found["requests"],
    SQL: column(0),
}
FIGURES: dict[str, dict[Command, Read]] = {
    "requests": REQUESTS,
    "local hits": {
        AUDIT: lambda found: found["totals"]["local"],
        SUMMARY: lambda found: found[0]["local"],
        SQL: column(1),
    },
    "hits": {
        AUDIT: lambda found: found["totals"]["local"] + found["totals"]["external"],
        WHY: lambda found: found["hit"],
    },
    "misses": {
        WHY: lambda found: found["no_hit"],
        SQL: column(2),
    },
    "misses by cause": {
        WHY: lambda found: sum(row["tokens"] for row in found["causes"]),
        SQL: column(4),
    },
    "rework": {
        AUDIT: lambda found: found["work"]["rework"],
        SUMMARY: lambda found: found[0]["rework"],
        SQL: column(3),
    },
    "evicted": {
        WHY: of_cause("evicted"),
        SQL: column(5),
    },
}
UNDER_EVICTION: dict[str, dict[Command, Read]] = {
    "evicted": {
        WHY: of_cause("evicted"),
        TURNS: of_cause("evicted"),
        ("summary", "prefixes", "{}"): lambda found: found["lost_tokens"],
        ("whatif", "{}"): lambda found: (
            found["engines"][0]["ideal"]["hit_tokens"] - found["engines"][0]["calibration"]["hit_tokens"]
        ),
    },
    "local hits": {
        SUMMARY: lambda found: found[0]["local"],
        ("summary", "prefixes", "{}"): lambda found: found["saved_tokens"],
        ("whatif", "{}"): lambda found: found["engines"][0]["calibration"]["recorded_hit_tokens"],
    },
    "requests": {TURNS: lambda found: found["requests"], SUMMARY: lambda found: found[0]["requests"]},
}
"""Of a run without preemptions in which each request is a turn of a chat, or its first prompt."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("journals")
    for corpus in CORPORA[1:]:
        unpacked(found, corpus)
    with tarfile.open(HERE / f"data/{EVICTED}.tar.xz") as opened:
        opened.extractall(found / EVICTED, filter="data")
    return found


@cache
def answer(*words: str) -> Any:
    return json.loads(printed(*words, "--format", "json")[1])


def values(read: Mapping[Command, Read], corpus: Path, *options: str) -> dict[Command, int]:
    """What each command prints of a figure."""
    return {
        command: figure(answer(*(word.replace("{}", str(corpus)) for word in command), *options))
        for command, figure in read.items()
    }


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_command_prints_the_same_figure(corpus: str, folder: Path) -> None:
    for name, read in FIGURES.items():
        found = values(read, folder / corpus)
        assert 1 == len(set(found.values())), f"{name}: {found}"


def test_commands_agree_on_what_an_eviction_cost(folder: Path) -> None:
    for name, read in UNDER_EVICTION.items():
        found = values(read, folder / EVICTED)
        assert 1 == len(set(found.values())) and all(found.values()), f"{name}: {found}"


def test_commands_agree_on_the_requests_of_a_window(folder: Path) -> None:
    found = values(REQUESTS, folder / EVICTED, *WINDOW)
    assert 1 == len(set(found.values())), found
    assert 0 < found[AUDIT] < 3_060
