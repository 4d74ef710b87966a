"""The metrics of journals at past times, as OpenMetrics that ``promtool`` turns into blocks of Prometheus.

The journals are read once, in the order of time over all engines. At each tick every metric is sampled, as a
scrape at that time would have. Metrics about the present of an engine or of a sidecar are left out.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from ...audit.errors import LedgerError
from ...audit.events import Event
from ...audit.journal.catalogue import find_journals
from ...audit.journal.reader import Reader
from ...audit.replay.followed_audit import FollowedAudit
from ...audit.replay.prompt_pairs import pair
from ..files import whole
from .labels import free_label
from .metric_list import METRICS, Metric, collect
from .openmetrics import END, escaped, heading, labels_text, number_text
from .prometheus import family
from .values import MetricSample

LEFT_OUT = (
    "kvledger_engine_observed",
    "kvledger_engine_state",
    "kvledger_journal_lag_seconds",
    "kvledger_checkpoint_timestamp_seconds",
    "kvledger_unnamed_journals",
    "kvledger_reconciliation_",
    "kvledger_sidecar_",
)
"""Prefixes of metrics about the present: of a running engine, its own counters, and a sidecar."""

MOST_TICKS = 1_000_000
"""The most samples of a series between two events. At 15 seconds it is half a year without an event."""

EXPORTED = tuple(metric for metric in METRICS if not metric.name.startswith(LEFT_OUT))


def export(paths: Sequence[Path], output: Path, interval: float, added: Mapping[str, str]) -> tuple[int, int]:
    """Write the samples of every ``interval`` seconds; returns the number of ticks and of samples.

    ``added`` are labels for every sample, such as the ``job`` that a scrape adds. Raises LedgerError.
    """
    suffix = "".join(f',{name}="{escaped(value)}"' for name, value in added.items())
    with whole(output) as draft, contextlib.ExitStack() as stack:
        files = {
            metric.name: stack.enter_context(tempfile.TemporaryFile("w+", newline="\n"))
            for metric in EXPORTED
        }
        ticks = samples = 0
        for at, audits in _ticks(paths, interval):
            ticks += 1
            for metric, rows in collect(audits):
                if metric.name in files:
                    samples += _sample(files[metric.name], metric, rows, at, suffix)
        if not ticks:
            raise LedgerError("The journals hold no engine that has started.")
        with draft.open("w", newline="\n") as file:
            _concatenate(file, files)
    return ticks, samples


def labels_of(given: Sequence[str]) -> dict[str, str]:
    """The labels ``NAME=VALUE``, and those that a scrape adds. Raises :class:`LedgerError`."""
    added = {"job": "kvledger", "instance": "kvledger"}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise LedgerError(f"{each!r} is no label such as job=kvledger.")
        added[name] = value
    return added


class _Journal:
    """One journal, its audit, and whether all its events have been read."""

    def __init__(self, path: Path) -> None:
        self.engine_audit = FollowedAudit(path)
        """The audit of the events that were merged so far."""
        self.reader = Reader(path)
        """Reads the journal."""
        self.running = True
        """Whether the journal may have more events; False: all were read."""

    def events(self, place: int) -> Iterator[tuple[float, int, int, Event]]:
        """The events by their Unix time. ``place`` and the event's number order events of one time."""
        base = 0.0
        for batch in self.reader.poll():
            for number, event in enumerate(batch.events, batch.first_event):
                base = getattr(event, "began_seconds", base)
                yield base + event.at / 1e6, place, number, event
        self.running = False


def _ticks(paths: Sequence[Path], interval: float) -> Iterator[tuple[float, list[FollowedAudit]]]:
    """Each time of a sample, with the audits of the events before it. Raises :class:`LedgerError`."""
    journals = [_Journal(path) for path in find_journals(paths)]
    begun: list[FollowedAudit] = []
    due = 0.0
    for at, place, number, event in heapq.merge(*(one.events(n) for n, one in enumerate(journals))):
        if due and at > due + MOST_TICKS * interval:
            raise LedgerError(
                f"{journals[place].engine_audit.path}: over {MOST_TICKS:,} samples would lie between two "
                "events; give a longer --interval, or leave this journal out."
            )
        while due and at > due:
            pair(begun, due)
            yield due, begun
            due += interval
        engine_audit = journals[place].engine_audit
        engine_audit.feed(number, event)
        engine_audit.journal.events += 1
        if not engine_audit.series and engine_audit.engine is not None:
            running = [one.engine_audit.series for one in journals if one.running]
            engine_audit.series = free_label(engine_audit, {label for label in running if label})
            settings = engine_audit.engine.configuration
            engine_audit.workers.poll(settings.get("transfer"), settings.get("engine_key"))
            begun.append(engine_audit)
            due = due or (at // interval + 1) * interval
    for one in journals:
        if one.reader.ended and one.engine_audit in begun:
            one.engine_audit.end(stopped=one.reader.stopped)
    if due:
        pair(begun, math.inf)
        yield due, begun


def _sample(file: IO[str], metric: Metric, rows: Iterable[MetricSample], at: float, suffix: str) -> int:
    """Write the present samples of one metric, each line after a key that its histogram's samples share."""
    written = 0
    for sample in family(metric, rows).samples:
        block = labels_text(sample.labels) + suffix
        key = labels_text({name: value for name, value in sample.labels.items() if name != "le"})
        file.write(f"{key}\t{sample.name}{{{block.lstrip(',')}}} {number_text(sample.value)} {at:.3f}\n")
        written += 1
    return written


def _concatenate(file: IO[str], files: Mapping[str, IO[str]]) -> None:
    """Write each family whole, and in it each series or histogram whole, as the format wants it."""
    for metric in EXPORTED:
        part = files[metric.name]
        if part.tell():
            file.write(heading(metric.name, metric.kind, metric.unit, metric.help))
            part.seek(0)
            groups: dict[str, list[str]] = {}
            for line in part:
                key, _, sample = line.partition("\t")
                groups.setdefault(key, []).append(sample)
            for samples in groups.values():
                file.writelines(samples)
    file.write(END)
