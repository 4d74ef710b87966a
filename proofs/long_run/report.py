"""The tables of a long run, as they stand in docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from benchmarks import page
from proofs.long_run.gauges import Watcher, fastest_tenth
from proofs.long_run.sums import Sums

MIB = 1 << 20


class Result(NamedTuple):
    """What a run found. ``counters``: how many counters of engines are equal in sidecar and Prometheus."""

    hours: float
    seconds: float
    sums: Sequence[Sums]
    counters: int
    resets: int
    watcher: Watcher
    restarts: Mapping[str, int]
    removed_segments: int
    journal_bytes: int
    journals: int
    removed_journals: int

    @property
    def right(self) -> bool:
        """Whether every sum is equal and no counter fell."""
        return all(one.equal for one in self.sums) and not self.resets


WATCHED = (
    ("resident memory of the sidecar, MiB", "sidecar", median, "{:.0f}"),
    ("resident memory of Prometheus, MiB", "prometheus", median, "{:.0f}"),
    ("journals on disk, MiB", "journals", median, "{:.1f}"),
    ("kept rows on disk, MiB", "kept", median, "{:.2f}"),
    ("the sidecar's checkpoint, MiB", "checkpoint", median, "{:.2f}"),
    ("a scrape of the sidecar, fastest tenth, ms", "scrape", fastest_tenth, "{:.1f}"),
    ("a scrape of the sidecar, median, ms", "scrape", median, "{:.1f}"),
    ("samples of a scrape", "series", median, "{:,.0f}"),
)


def section(result: Result, ran_on: str) -> str:
    """The section of the page."""
    restarts = ", ".join(f"{what} {count}" for what, count in sorted(result.restarts.items()))
    hours = "" if result.hours == 24 else f' ARGS="--hours {result.hours:g}"'
    command = f"make proof NAME=long_run{hours}"
    requests = result.sums[0].emitted
    return f"""{page.LONG_RUN}
`{command}` sends {result.hours:g} simulated hours of one engine at 20 requests a second through journal,
rotation, kept, sidecar and Prometheus in {result.seconds / 60:.0f} minutes. This ran on {ran_on}

The engine is simulated: it emits the events of a real one, with prefix hits, external loads, failed loads,
drafts, preemptions, cache resets and aborts, and the real writer writes its journals. All other processes
are real. How often each ended while the others ran: {restarts}.

{page.table(("sum", "engines emitted", "Prometheus", "kept", "equal"), [_sum(one) for one in result.sums])}

- *Engines emitted* is summed up where events are written: requests, prompt and output tokens, preemptions and
  events by a few lines that only count, the others by a ledger without a journal.
- *Prometheus* is the query of the counter at the end. {result.counters} counters of the engine equal those
  that the sidecar serves, and the number of times that one of them fell is {result.resets}.
- *Kept* is `kvledger summary`; {result.removed_journals} of {result.journals} journals were gone by then.
- Rotation removed {result.removed_segments} segments; {result.journal_bytes / MIB:,.0f} MiB were written
  ({result.journal_bytes / max(1, requests):.0f} bytes a request).
- Requests that ran at a kill are *unknown*: their tokens are in no sum.

{page.table(("what", "first fifth", "third fifth", "last fifth", "most", "flat"), _trends(result.watcher))}

Figures are medians over a fifth of the run, or the time within which a tenth of the scrapes ended; *flat*
means that the last fifth is at most 1.1 times the third. Kept rows grow with the requests, by design. The
median of the scrapes has what else ran on the machine; the fastest tenth has what the scrape itself costs.
The sidecar took {result.watcher.cpu_seconds:.0f} CPU seconds,
{result.watcher.cpu_seconds / result.hours / 36:.2f} % of a core at this rate of requests.
"""


def _sum(one: Sums) -> tuple[str, ...]:
    kept = "" if one.kept is None else f"{one.kept:,}"
    return (one.name, f"{one.emitted:,}", f"{one.prometheus:,}", kept, "yes" if one.equal else "no")


def _trends(watcher: Watcher) -> list[tuple[str, ...]]:
    rows = []
    for what, field, figure, form in WATCHED:
        trend = watcher.trend(field, figure)
        flat = "yes" if trend.flat else "no"
        rows.append((what, *(form.format(value) for value in trend), flat))
    return rows
