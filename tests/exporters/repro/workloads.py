"""Small workloads of known faults, as ``kvledger repro`` leaves them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvledger.audit.traffic.script import Check, Op, Request, Workload


class Case(NamedTuple):
    """``bad``: releases that have the fault; ``good``: the first without it, if there is one.

    ``assumed``: what the journal did not have.
    """

    workload: Workload
    check: Check
    bad: tuple[str, ...]
    good: str = ""
    assumed: tuple[str, ...] = ()


def step(times: int = 1, **reported: Any) -> tuple[Op, ...]:
    return (Op("schedule"), Op("output", **reported)) * times


def add(name: str) -> tuple[Op, ...]:
    return (Op("add", name),)


def workload(release: str, engine: dict[str, Any], script: tuple[Op, ...], **requests: Request) -> Workload:
    return Workload(release=release, engine=engine, requests=requests, script=script)


PLACEHOLDER_LEAK = Case(
    workload(
        "0.32.0",
        {"asynchronous": True, "connector": "scripted"},
        (
            *add("r1"),
            Op("schedule"),
            Op("output", failed={"r1": (4, 10)}),
            *step(3),
        ),
        r1=Request(prompt=(("a", 200),), max_tokens=2, answers=(160,)),
    ),
    Check("placeholders", "r1", 1, 0, "output placeholders of r1 at its end", "tokens/in-flight"),
    ("0.32.0", "0.33.0"),
)

NEGATIVE_LOCAL_HIT = Case(
    workload(
        "0.18.1",
        {"blocks": 12, "max_batched_tokens": 64, "connector": "scripted"},
        (*add("r1"), *add("r2"), *step(7)),
        r1=Request(prompt=(("a", 96),), max_tokens=3),
        r2=Request(prompt=(("b", 96),), max_tokens=1, answers=(0, 32, 32, 32)),
    ),
    Check(
        "reported",
        "r2",
        [-32, 32, 96],
        [32, 32, 32],
        "local, external and computed tokens of r2",
        "tokens/negative",
    ),
    ("0.17.0", "0.18.1"),
    "0.20.0",
)

DOUBLE_ALLOCATION = Case(
    workload(
        "0.23.0",
        {"blocks": 41, "groups": ("full", "sliding"), "sliding_window": 128, "connector": "scripted"},
        (*add("r1"), *step(), *add("r2"), *step(), *add("r3"), *step(3)),
        r1=Request(prompt=(("a", 96),), max_tokens=1),
        r2=Request(prompt=(("b", 224),), max_tokens=1),
        r3=Request(prompt=(("a", 96), ("c", 104)), max_tokens=3, answers=(64,)),
    ),
    Check(
        "blocks_in_two_places",
        "r3",
        4,
        0,
        "blocks in two places of the block tables",
        "blocks/double-allocation",
        8,
    ),
    ("0.17.0", "0.23.0"),
    "0.24.0",
)

LOAD_ROUNDED_UP = Case(
    workload(
        "0.17.0",
        {"connector": "scripted"},
        (*add("r1"), *step(loaded=("r1",)), *step(2)),
        r1=Request(prompt=(("a", 40),), max_tokens=1, answers=((18, True),)),
    ),
    Check(
        "computed_before_step",
        "r1",
        32,
        18,
        "computed tokens of r1 before its last step",
        "tokens/balance",
    ),
    ("0.17.0",),
    "0.18.1",
)

FAILED_LOAD_AS_LOCAL_HIT = Case(
    workload(
        "0.19.1",
        {"connector": "scripted"},
        (*add("r1"), *step(failed={"r1": (4, 10)}), *step(2)),
        r1=Request(prompt=(("a", 200),), max_tokens=1, answers=(160,)),
    ),
    Check(
        "reported",
        "r1",
        [96, 64, 40],
        [0, 64, 136],
        "local, external and computed tokens of r1",
        "tokens/set-once",
    ),
    ("0.17.0", "0.19.1"),
    "0.20.0",
)

FAILED_LOAD_COUNTED = Case(
    msgspec.structs.replace(FAILED_LOAD_AS_LOCAL_HIT.workload, release="0.20.0"),
    Check(
        "reported",
        "r1",
        [0, 160, 40],
        [0, 64, 136],
        "local, external and computed tokens of r1",
        "connector/failed-load-counted",
    ),
    ("0.20.0", "0.32.0"),
)

RESET_DROPS_VALID_TOKEN = Case(
    workload(
        "0.20.0",
        {"asynchronous": True, "max_batched_tokens": 64},
        (*add("r1"), Op("schedule"), Op("reset", running=True), Op("output"), *step(8)),
        r1=Request(prompt=(("a", 150),), max_tokens=3),
    ),
    Check("placeholders", "r1", 1, 0, "output placeholders of r1 at its end", "tokens/in-flight"),
    ("0.17.0", "0.20.0"),
    "0.22.1",
)

FAILED_LOAD_STAYS_CACHED = Case(
    workload(
        "0.32.0",
        {"connector": "scripted"},
        (
            *add("r1"),
            *step(failed={"r1": (4, 10)}),
            Op("abort", "r1"),
            *add("r2"),
            *step(2),
        ),
        r1=Request(prompt=(("a", 200),), max_tokens=3, answers=(160,)),
        r2=Request(prompt=(("a", 200),), max_tokens=1),
    ),
    Check(
        "reported",
        "r2",
        [192, 0, 8],
        [64, 0, 136],
        "local, external and computed tokens of r2",
        "blocks/hash-content",
    ),
    ("0.20.0", "0.32.0"),
)

TRACKER_LAG = Case(
    workload(
        "0.24.0",
        {"connector": "lmcache", "asynchronous": True, "chunk_tokens": 32, "save_decoded": True},
        (*add("r1"), Op("schedule"), *step(6)),
        r1=Request(prompt=(("r1", 40),), max_tokens=12),
    ),
    Check("tracked", "r1", 40, 45, "tokens of r1 that LMCache's tracker knows", "connector/tracker-lag"),
    ("lmcache-0.4.2",),
    "lmcache-0.4.3",
)

CASES = {
    "placeholder-leak": PLACEHOLDER_LEAK,
    "negative-local-hit": NEGATIVE_LOCAL_HIT,
    "double-allocation": DOUBLE_ALLOCATION,
    "load-rounded-up": LOAD_ROUNDED_UP,
    "failed-load-as-local-hit": FAILED_LOAD_AS_LOCAL_HIT,
    "failed-load-counted": FAILED_LOAD_COUNTED,
    "reset-drops-valid-token": RESET_DROPS_VALID_TOKEN,
    "failed-load-stays-cached": FAILED_LOAD_STAYS_CACHED,
    "tracker-lag": TRACKER_LAG,
}
