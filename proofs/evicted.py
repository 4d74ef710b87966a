"""Compares the sampled share of misses that were evicted with the share of all of them.

Usage: make proof NAME=evicted ARGS="[--seconds N]"

Real schedulers (0.32.0) serve two minutes of traffic over planned time, with four sizes of the pool, few and
many shared prefixes: once as always, and once with every content in the sample. Exits with 1 if the shares
differ by more than six points.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.incidents.serving import Plan, serve

from kvledger.audit.causes import EVICTED
from kvledger.audit.engines import prompt_reports
from kvledger.exporters.reports.why import why

POINTS = 6.0
HEAD = """\
| blocks | prefixes | sampled | evicted | margin | all | evicted | difference |
|---|---|---|---|---|---|---|---|"""


def shares(plan: Plan, seconds: float, mask: int) -> tuple[int, float, float]:
    """Blocks in the sample, and the share of them that was evicted with its margin, in percent."""
    prompt_reports.MASK = mask
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder), "evicted", (plan, seconds))
        rows = why([Path(folder)]).sampled
    evicted = next((row for row in rows if row.cause == EVICTED), None)
    share, margin = (evicted.share, evicted.margin) if evicted is not None else (0.0, 0.0)
    return sum(row.blocks for row in rows), 100 * (share or 0.0), 100 * (margin or 0.0)


def main() -> int:
    """Print a row for each size and number of prefixes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0)
    seconds, worst, mask = parser.parse_args().seconds, 0.0, prompt_reports.MASK
    print(HEAD)
    for blocks in (60, 120, 250, 400):
        for prefixes in (6, 40):
            plan = Plan(setup={"blocks": blocks}, prefixes=prefixes, prefix=256)
            some, share, margin = shares(plan, seconds, mask)
            every, truth, _ = shares(plan, seconds, 0)
            found = f"{some:,} | {share:.1f} % | ± {margin:.1f} | {every:,} | {truth:.1f} %"
            print(f"| {blocks} | {prefixes} | {found} | {share - truth:+.1f} |", flush=True)
            worst = max(worst, abs(share - truth))
    return int(worst > POINTS)


if __name__ == "__main__":
    sys.exit(main())
