"""The scenarios drive the real scheduler through the golden histories, token by token."""

import re

import pytest

pytest.importorskip("vllm")

from tests.conformance.tape import Tape
from tests.scenarios.corpus import HISTORIES

# Name of the history, words of request `r`, total of scheduled positions.
ROWS = [
    ("cold prompt, three tokens out", "A0+0 s100 o+ s1 o+ s1 o+ F", 102),
    ("local prefix hit", "A64+0 s36 o+ s1 o+ F", 37),
    ("chunked prefill", "A0+0 s128 o s72 o+ s1 o+ F", 201),
    ("external, synchronous, loaded", "A0+160 s40 L o+ F", 40),
    ("external, asynchronous, loaded before it runs", "A32+128 L s40 o+ F", 40),
    ("full external hit, last token executed again", "A0+96 L R1 s1 o+ F", 1),
    (
        "vLLM#36752: preempted in mid-prefill, asked again",
        "A0+32 L s56 o P A0+160 L s40 o+ F",
        96,
    ),
    (
        "preempted in decode, resumed from the cache",
        "A0+0 s64 o+ s1 o+ s1 o+ P A64+0 s3 o+ s1 o+ F",
        70,
    ),
    ("preempted in decode, resumed cold", "A0+0 s64 o+ s1 o+ P A0+0 s66 o+ F", 131),
    (
        "LMCache#1969: resumed, local then external",
        "A0+0 s34 o+ " + "s1 o+ " * 14 + "P A16+18 L s15 o+ F",
        63,
    ),
    ("asynchronous load fails in part, recomputed", "A0+160 L64 s136 o+ F", 136),
    ("asynchronous load fails wholly, looked up anew", "A0+160 L0 A0+0 s200 o+ F", 200),
    ("speculative: 3 drafts, 1 accepted", "A0+0 s50 o+ s4 o1/3 s4 o3/3 F", 58),
    ("async scheduling, one step ahead, overrun at stop", "A0+0 s40 s1 o+ s1 o+ F", 42),
    (
        "async, preempted with a step in flight, delivered",
        "A0+0 s40 o+ s1 P o+ A32+0 s10 o+ F",
        51,
    ),
    (
        "async, preempted with a step in flight, dropped",
        "A0+0 s40 o+ s1 p o+ A32+0 s9 o+ F",
        50,
    ),
    ("aborted in mid-prefill", "A0+0 s128 o F", 128),
    ("aborted while waiting for remote KV", "A64+128 F", 0),
]


@pytest.mark.parametrize(("name", "words", "scheduled"), ROWS, ids=[row[0] for row in ROWS])
def test_each_scenario_reproduces_its_history(name: str, words: str, scheduled: int) -> None:
    tape = Tape()

    driver = HISTORIES[name](tape.attach)

    assert words == tape.words("r")
    assert scheduled == sum(map(int, re.findall(r"\bs(\d+)", tape.words("r"))))
    assert not driver.scheduler.requests


def test_every_history_has_a_row() -> None:
    assert [row[0] for row in ROWS] == list(HISTORIES)
