"""Configurations that the workers of a real Dask cluster simulate, each by a vLLM process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("distributed")

from tests.exporters.test_fleet import Cluster
from tests.simulate.recordings import recording
from tests.simulate.timed import write

from kvledger.audit.replay.windows import EVERYTHING
from kvledger.exporters.inputs import reading
from kvledger.exporters.reports import simulate as report

pytestmark = pytest.mark.whole_engine


def test_workers_lead_to_the_outcomes_of_this_machine(tmp_path: Path) -> None:
    journal = write(tmp_path / "journal", recording(requests=30))
    cluster = Cluster(tmp_path)
    try:
        with reading([journal], dask=cluster.address, local=True) as (places, run):
            here, there = (
                report.run(
                    places,
                    releases=[],
                    settings=["num_gpu_blocks=30", "num_gpu_blocks=40", "max_num_seqs=0"],
                    pythons=[],
                    rate=1.0,
                    closed=False,
                    find="",
                    wanted="",
                    window=EVERYTHING,
                    away=away,
                )
                for away in (None, run)
            )
    finally:
        cluster.stop()
    assert 4 == len(here.outcomes)
    assert [outcome.name for outcome in here.outcomes] == [outcome.name for outcome in there.outcomes]
    assert here.outcomes[:2] == there.outcomes[:2]
    assert here.outcomes == there.outcomes
    assert here.outcomes[-1].error
