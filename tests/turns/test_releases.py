"""The chats of ``test_turns.py`` on a release whose requests have no session id."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.releases import built
from tests.time_limits import RUN_HANGS

ROOT = Path(__file__).parents[2]


@pytest.mark.releases
@pytest.mark.parametrize("release", ["0.24.0"])
def test_sessions_found_in_request_ids_have_the_same_turns(release: str) -> None:
    releases = built(release)
    python = releases.BIN / "python"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/turns/test_turns.py"]
    environment = releases.environ(release)
    completed = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=RUN_HANGS
    )

    assert 0 == completed.returncode, completed.stdout[-3000:]
