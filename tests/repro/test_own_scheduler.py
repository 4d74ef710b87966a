"""`kvledger repro` of a journal of a scheduler class that is not vLLM's own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.repro.crowds import Recording

from kvledger.audit.repro.choose_finding import findings
from kvledger.audit.repro.reproduction import Reproduction, reproduce
from kvledger.audit.traffic.driver import Driver, tokens
from kvledger.audit.traffic.engine_setup import EngineSetup
from kvledger.exporters.repro.pytest_file import render

MODULE = "own_scheduler_of_a_test"
OWN = f"{MODULE}:Negative"
SOURCE = """
from vllm.v1.core.sched.scheduler import Scheduler

class Negative(Scheduler):
    def update_from_output(self, *args):
        for request in self.running:
            if request.prefill_stats:
                request.prefill_stats.num_local_cached_tokens = -16
        return super().update_from_output(*args)

class Other(Negative): ...
"""
FINDING = "tokens/negative"


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal of an engine with this class, which its journal names."""
    folder = tmp_path_factory.mktemp("own")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        driver = Driver(EngineSetup(scheduler_class=OWN))
        recording = Recording(folder / "journal", "tokens")
        recording.attach(driver.scheduler)
        for name in "abc":
            driver.add(name, tokens(40, name), 3)
        driver.run()
        recording.close()
    return folder / "journal"


def reproduced(journal: Path, scheduler: str, patch: pytest.MonkeyPatch) -> Reproduction:
    patch.syspath_prepend(str(journal.parent))
    (seen, *_) = findings(journal)
    return reproduce(journal, seen=seen, budget=30, workers=0, any_release=True, scheduler=scheduler)


def test_the_class_that_is_named_is_driven_and_imported_by_the_test(
    journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reproduced(journal, OWN, monkeypatch)
    assert ("reproduced", OWN) == (made.status, made.workload and made.workload.engine["scheduler_class"])
    assert made.workload is not None and made.check is not None
    test = render(made.workload, made.check)
    assert f"from {MODULE} import Negative\n" in test
    assert "Negative, Scheduler, vllm_config=config" in test


@pytest.mark.parametrize(
    ("scheduler", "reason"),
    [
        ("", "The journal is of the scheduler class Negative, which is not vLLM's own"),
        (f"{MODULE}:Other", "The journal is of the scheduler class Negative, and not of Other."),
        ("Negative", "'Negative' is not MODULE:CLASS"),
        (f"{MODULE}; import os:Negative", "is not MODULE:CLASS"),
    ],
)
def test_another_class_is_not_judged(
    journal: Path, scheduler: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reproduced(journal, scheduler, monkeypatch)
    assert "refused" == made.status
    assert reason in made.reason
