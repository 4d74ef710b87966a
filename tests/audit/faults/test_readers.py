"""What reads the files of known faults: the release matrix, the page of findings, and the reproductions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvledger.audit.faults.catalogue import catalogue
from kvledger.audit.release_semantics import CONTRACTS

ROOT = Path(__file__).parents[3]
FAULTS = catalogue().values()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


NOT_OBSERVED = ("0.10.2", "0.12.0")
"""Releases that were in the matrix; journals of them are still read."""


def test_the_examined_releases_are_those_of_the_matrix(scripts: None) -> None:
    from releases import MATRIX, SGLANG

    names = [name for name in MATRIX if "/" not in name]
    vllm = dict.fromkeys(name.removesuffix("-v0") for name in names if not name.startswith("lmcache-"))
    lmcache = [name.removeprefix("lmcache-") for name in names if name.startswith("lmcache-")]
    sglang = [name.removeprefix("sglang-") for name in SGLANG]
    examined = {product: [*contract.examined] for product, contract in CONTRACTS.items()}
    examined["vllm"] = [name for name in examined["vllm"] if name not in NOT_OBSERVED]
    assert {"vllm": [*vllm], "lmcache": lmcache, "sglang": sglang} == examined


def test_every_release_that_a_fault_is_run_or_proved_in_is_in_the_matrix_and_has_it(scripts: None) -> None:
    import expectations
    from releases import MATRIX

    for fault in FAULTS:
        runs = {release for run in fault.runs for release in run.releases}
        proofs = {proof.release for proof in fault.proofs.values()}
        named = runs | proofs | {name for row in fault.scenarios for name in row.releases}
        assert named <= set(MATRIX)
        assert all(expectations.has(fault, name) for name in named)


def test_every_scenario_of_a_fault_exists() -> None:
    pytest.importorskip("vllm")
    from tests.scenarios import corpus, lmcache
    from tests.scenarios.v0 import audit as v0

    of_v1, of_lmcache, of_v0 = set(corpus.SCENARIOS), set(lmcache.SCENARIOS), set(v0.SCENARIOS)
    for fault in FAULTS:
        for row in fault.scenarios:
            of_product = of_lmcache if fault.product == "lmcache" or "lmcache" in fault.conditions else of_v1
            scenarios = of_v0 if "v0" in fault.conditions else of_product
            for name in row.names:
                only = row.__class__(names=(name,))
                assert any(map(only.drive, scenarios)), f"{fault.id}: {name}"
            assert set(row.settled) <= scenarios


def test_every_fault_with_runs_has_a_probe(scripts: None) -> None:
    import findings

    assert set(findings.with_runs()) == set(findings.PROBES) | set(findings.SHARED)


def test_every_proof_has_a_history() -> None:
    from tests.repro.faults import FAULTS as histories

    assert {name for fault in FAULTS for name in fault.proofs} == set(histories)


def test_the_matrix_expects_what_the_files_say(scripts: None) -> None:
    import expectations as expected

    assert {"tokens/in-flight"} == expected.ids("reset_running_async", "0.20.0")
    assert set() == expected.ids("reset_running_async", "0.22.1")
    assert {"tokens/stale-lookup"} == expected.ids("crowd_sync", "0.9.1-v0")
    assert expected.excused("session_async_speculative", "0.18.1")
    assert not expected.excused("session_async_speculative", "0.32.0")
    assert {"metrics/session-chunk-missing"} == expected.drifts_due("session_sync", "0.20.0")
    assert set() == expected.drifts_due("session_sync", "0.19.1")


@pytest.mark.parametrize("name", ["findings", "detection"])
def test_a_page_of_faults_is_up_to_date(scripts: None, name: str) -> None:
    import findings
    import matrix

    page = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
    again: dict[str, Any] = {
        "findings": lambda: findings.page(findings.figures_on(page)),
        "detection": lambda: matrix.page(*matrix.tables(page)),
    }
    script = "findings" if name == "findings" else "matrix"
    assert page == again[name](), f".venv/bin/python scripts/{script}.py --text"
