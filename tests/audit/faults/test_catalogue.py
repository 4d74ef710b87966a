"""The files of known faults: each is valid, and names what exists."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvledger.audit.checks.registry import catalogue as invariants
from kvledger.audit.faults.catalogue import HARMS, Fault, catalogue, known, read, short_name
from kvledger.audit.faults.conditions import CONDITIONS, traits
from kvledger.audit.release_semantics import CONTRACTS, Product, limits, meanings, release

FAULTS = catalogue().values()
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=catalogue())


@each_fault
def test_a_fault_is_described_in_whole_sentences(fault: Fault) -> None:
    assert not fault.title.endswith(".")
    assert fault.title[0].islower()
    assert all(re.fullmatch(r"(vLLM|[A-Z`]).*[.]", sentence) for sentence in fault.says)


@each_fault
def test_a_fault_names_conditions_harms_and_invariants_that_exist(fault: Fault) -> None:
    named = {id for row in (*fault.scenarios, *fault.runs) for id in row.findings or ()}
    named |= {proof.finding for proof in fault.proofs.values()}
    assert named <= set(fault.findings) <= set(invariants())
    assert set(fault.conditions) <= set(CONDITIONS)
    assert fault.harms in HARMS


@each_fault
def test_the_releases_of_a_fault_were_examined_or_their_sources_read(fault: Fault) -> None:
    spans = fault.releases
    named = {spans.first, spans.last, spans.fixed, *spans.also} - {""}
    assert set(spans.read) == named - set(CONTRACTS[fault.product].examined)
    assert not spans.last or release(spans.first) <= release(spans.last)
    assert not spans.fixed or release(spans.last) < release(spans.fixed)
    assert bool(spans.last) or not spans.fixed


@each_fault
def test_a_drift_is_found_by_drifts_alone(fault: Fault) -> None:
    drifts = {id for id in fault.findings if invariants()[id].severity == "drift"}
    assert (set(fault.findings) if fault.kind == "drift" else set()) == drifts


@each_fault
def test_a_finding_with_the_conditions_of_a_fault_is_explained_by_a_fault_of_that_release(
    fault: Fault,
) -> None:
    for finding in fault.findings:
        found = known(finding, fault.releases.first, traits(fault.conditions), _engine(fault))
        assert found is not None
        assert traits(found.conditions) == traits(fault.conditions)
        if fault.releases.fixed and fault.product == "vllm":
            assert known(finding, fault.releases.fixed, traits(fault.conditions)) is not fault


def _engine(fault: Fault) -> Product:
    """The engine that shows the fault: that of vLLM, for one of LMCache."""
    return "sglang" if fault.product == "sglang" else "vllm"


def test_a_fault_of_one_engine_explains_nothing_of_the_other() -> None:
    for fault in FAULTS:
        other: Product = "vllm" if _engine(fault) == "sglang" else "sglang"
        for finding in fault.findings:
            assert known(finding, fault.releases.first, traits(fault.conditions), other) is not fault


def test_a_finding_that_no_fault_explains_is_not_known() -> None:
    assert known("tokens/in-flight", "0.32.0", {"connector"}) is None
    assert known("blocks/leak", "0.32.0", {"async", "failed load"}) is None


def test_every_drift_of_a_figure_is_in_the_catalogue() -> None:
    figures = {id for id, row in invariants().items() if row.family == "metrics"}
    assert figures <= {id for fault in FAULTS for id in fault.findings}


@each_fault
def test_no_fault_is_found_in_a_release_where_its_invariants_cannot_be_checked(fault: Fault) -> None:
    """The table of meanings says where they can't be, the catalogue where they find something."""
    if fault.product == "vllm" and fault.findings:
        for version in (fault.releases.first, *fault.releases.also):
            unchecked, _ = limits(meanings(version, "v0" if "v0" in fault.conditions else ""))
            assert set(fault.findings) - set(unchecked), version


def test_a_link_has_the_short_name_of_its_project() -> None:
    assert "vLLM#36752" == short_name("https://github.com/vllm-project/vllm/pull/36752")
    assert all(re.fullmatch(r"(vLLM|LMCache|SGLang)#\d+", name) for f in FAULTS for name, _ in f.named_links)


@pytest.mark.parametrize(
    ("change", "wrong"),
    [({"titel": "x"}, "unknown field `titel`"), ({"kind": "bug"}, "'bug'"), ({"says": "x"}, "`array`")],
)
def test_a_file_with_a_mistake_is_not_read(change: dict[str, object], wrong: str) -> None:
    right = {"title": "x", "says": ["X."], "harms": "output", "releases": {"first": "0.9.1"}}
    assert "x" == read(msgspec.json.encode(right)).title
    with pytest.raises(msgspec.ValidationError, match=wrong):
        read(msgspec.json.encode(right | change))
