"""A Prometheus that holds the history of a trace, which ``promtool`` made of samples of its metrics."""

from __future__ import annotations

import heapq
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import journals, tools
from tests.histories import events
from tests.serving.processes import Prometheus, Server
from tests.simulated_trace import WALL_SECONDS, write_trace

from kvledger.audit.events import Event, Setting
from kvledger.audit.journal.reader import Reader
from kvledger.audit.replay.find import journals_at
from kvledger.audit.replay.followed_audit import FollowedAudit
from kvledger.exporters.metrics.metric_list import METRICS, collect
from kvledger.exporters.metrics.openmetrics import END, heading, labels_text, number_text
from kvledger.exporters.metrics.prometheus import family

INTERVAL = 1.0
REQUESTS = 4000
OF_THE_PRESENT = (
    "kvledger_engine_observed",
    "kvledger_engine_state",
    "kvledger_journal_lag_seconds",
    "kvledger_checkpoint_timestamp_seconds",
    "kvledger_unnamed_journals",
    "kvledger_reconciliation_",
    "kvledger_sidecar_",
)
"""Prefixes of metrics that have no past: of a running engine, its own counters, and a sidecar."""


class History(Prometheus):
    """Prometheus without a scrape, on blocks that exist."""

    def __init__(self, folder: Path, blocks: Path) -> None:
        Server.__init__(self, folder, "prometheus")
        self._program = tools.debian("prometheus", "prometheus")
        self._blocks = blocks
        self._configuration = folder / "prometheus.json"
        self._configuration.write_text("{}")

    def command(self) -> list[str]:
        options = (f"--storage.tsdb.path={self._blocks}", "--storage.tsdb.retention.time=100y")
        return [*super().command()[:2], *options, f"--web.listen-address=127.0.0.1:{self.port}"]


def trace(folder: Path, requests: int = REQUESTS) -> Path:
    """Two engines of different models, and an engine with a violation."""
    write_trace(folder, requests, engines=2)
    violation = journals.reported(events(200, journals.CLEAN), local=-128, external=160, computed=168)
    settings: dict[str, Setting] = {"model": "tiny"}
    journals.write(folder / "engine-9", violation, wall_seconds=WALL_SECONDS + 5, configuration=settings)
    return folder


def write_samples(folder: Path, output: Path) -> None:
    """Write what a scrape every ``INTERVAL`` would have found; the format wants each series whole."""
    series: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for at, audits in _ticks(folder):
        for metric, rows in collect(audits):
            if metric.name.startswith(OF_THE_PRESENT):
                continue
            for sample in family(metric, rows).samples:
                labels = {**sample.labels, "job": "kvledger", "instance": "kvledger"}
                key = labels_text({name: value for name, value in labels.items() if name != "le"})
                line = f"{sample.name}{{{labels_text(labels)}}} {number_text(sample.value)} {at:.3f}\n"
                series[metric.name][key].append(line)
    with output.open("w", newline="\n") as file:
        for metric in METRICS:
            if metric.name in series:
                file.write(heading(metric.name, metric.kind, metric.unit, metric.help))
                for lines in series[metric.name].values():
                    file.writelines(lines)
        file.write(END)


def _ticks(folder: Path) -> Iterator[tuple[float, list[FollowedAudit]]]:
    """The time of each scrape, with the audits of what came before it. Each journal is of another engine."""
    audits = [FollowedAudit(path) for path in journals_at([folder])]
    begun: list[FollowedAudit] = []
    due = 0.0
    for at, place, number, event in heapq.merge(*(_events(one, n) for n, one in enumerate(audits))):
        due = due or (at // INTERVAL + 1) * INTERVAL
        while at > due:
            yield due, begun
            due += INTERVAL
        audits[place].feed(number, event)
        audits[place].journal.events += 1
        if audits[place] not in begun:
            begun.append(audits[place])
    for one in begun:
        one.end(stopped=True)
    yield due, begun


def _events(audit: FollowedAudit, place: int) -> Iterator[tuple[float, int, int, Event]]:
    base = 0.0
    with Reader(audit.path) as reader:
        for batch in reader.poll():
            for number, event in enumerate(batch.events, batch.first_event):
                base = getattr(event, "began_seconds", base)
                yield base + event.at / 1e6, place, number, event


@contextmanager
def served(folder: Path, journals_folder: Path) -> Iterator[tuple[History, float]]:
    """A server with the history of these journals, and the time of its last samples."""
    promtool = tools.debian("prometheus", "promtool")
    exported, blocks = folder / "history.om", folder / "blocks"
    write_samples(journals_folder, exported)
    create = [str(promtool), "tsdb", "create-blocks-from", "openmetrics", str(exported), str(blocks)]
    subprocess.run(create, check=True, capture_output=True, timeout=60)
    server = History(folder, blocks)
    try:
        server.start()
        yield server, float(exported.read_text().splitlines()[-2].rpartition(" ")[2])
    finally:
        server.kill()
