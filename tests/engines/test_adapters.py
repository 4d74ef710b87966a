"""An adapter is chosen by the host's signatures; a host that fits none is refused with the difference."""

from __future__ import annotations

from typing import Any

import pytest
from tests.engines.stand_ins import stand_in

from kvledger.audit import engines
from kvledger.audit.checks.registry import catalogue
from kvledger.audit.engines import ADAPTERS, Adapter, choose
from kvledger.audit.engines.v0.observer import V0Observer
from kvledger.audit.engines.v1_since_0_27 import V1Observer
from kvledger.audit.engines.v1_until_0_26 import V1Observer017, V1Observer018, V1Observer020, V1Observer026
from kvledger.audit.hooks import EngineMismatch
from kvledger.audit.release_semantics import MEANINGS, V0, limits, meanings, release

RELEASES = {
    V1Observer: ("0.27.1", "0.30.0", "0.32.0", "0.33.0"),
    V1Observer026: ("0.26.0",),
    V1Observer020: ("0.20.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1"),
    V1Observer018: ("0.18.1", "0.19.1"),
    V1Observer017: ("0.17.0",),
}


@pytest.fixture(autouse=True)
def no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the installed vLLM's outputs have none of the fields that adapters read."""
    _set_output_fields(monkeypatch)


def _set_output_fields(monkeypatch: pytest.MonkeyPatch, *fields: str) -> None:
    monkeypatch.setattr(engines, "output_fields", lambda: fields)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.NAME)
def test_each_adapter_is_chosen_by_its_own_signatures(
    adapter: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_output_fields(monkeypatch, *getattr(adapter, "OUTPUT", ()))

    assert adapter is choose(stand_in(adapter))


def test_output_fields_distinguish_0_19_from_0_20(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their schedulers have the same signatures."""
    scheduler = stand_in(V1Observer018)
    _set_output_fields(monkeypatch, "num_cached_tokens", "num_external_computed_tokens")
    assert V1Observer018 is choose(scheduler)
    _set_output_fields(monkeypatch, "prefill_stats")
    assert V1Observer020 is choose(scheduler)


def test_additional_methods_and_fields_are_no_mismatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = stand_in(V1Observer)
    scheduler.novelty = lambda surprise: None
    _set_output_fields(monkeypatch, "prefill_stats", "novelty")

    assert V1Observer is choose(scheduler)


def test_an_optional_method_may_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler: Any = stand_in(V1Observer)
    del type(scheduler)._handle_failed_recving
    del scheduler.connector
    _set_output_fields(monkeypatch, "prefill_stats")

    assert V1Observer is choose(scheduler)


def test_an_unknown_host_is_refused_with_the_difference_to_the_nearest_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler: Any = stand_in(V1Observer)
    type(scheduler).schedule = lambda self, surprise: None
    with pytest.raises(EngineMismatch) as refused:
        choose(scheduler)

    assert (
        "kvledger observes vLLM 0.17 to 0.33, and the v0 scheduler of 0.9; "
        "Scheduler is not as v1-0.27, the nearest adapter, expects: "
        "schedule takes (surprise), not (throttle_prefills)"
    ) == str(refused.value)


def test_a_refusal_names_a_missing_output_field(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineMismatch, match="EngineCoreOutput has no prefill_stats"):
        choose(stand_in(V1Observer))


# --- what figures mean ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter", "version"),
    [(adapter, version) for adapter, versions in RELEASES.items() for version in versions],
)
def test_release_semantics_agree_with_the_adapter(adapter: type[V1Observer], version: str) -> None:
    assert adapter.FIGURES == meanings(version)["prompt figures"].word


EARLIER = ("0.9.2.post2", "0.10.2.post2", "0.11.2", "0.12.0.post2", "0.15.1", "0.16.0")
"""Releases that are no longer observed; journals of them are still read."""


@pytest.mark.parametrize(
    "version", [*EARLIER, *(version for versions in RELEASES.values() for version in versions)]
)
def test_each_figure_has_one_meaning_in_a_release(version: str) -> None:
    number = release(version)
    rows = [r.figure for r in MEANINGS if r.since <= number and (r.until is None or number < r.until)]

    assert len(rows) == len(set(rows))


def test_only_invariants_of_the_catalogue_are_limited() -> None:
    named = {name for row in (*MEANINGS, *V0) for name in (*row.unchecked, *row.in_part)}

    assert named <= set(catalogue())


def test_the_newest_release_has_no_limits() -> None:
    assert ({}, {}) == limits(meanings("0.33.0"))


def test_an_unchecked_invariant_is_not_checked_in_part() -> None:
    unchecked, in_part = limits(meanings("0.10.2.post2"))

    assert "tokens/lookup-counted-once" in unchecked
    assert set() == set(unchecked) & set(in_part)


def test_a_v0_scheduler_gets_the_v0_adapter() -> None:
    assert V0Observer is choose(stand_in(V0Observer))
