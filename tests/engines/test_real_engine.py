"""The real engine gives the same outputs bare, observed, with a failing hook and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.forked import VARIANTS
from tests.engines.own_process import python

from kvledger.audit.causes import FIRST_TOKEN
from kvledger.audit.journal.catalogue import is_beside
from kvledger.audit.replay.journals import audit_paths

pytestmark = pytest.mark.whole_engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In-process runs of every variant, and one with EngineCore in its own process."""
    output_folder = tmp_path_factory.mktemp("engines")
    python("-m", "tests.engines.forked", output_folder, *VARIANTS)
    python(
        *("-m", "kvledger.audit.demo.engine", "--output", output_folder / "own-process.json"),
        KVLEDGER_DIR=str(output_folder / "own-process.journal"),
    )
    return output_folder


def digests(folder: Path, name: str) -> dict[str, Any]:
    result = json.loads((folder / f"{name}.json").read_text())
    return {request["id"]: request["digest"] for request in result["requests"]}


@pytest.mark.parametrize("name", ["observed", "broken", "mismatched", "own-process"])
def test_an_observed_engine_gives_the_outputs_of_a_bare_engine(folder: Path, name: str) -> None:
    assert digests(folder, "bare") == digests(folder, name)


@pytest.mark.parametrize("name", ["observed", "own-process"])
def test_an_observed_engine_is_clean(folder: Path, name: str) -> None:
    audit = audit_paths([folder / f"{name}.journal"])

    assert "clean" == audit.verdict
    assert audit.totals.requests >= 24


def test_a_failing_hook_makes_the_verdict_unknown(folder: Path) -> None:
    assert "unknown" == audit_paths([folder / "broken.journal"]).verdict


def test_a_refused_or_unobserved_engine_writes_no_journal(folder: Path) -> None:
    """Workers are created, with their journals, before kvledger refuses the scheduler."""
    assert not [path for path in (folder / "mismatched.journal").iterdir() if not is_beside(path)]
    assert not (folder / "bare.journal").exists()


@pytest.mark.parametrize("name", ["observed", "own-process"])
def test_the_times_are_the_engines_less_the_front_ends_share(folder: Path, name: str) -> None:
    """vLLM's queue and prefill times are of the scheduler, its time to first token also of the front end."""
    latencies = json.loads((folder / f"{name}.json").read_text())["latencies"]
    totals = audit_paths([folder / f"{name}.journal"]).totals
    vllm = {
        key.removeprefix("vllm:").removesuffix("_seconds"): of["seconds"] for key, of in latencies.items()
    }
    seconds = totals.first_token_microseconds / 1e6

    assert latencies["vllm:time_to_first_token_seconds"]["requests"] == totals.first_tokens
    assert seconds < vllm["time_to_first_token"]
    assert vllm["request_queue_time"] + vllm["request_prefill_time"] == pytest.approx(seconds, rel=0.05)
    decode = totals.later_tokens_microseconds / 1e6
    assert vllm["request_decode_time"] == pytest.approx(decode, rel=0.05)


@pytest.mark.parametrize("name", ["observed", "own-process"])
def test_each_request_has_the_time_to_first_token_as_the_sum_of_its_causes(folder: Path, name: str) -> None:
    totals = audit_paths([folder / f"{name}.journal"]).totals

    assert totals.preempted_microseconds > 0
    assert totals.first_token_microseconds == sum(totals.of(f"{cause}_microseconds") for cause in FIRST_TOKEN)
