"""A Prometheus that holds the history of a trace: exported, backfilled with ``promtool``, and served."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import journals, tools
from tests.histories import events
from tests.serving.processes import Prometheus, Server
from tests.simulated_trace import WALL_SECONDS, write_trace

from kvledger.audit.events import Setting
from kvledger.exporters.metrics import backfill

INTERVAL = 1.0
REQUESTS = 4000


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


@contextmanager
def served(folder: Path, journals_folder: Path) -> Iterator[tuple[History, float]]:
    """A server with the history of these journals, and the time of its last samples."""
    promtool = tools.debian("prometheus", "promtool")
    exported, blocks = folder / "history.om", folder / "blocks"
    backfill.export([journals_folder], exported, INTERVAL, backfill.labels_of(()))
    create = [str(promtool), "tsdb", "create-blocks-from", "openmetrics", str(exported), str(blocks)]
    subprocess.run(create, check=True, capture_output=True, timeout=60)
    server = History(folder, blocks)
    try:
        server.start()
        yield server, float(exported.read_text().splitlines()[-2].rpartition(" ")[2])
    finally:
        server.kill()
