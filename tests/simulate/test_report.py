"""`kvledger simulate` on a recorded journal, in processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.exporters.reports.printed import lines, text
from tests.simulate.recordings import recording

from kvledger.audit.errors import LedgerError
from kvledger.audit.journal.writer import JournalWriter
from kvledger.audit.replay.windows import EVERYTHING
from kvledger.exporters.reports import simulate as report


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crowd") / "journal"
    writer = JournalWriter(folder)
    writer.rotate()
    writer.write(recording(requests=30))
    writer.close()
    return folder


def simulated(
    journal: Path, *settings: str, find: str = "", wanted: str = "", releases: tuple[str, ...] = ()
) -> report.Simulated:
    return report.run(
        [journal],
        releases=releases,
        settings=settings,
        pythons=(),
        rate=1.0,
        closed=False,
        find=find,
        wanted=wanted,
        window=EVERYTHING,
    )


def test_the_table_has_the_recording_and_each_configuration(journal: Path) -> None:
    found = simulated(journal, "num_gpu_blocks=30", "num_gpu_blocks=400")

    names = ["recorded", "simulated as recorded", "num_gpu_blocks=30", "num_gpu_blocks=400"]
    assert names == [outcome.name for outcome in found.outcomes]
    assert found.calibration.exact and 0 == found.calibration.differing
    shown = text(report.answer(found))
    assert shown.startswith("Calibrated. By step the recording comes out to the token: 30 requests")
    assert 5 == len(lines(report.answer(found)).strip().splitlines())
    page = report.html(found)
    assert "By step the recording comes out to the token: 30 requests" in page
    shown_names = [report.named(outcome) for outcome in found.outcomes]
    assert all(f"<span>{name}</span>" in page and f">{name}</td>" in page for name in shown_names)


def test_the_smallest_value_that_meets_a_goal_is_found(journal: Path) -> None:
    found = simulated(journal, find="num_gpu_blocks", wanted="preemptions < 1")

    assert found.found is not None
    tried = {outcome.name: outcome for outcome in found.outcomes}
    assert 0 == tried[f"num_gpu_blocks={found.found}"].preemptions
    assert tried["recorded"].preemptions > 0


def test_bad_input_is_one_sentence(journal: Path) -> None:
    with pytest.raises(LedgerError, match="go together"):
        simulated(journal, find="num_gpu_blocks")
    with pytest.raises(LedgerError, match="no setting"):
        simulated(journal, "temperature=1")
    with pytest.raises(LedgerError, match=r"no environment with vLLM 0\.1\.2"):
        simulated(journal, releases=("0.1.2",))
    with pytest.raises(LedgerError, match="no release"):
        simulated(journal, releases=("newest",))
