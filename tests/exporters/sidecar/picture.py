"""Draws the picture of the sidecar's page in the docs: ``python -m tests.exporters.sidecar.picture``.

Three engines serve an hour of planned traffic on vLLM's real scheduler, each with too little of something.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from msgspec.structs import replace
from tests.exporters.browser import Browser
from tests.exporters.sidecar.test_http_server import served
from tests.incidents import serving
from tests.incidents.serving import Plan

from kvledger.audit.events import EngineStarted, EngineStopped
from kvledger.audit.journal.reader import Reader
from kvledger.audit.journal.writer import JournalWriter

PICTURE = Path(__file__).parents[3] / "docs/pictures/sidecar-page.png"
PHASE_SECONDS = 690.0
ENGINES = {
    "chat-0": (Plan(setup={"max_running": 4}, fixed_step=2.0), 0.1, 0.26),
    "long-0": (
        Plan(setup={"max_batched_tokens": 128, "max_running": 64, "blocks": 999}, fixed_step=2.0, tail=300),
        0.06,
        0.22,
    ),
    "small-0": (Plan(setup={"blocks": 64}, fixed_step=2.0, tail=150), 0.06, 0.2),
}
"""How each engine serves, and the requests a second of a tenant in calm and in busy phases."""


def write(folder: Path, name: str) -> JournalWriter:
    """Write the journal of an engine, under its name. It runs until the writer is closed."""
    plan, *rates = ENGINES[name]
    calm, busy = (dataclasses.replace(plan, rates=dict.fromkeys(plan.rates, rate / 3)) for rate in rates)
    served_folder = folder / "served"
    phases = [(each, PHASE_SECONDS) for each in (calm, busy, calm, busy, calm)]
    serving.serve(served_folder, name, *phases)
    writer = JournalWriter(folder / "journals" / name)
    writer.rotate()
    with Reader(served_folder / f"{name}-0") as reader:
        for batch in reader.poll():
            writer.write(
                [
                    replace(event, configuration=event.configuration | {"instance": name})
                    if isinstance(event, EngineStarted)
                    else event
                    for event in batch.events
                    if not isinstance(event, EngineStopped)
                ]
            )
    return writer


def main() -> None:
    """Draw the page as it is at the end of the hour."""
    with tempfile.TemporaryDirectory() as name, patch.object(serving, "BEGAN", time.time() - 3540):
        folder = Path(name)
        writers = [write(folder, engine) for engine in ENGINES]
        with served(folder / "journals") as client:
            browser = Browser(folder / "profile")
            host, port = client.address
            browser.open(f"http://{host}:{port}/", width=1280, dark=False)
            browser.picture(PICTURE)
            browser.close()
        for writer in writers:
            writer.close()


if __name__ == "__main__":
    main()
