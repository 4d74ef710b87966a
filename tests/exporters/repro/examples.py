"""The reproductions that docs/repro shows whole. ``python -m tests.exporters.repro.examples`` writes them.

Each workload is what `kvledger repro` left of a journal of 200 requests.
"""

from __future__ import annotations

from pathlib import Path

from tests.exporters.repro.workloads import Case, add, step, workload

from kvledger.audit.repro.workload import Check, Request
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
    ("0.12.0", "0.32.0", "0.33.0"),
)

EXAMPLES = {"test_placeholder_leak.py": PLACEHOLDER_LEAK}


def written(name: str) -> str:
    """The text of an example."""
    case = EXAMPLES[name]
    return render(case.workload, case.check, assumed=case.assumed, file=name)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in EXAMPLES:
        (FOLDER / each).write_text(written(each))
        print(FOLDER / each)
