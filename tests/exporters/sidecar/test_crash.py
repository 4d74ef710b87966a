"""kill -9 at any instant, then a restart: no counter falls.

Hundreds of kills: KVLEDGER_KILLS=300.
"""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from tests.exporters.sidecar import crash

from kvledger.exporters.sidecar.follower import Follower


def uninterrupted(root: Path) -> dict[crash.Key, float]:
    """The final counters of a run that was never killed."""
    follower = Follower(root)
    follower.catch_up()
    counters = crash.counted(follower.audits)
    follower.close()
    return counters


@pytest.mark.crash
def test_kill_at_any_instant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, gone, seed = tmp_path / "engines", tmp_path / "gone", random.randrange(1 << 32)
    dice = random.Random(seed)
    engines = crash.Engines(root, gone, seed)
    process = crash.Process(root)
    scraper = crash.Scraper(process.url)
    answered = 0
    try:
        for _ in range(crash.kills()):
            process.start()
            if dice.random() < 0.8:
                process.wait_until_ready()
                answered += 1
            time.sleep(dice.random() * 0.4)
            process.kill()
        process.start()
        process.wait_until_ready()
        engines.stop()
        process.kill()
        process.start()
        process.wait_until_ready()
        scraper.stop()
        last = crash.scrape(process.url)
        ended = process.terminate()
    finally:
        engines.stop()
        scraper.stop()
        process.kill()
    with capsys.disabled():
        print(f"\n{crash.kills()} kills, {answered} of them while it answered {scraper.scrapes} scrapes")

    assert [] == scraper.faults, f"seed {seed}"
    assert last is not None
    scraper.compare(last)
    assert [] == scraper.faults, f"seed {seed}"
    for journal in gone.iterdir():
        shutil.move(journal, root / journal.name)
    shutil.rmtree(root / ".kvledger")
    assert uninterrupted(root) == last, f"seed {seed}"
    assert (0, "") == ended
