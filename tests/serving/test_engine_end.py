"""How a real server's engine ends: killed with -9, or by SIGTERM as systemd and Kubernetes do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.serving.processes import ROOT, Engine, wait_until

from kvledger.audit.demo.model import VOCABULARY_TOKENS
from kvledger.audit.events import EngineStarted, RequestAdded
from kvledger.audit.journal.catalogue import find_journals
from kvledger.audit.journal.format import is_live
from kvledger.audit.journal.host_folders import read
from kvledger.audit.replay.engine_audit import EngineAudit
from kvledger.audit.replay.journals import audit_paths

pytestmark = pytest.mark.whole_engine

GONE_SECONDS = 30.0
ANSWER_SECONDS = 30.0
"""A server whose engine has ended may keep connections open without an answer."""


class Clients:
    """Clients that send requests without a pause, and count the answers."""

    def __init__(self, engine: Engine) -> None:
        self.answered = 0
        self._engine = engine
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(4)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, seed: int) -> None:
        dice = random.Random(seed)
        while not self._stop.is_set():
            prompt = [dice.randrange(2, VOCABULARY_TOKENS) for _ in range(40)]
            if not self._engine.complete(prompt, dice.randrange(2, 12), ANSWER_SECONDS):
                return
            self.answered += 1


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Engine, Clients, Path]]:
    """A server under load that has answered some requests."""
    engine = Engine(tmp_path, tmp_path / "journals")
    clients = None
    try:
        engine.start()
        clients = Clients(engine)
        wait_until(lambda: clients.answered >= 20, 120, engine.last_words)
        yield engine, clients, tmp_path / "journals"
    finally:
        engine.kill()
        if clients is not None:
            clients.stop()


def journal_of(folder: Path) -> Path:
    (journal,) = find_journals([folder])
    return journal


def audited(journal: Path) -> EngineAudit:
    (audit,) = audit_paths([journal]).engines
    return audit


def exit_code(journal: Path) -> int:
    """The exit code of ``kvledger audit``."""
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-m", "kvledger", "audit", str(journal)]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    print(ended.stdout)
    return ended.returncode


def process_id(journal: Path) -> int:
    """The process of the engine core."""
    return next(event.process_id for _, event in read(journal) if isinstance(event, EngineStarted))


def test_a_killed_engine_is_unknown(served: tuple[Engine, Clients, Path]) -> None:
    engine, clients, folder = served
    journal = journal_of(folder)
    assert "clean" == audited(journal).verdict

    os.kill(process_id(journal), signal.SIGKILL)
    wait_until(lambda: not is_live(journal), GONE_SECONDS, engine.last_words)
    clients.stop()
    audit = audited(journal)
    judged = sum(audit.journal.requests.values())
    print(f"{clients.answered} requests were answered, {judged} ended in the journal: {audit.verdict}")

    assert ("unknown", 3) == (audit.verdict, exit_code(journal))
    assert {"clean", "unknown"} >= {verdict for verdict, _ in audit.journal.requests}
    assert any("the trace is whole up to 20" in doubt for doubt in audit.doubts)


@pytest.mark.parametrize("group", [False, True], ids=["server", "group"])
def test_an_engine_that_gets_sigterm_ends_in_good_order(
    group: bool, served: tuple[Engine, Clients, Path]
) -> None:
    """vLLM's default gives running requests no time: they are aborted, and each of their ends is recorded.

    Kubernetes signals the server, systemd and Ctrl-C all processes.
    """
    engine, clients, folder = served
    journal = journal_of(folder)
    began = time.monotonic()

    engine.terminate(group=group)
    wait_until(lambda: not is_live(journal), GONE_SECONDS, engine.last_words)
    took = time.monotonic() - began
    clients.stop()
    audit = audited(journal)
    added = sum(isinstance(event, RequestAdded) for _, event in read(journal))
    judged = sum(audit.journal.requests.values())
    print(
        f"{clients.answered} requests were answered, {judged} ended in the journal: "
        f"{audit.verdict} {audit.journal.requests}, {took:.2f} s after SIGTERM"
    )

    assert ("clean", 0) == (audit.verdict, exit_code(journal))
    assert clients.answered <= sum(audit.journal.requests.values()) == added
