"""Reproductions; docs/repro shows two whole. ``python -m tests.exporters.repro.examples`` writes them.

Each workload is what `kvledger repro` left of a journal of 200 requests.
"""

from __future__ import annotations

from pathlib import Path

from tests.exporters.repro.workloads import Case, add, step, workload

from kvledger.audit.traffic.script import Check, Op, Request
from kvledger.exporters.repro.pytest_file import render

FOLDER = Path(__file__).parents[3] / "docs" / "repro"

PLACEHOLDER_LEAK = Case(
    workload(
        "0.32.0",
        {"asynchronous": True, "connector": "scripted"},
        (*add("r1"), *step(failed={"r1": (2, 3)})),
        r1=Request(prompt=(("r1", 34),), max_tokens=1, answers=(33,)),
    ),
    Check(
        "placeholders",
        "r1",
        1,
        0,
        "output placeholders of r1 when nothing is in flight",
        "tokens/in-flight",
    ),
    ("0.32.0", "0.33.0"),
)

NEGATIVE_LOCAL_HIT = Case(
    workload(
        "0.18.1",
        {"blocks": 18, "max_batched_tokens": 64, "connector": "scripted"},
        (*add("r1"), *step(2), *add("r2"), *step(4)),
        r1=Request(prompt=(("r1", 193),), max_tokens=2),
        r2=Request(prompt=(("r2", 67),), max_tokens=1, answers=(1, 2)),
    ),
    Check(
        "reported",
        "r2",
        [-1, 2, 66],
        [0, 3, 64],
        "local, external and computed tokens of r2",
        "tokens/negative",
    ),
    ("0.18.1",),
    "0.20.0",
)

DOUBLE_ALLOCATION = Case(
    workload(
        "0.23.0",
        {
            "blocks": 49,
            "max_batched_tokens": 96,
            "groups": ("full", "sliding"),
            "sliding_window": 128,
            "connector": "scripted",
        },
        (*add("r1"), *add("r2"), *step(3), *add("r3"), Op("schedule")),
        r1=Request(prompt=(("r1", 96),), max_tokens=1),
        r2=Request(prompt=(("r2", 225),), max_tokens=1),
        r3=Request(prompt=(("r1", 96), ("r3", 98)), max_tokens=1, answers=(97,)),
    ),
    Check(
        "blocks_in_two_places",
        "r3",
        1,
        0,
        "blocks in two places of the block tables",
        "blocks/double-allocation",
    ),
    ("0.23.0",),
    "0.24.0",
)

STALE_LOOKUP = Case(
    workload(
        "0.9.1",
        {"scheduler": "v0", "blocks": 44},
        (*add("r1"), *add("r2"), *step(9), *add("r3"), *step(1)),
        r1=Request(prompt=(("r3", 16),), max_tokens=1),
        r2=Request(prompt=(("r2", 672),), max_tokens=34),
        r3=Request(prompt=(("r3", 17),), max_tokens=1),
    ),
    Check("kept_lookups", "r3", 1, 0, "lookups kept for requests that do not run", "tokens/stale-lookup"),
    ("0.9.1-v0",),
    "0.9.2-v0",
    (
        "The 16 tokens that r3 hit in the cache came from a request that the journal does not show; r1 "
        "caches them here.",
        "The pool has 44 blocks instead of 64: the requests left out held the others.",
    ),
)

EXAMPLES = {
    "test_placeholder_leak.py": PLACEHOLDER_LEAK,
    "test_negative_local_hit.py": NEGATIVE_LOCAL_HIT,
    "test_double_allocation.py": DOUBLE_ALLOCATION,
    "test_stale_lookup.py": STALE_LOOKUP,
}

SHOWN = ("test_negative_local_hit.py", "test_stale_lookup.py")
"""The examples of the documentation, one for each kind of scheduler."""


def written(name: str) -> str:
    """The text of an example."""
    case = EXAMPLES[name]
    return render(case.workload, case.check, assumed=case.assumed, file=name)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in SHOWN:
        (FOLDER / each).write_text(written(each))
        print(FOLDER / each)
