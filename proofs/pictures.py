"""Draws every board with the data of a real engine.

Runs a server, the sidecar and Prometheus as in ``test_deployment.py`` for a few minutes, with prefix hits,
external loads, preemptions and aborts. Then ``kvledger export html`` and ``proofs/preview`` draw.
``ARGS=--turns`` draws what boards and report have of turns, with the chats of the proof ``turns``.
"""

from __future__ import annotations

import random
import re
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

from kvledger.dashboards import boards, rules

from .preview import page as preview
from .preview.data import Span
from .turns import PAUSED, QUIET, RESET, STAMPED, STRIPPED, TOOL, Chats, session

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
                for name in boards.NAMES:
                    span = Span(time.time(), time.monotonic() - began, 1.0)
                    drawn = preview.gather([name], prometheus.address, span)
                    preview.save(drawn, span, folder / f"board-{name}.png", width)
            report(place, folder / "report.png")
        finally:
            for process in started:
                process.kill()


def report(place: Path, output: Path) -> None:
    """Let the command write its page, and a browser draw the first part of it."""
    page = place / "report.html"
    kvledger("export", "html", str(place), "-o", str(page))
    preview.photograph(page, output, 1000, 1500)


def kvledger(*words: str) -> None:
    """Run the command line; ``export html`` exits with 1 if it has findings."""
    subprocess.run([sys.executable, "-m", "kvledger", *words], check=False)


def of_turns(folder: Path, width: int = 1440) -> None:
    """Draw the row of the board, and the part of the report, about turns of sessions."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made) / "journals"
        place.mkdir()
        server = Chats(Path(made) / "chats", place, "chats", 400)
        sidecar = Sidecar(Path(made), place)
        prometheus = Prometheus(Path(made), {"kvledger": sidecar}, rules.write(Path(made)))
        started = [prometheus, sidecar, server]
        try:
            for process in started:
                process.start()
            began = time.monotonic()
            for number, kind in enumerate((QUIET, STAMPED, QUIET, TOOL, STRIPPED, RESET, PAUSED) * 2):
                session(f"s{number}", kind, 12, random.Random(number)).run(server, server)
            time.sleep(5)
            span = Span(time.time(), time.monotonic() - began, 1.0)
            (board,) = preview.gather(["tokens"], prometheus.address, span)
            rows = [row for row in board.rows if row.title == "Turns of sessions"]
            preview.save([board._replace(rows=rows)], span, folder / "board-turns.png", width)
            page = place / "report.html"
            kvledger("export", "html", str(place), "-o", str(page))
            text = page.read_text()
            found = re.search(r"<section><h2>Turns of sessions.*?</section>", text, re.DOTALL)
            assert found is not None
            page.write_text(text[: text.index("<body")] + f"<body><main>{found[0]}</main></body></html>")
            preview.photograph(page, folder / "report-turns.png", 1000, 700)
        finally:
            for process in started:
                process.kill()


if __name__ == "__main__":
    pictures = Path(__file__).parents[1] / "docs" / "pictures"
    of_turns(pictures) if "--turns" in sys.argv else main(pictures)
