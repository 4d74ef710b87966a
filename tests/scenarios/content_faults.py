"""Faults of released schedulers at level ``content``: ``python -m tests.scenarios.content_faults [NAME...]``.

A runner with KV caches executes what the real scheduler of the installed vLLM plans. Prints one JSON line
for each fault: the findings about contents, and the counts of hit blocks. Each fault has a near miss, in
which the same blocks are filled before a request hits them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

from tests.scenarios import driving
from tests.scenarios.driving import Attach
from tests.scenarios.kv_runner import DriverWithCaches, attach_content
from tests.scenarios.offload_race import attach_with_connector, offloaded


def _failed_load(attach: Attach, *, computed: bool) -> None:
    driver = driving.start(attach, connector="scripted")
    driver.connector.answer_lookups("r", 160)
    driver.add("r", 200, 3)
    driver.schedule()
    failed = driver.blocks("r")[4:10]
    driver.scheduler.kv_runner.load_errors = set(failed)
    driver.output(invalid_blocks=failed)
    driver.scheduler.kv_runner.load_errors = set()
    if computed:
        driver.run()
    else:
        driver.abort("r")
    driver.add("next", 200, 3, shares=("r", 200))
    driver.run()


def failed_load_stays_cached(attach: Attach) -> None:
    """A load fails, its request is aborted, and the next request hits the blocks."""
    _failed_load(attach, computed=False)


def failed_load_is_computed(attach: Attach) -> None:
    """A load fails, its request computes the blocks, and the next request hits them."""
    _failed_load(attach, computed=True)


def _rounded(attach: Attach, *, external: int) -> None:
    driver = driving.start(attach, connector="scripted")
    driver.connector.answer_lookups("r", (external, True))
    driver.add("r", 60, 3)
    driver.run()
    driver.add("next", 60, 3, shares=("r", 60))
    driver.run()


def load_rounded_up(attach: Attach) -> None:
    """A load ends within a block, and the engine counts the block's other positions as computed."""
    _rounded(attach, external=18)


def load_of_whole_blocks(attach: Attach) -> None:
    """A load ends with a block."""
    _rounded(attach, external=32)


def offload_store_race(attach: Attach) -> None:
    """A step stores blocks while the step that fills them is still in flight."""
    offloaded(attach, asynchronous=True)


def offload_store_in_order(attach: Attach) -> None:
    """The same stores, where each step ends before the next begins."""
    offloaded(attach, asynchronous=False)


FAULTS: dict[str, Callable[[Attach], None]] = {
    "failed-load-stays-cached": failed_load_stays_cached,
    "failed-load-computed": failed_load_is_computed,
    "load-rounded-up": load_rounded_up,
    "load-of-whole-blocks": load_of_whole_blocks,
    "offload-store-race": offload_store_race,
    "offload-store-in-order": offload_store_in_order,
}


def _attach(scheduler: Any) -> Any:
    if getattr(scheduler, "kv_runner", None) is not None:  # which has a connector's worker side
        return attach_with_connector(scheduler)
    return attach_content(scheduler)


def outcome(drive: Callable[[Attach], None]) -> dict[str, Any]:
    """The findings about contents, each with its message, and the counts."""
    audits: list[Any] = []
    drive(lambda scheduler: audits.append(_attach(scheduler)))
    for audit in audits:
        audit.detach()
    return {
        "findings": [
            [found.id, found.message]
            for audit in audits
            for found in (*audit.violations, *audit.drifts)
            if found.id.startswith("content/")
        ],
        "counts": audits[0].ledger.sums.contents,
        "transfers": audits[0].ledger.sums.transfers,
        "excluded": audits[0].ledger.contents.excluded,
    }


def main(names: list[str]) -> None:
    """Run the named faults, or all."""
    driving.Driver = DriverWithCaches  # type: ignore[misc]
    stdout = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for name in names or FAULTS:
            try:
                row = outcome(FAULTS[name])
            except Exception as error:
                row = {"raised": f"{type(error).__name__}: {error}"}
            print(json.dumps({"fault": name, **row}), file=stdout, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
