"""The scenarios drive the real scheduler through the golden histories, token by token."""

import re

import pytest

pytest.importorskip("vllm")

from tests.differential import tape
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


def words_of(facts: list[tape.Fact], request_id: str) -> str:
    """What happened to one request, in the words of the golden histories (:mod:`tests.histories`)."""
    words: list[str] = []
    admission: tape.Allocated | None = None
    loads_now = False
    for fact in facts:
        match fact:
            case tape.Allocated(request_id=name) if name == request_id:
                admission = fact
                loads_now = bool(fact.external and not fact.asynchronous)
                words.append(f"A{fact.local}+{fact.external}")
            case tape.Arrived(request_id=name) if name == request_id and admission:
                loaded = max(0, fact.before - admission.local)
                words.append("L" if loaded == admission.external else f"L{loaded}")
                words += [f"R{fact.before - fact.after}"] if fact.after < fact.before else []
            case tape.Scheduled() if request_id in fact.rows:
                words.append(f"s{fact.rows[request_id][0]}")
            case tape.Preempted(request_id=name) if name == request_id:
                words.append("p" if fact.dropped else "P")
            case tape.Output() if request_id in fact.step and request_id in fact.before:
                sampled, drafts = len(fact.sampled[request_id]), fact.step[request_id][1]
                words += ["L"] if loads_now else []
                loads_now = False
                words.append(f"o{sampled - 1}/{drafts}" if drafts else "o+" if sampled else "o")
        if isinstance(fact, tape.Output | tape.Aborted) and request_id in fact.after:
            ended = fact.after[request_id].finished and not fact.before[request_id].finished
            words += ["F"] if ended else []
    return " ".join(words)


@pytest.mark.parametrize(("name", "words", "scheduled"), ROWS, ids=[row[0] for row in ROWS])
def test_each_scenario_reproduces_its_history(name: str, words: str, scheduled: int) -> None:
    recorded = tape.Tape()

    driver = HISTORIES[name](recorded.attach)

    happened = words_of(recorded.facts, "r")
    assert words == happened
    assert scheduled == sum(map(int, re.findall(r"\bs(\d+)", happened)))
    assert not driver.scheduler.requests


def test_every_history_has_a_row() -> None:
    assert [row[0] for row in ROWS] == list(HISTORIES)
