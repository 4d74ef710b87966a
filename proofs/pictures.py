"""Draws every board with the data of a real engine.

Runs a server, the sidecar and Prometheus as in ``test_deployment.py`` for a few minutes, with prefix hits,
external loads, preemptions and aborts. Then ``kvledger report`` and ``kvledger dashboards preview`` draw.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.serving import processes
from tests.serving.processes import Engine, Prometheus, Sidecar
from tests.serving.test_deployment import Deployment, prompts_of

from kvledger.dashboards import preview, rules

TRAFFIC_SECONDS = 60.0

processes.START_SECONDS = 900.0


@contextmanager
def running_traffic(deployment: Deployment) -> Iterator[None]:
    """Requests of every kind, until the end of the block."""
    stop = threading.Event()
    thread = threading.Thread(target=traffic, args=(deployment, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def traffic(deployment: Deployment, stop: threading.Event) -> None:
    """Requests of every kind."""
    round_number = 0
    while not stop.is_set():
        prompts = prompts_of(f"round {round_number // 3}", 4)
        deployment.one_by_one(prompts)
        if round_number % 3 == 1:
            deployment.engine.reset_cache()
            deployment.one_by_one(prompts)
        deployment.crowd(8, f"crowd {round_number}")
        if round_number % 4 == 2:
            deployment.give_up(prompts_of(f"left {round_number}", 1)[0])
        round_number += 1


def main(folder: Path, width: int = 1440) -> None:
    with tempfile.TemporaryDirectory() as made:
        place = Path(made) / "journals"
        place.mkdir()
        engine = Engine(Path(made), place)
        sidecar = Sidecar(Path(made), place, engine)
        prometheus = Prometheus(Path(made), {"vllm": engine, "kvledger": sidecar}, rules.write(Path(made)))
        started = [prometheus, sidecar, engine]
        try:
            for process in started:
                process.start()
            deployment = Deployment(engine, sidecar, prometheus, place, mounted=False)
            began = time.monotonic()
            with running_traffic(deployment):
                time.sleep(TRAFFIC_SECONDS)
                for name in preview.names():
                    seconds = time.monotonic() - began
                    draw(name, prometheus.address, folder / f"board-{name}.png", width, seconds)
            report(place, folder / "report.png")
        finally:
            for process in started:
                process.kill()


def draw(board: str, prometheus: str, output: Path, width: int, seconds: float) -> None:
    """Let the command draw one board."""
    command = ["dashboards", "preview", board, "--prometheus", prometheus, "-o", str(output)]
    kvledger(*command, "--since", f"{seconds:.0f}s", "--interval", "1s", "--width", str(width))


def report(place: Path, output: Path) -> None:
    """Let the command write its page, and a browser draw the first part of it."""
    page = place / "report.html"
    kvledger("report", str(place), "-o", str(page))
    preview.photograph(page, output, 1000, 1500)


def kvledger(*words: str) -> None:
    """Run the command line; ``report`` exits with 1 if it has findings."""
    subprocess.run([sys.executable, "-m", "kvledger", *words], check=False)


if __name__ == "__main__":
    main(Path(__file__).parents[1] / "docs" / "pictures")
