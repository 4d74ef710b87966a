"""Which releases have a fault, and under which settings."""

from __future__ import annotations

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.faults.catalogue import Affected, Fault, catalogue, checked, of_all, of_release
from kvledger.audit.faults.conditions import sentence, unmet
from kvledger.audit.release_semantics import CONTRACTS

SPAN = Affected(first="0.17.0", last="0.20.0", fixed="0.24.0")


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.12.0", "free"),
        ("0.13.0", "may have"),
        ("0.17.0", "has"),
        ("0.18.0", "has"),
        ("0.20.0", "has"),
        ("0.20.2", "may have"),
        ("0.22.1", "may have"),
        ("0.24.0", "free"),
        ("0.33.0", "free"),
    ],
)
def test_a_release_between_one_with_and_one_without_the_fault_may_have_it(version: str, state: str) -> None:
    assert state == SPAN.state("vllm", version)


def test_a_fault_without_a_last_release_is_in_the_newest() -> None:
    assert "has" == Affected(first="0.30.0").state("vllm", "0.33.0")


def test_a_first_release_whose_source_was_read_has_no_doubt_before_it() -> None:
    assert "free" == Affected(first="0.16.0", read=("0.16.0",)).state("vllm", "0.15.0")


def test_a_suffix_of_a_release_makes_no_difference() -> None:
    assert "has" == SPAN.state("vllm", "0.17.0.post2+cpu")


@pytest.mark.parametrize(
    ("version", "state"),
    [("0.5.3", "free"), ("0.5.3.post2", "may have"), ("0.5.3.post3", "has"), ("0.5.4", "may have")],
)
def test_a_post_release_of_sglang_is_a_release_of_its_own(version: str, state: str) -> None:
    assert state == catalogue()["retraction-loses-a-slot"].releases.state("sglang", version)


@pytest.mark.parametrize("fault", catalogue().values(), ids=catalogue())
def test_every_examined_release_has_the_fault_or_not(fault: Fault) -> None:
    states = [fault.releases.state(fault.product, each) for each in CONTRACTS[fault.product].examined]
    assert "has" in states
    assert "may have" not in states


@pytest.mark.parametrize("version", ["", "abc", "18", "v0.18.1", "0.18.", "0.18.1 "])
def test_what_is_no_release_is_one_sentence_with_an_example(version: str) -> None:
    with pytest.raises(LedgerError, match=r"is no release of vLLM; write it as in 0\.33\.0$"):
        checked("vllm", version)


@pytest.mark.parametrize("version", ["0.8.5", "0.34.0", "1.0.0"])
def test_nothing_is_known_of_a_release_outside_the_examined_range(version: str) -> None:
    with pytest.raises(LedgerError, match=rf"^Nothing is known of vLLM {version}: .* 0.9.1 to 0.33.0"):
        checked("vllm", version)


def test_a_release_between_two_examined_ones_says_so() -> None:
    found = of_release("vllm", "0.25.0")

    assert "itself was not examined" in found.says
    maybe = [row.id for row in found.faults if row.state == "may have"]
    assert ["paused-sessions-keep-every-place", "padding-as-drafts"] == maybe


def test_the_worst_faults_come_first_and_drifts_last() -> None:
    rows = of_all("vllm").faults

    assert "output" == rows[0].harms
    assert ["fault", "drift"] == list(dict.fromkeys(row.kind for row in rows))


def test_settings_rule_faults_out_and_shorten_their_conditions() -> None:
    words = ("async", "drafts", "session")

    assert list(words) == unmet(words, {})
    assert ["session"] == unmet(words, {"asynchronous": True, "drafts": 3})
    assert unmet(words, {"asynchronous": False}) is None
    assert "if a client streams its input in chunks (a session)" == sentence(["session"])


@pytest.mark.parametrize(
    ("connector", "left"),
    [(None, None), ("NixlConnector", None), ("LMCacheConnectorV1", []), ("MultiConnector", ["lmcache"])],
)
def test_a_multi_connector_may_contain_the_connector_of_a_fault(
    connector: str | None, left: list[str] | None
) -> None:
    assert left == unmet(["lmcache"], {"connector": connector})


def test_without_a_connector_no_load_fails() -> None:
    assert unmet(["failed load"], {"connector": None}) is None
    assert ["failed load"] == unmet(["failed load"], {"connector": "NixlConnector"})


def test_the_bundled_adapter_needs_lmcache_before_0_4() -> None:
    words = ["lmcache", "bundled adapter"]

    assert words == unmet(words, {"lmcache": "0.3.11"})
    assert unmet(words, {"lmcache": "0.5.6"}) is None
    assert unmet(words, {"lmcache": None}) is None
