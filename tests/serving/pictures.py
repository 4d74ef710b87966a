"""Draws every board with the data of a real engine: ``python -m tests.serving.pictures docs/pictures``.

Runs a server, the sidecar and Prometheus as in ``test_deployment.py`` for a few minutes, with prefix hits,
external loads, preemptions, aborts, a restarted engine and one violation.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import journals
from tests.serving.processes import Engine, Prometheus, Sidecar
from tests.serving.test_deployment import Deployment, prompts_of

from kvledger.dashboards import preview, rules

RANGE = "5m"


def traffic(deployment: Deployment, seconds: float) -> None:
    """Requests of every kind for a while."""
    until = time.monotonic() + seconds
    round_number = 0
    while time.monotonic() < until:
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
        prometheus = Prometheus(Path(made), engine, sidecar, rules.write(Path(made)))
        started = [prometheus, sidecar, engine]
        try:
            for process in started:
                process.start()
            deployment = Deployment(engine, sidecar, prometheus, place, mounted=False)
            traffic(deployment, 110)
            engine.kill()
            engine.start()
            traffic(deployment, 60)
            journals.violated(place / "engine-9-9-9", time.time())
            time.sleep(8)
            for name in preview.names():
                draw(name, prometheus.address, folder / f"board-{name}.png", width)
                draw(name, prometheus.address, folder / f"board-{name}.html", width)
        finally:
            for process in started:
                process.kill()


def draw(board: str, prometheus: str, output: Path, width: int) -> None:
    """Let the command draw one board."""
    command = [sys.executable, "-m", "kvledger", "dashboards", "preview", board, "--prometheus", prometheus]
    options = ["-o", str(output), "--since", RANGE, "--interval", "1s", "--width", str(width)]
    subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
