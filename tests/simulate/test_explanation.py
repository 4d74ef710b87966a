"""What is changed between two recordings, in which order, and which rules are candidates."""

from __future__ import annotations

from typing import Any

import pytest

from kvledger.audit.events import Setting
from kvledger.audit.simulate.explanation import ORDER, SettingChange, effective, way
from kvledger.audit.traffic.reader import Traffic

OLD: dict[str, Setting] = {"blocks": 40, "max_running": 8, "groups": 1}
"""What 0.18.1 records."""
NEW: dict[str, Setting] = OLD | {"scheduler_reserve_full_isl": True, "watermark": 0.0}
"""What 0.32.0 records."""


def traffic(version: str, configuration: dict[str, Setting], *groups: str) -> Traffic:
    kinds = list(groups or ("full",))
    return Traffic(version, configuration, [], [], [], kinds, [16] * len(kinds), 16, [])


def changed(before: Traffic, after: Traffic) -> tuple[list[str], list[str], list[str]]:
    """What is changed on the first release, on the second one, and with the traffic."""
    found = way(before, after)
    return (
        [each.words for each in found.first],
        [each.words for each in found.then],
        [each.words for each in found.together],
    )


def test_equal_settings_are_not_changed() -> None:
    assert ([], [], []) == changed(traffic("0.32.0", NEW), traffic("0.32.0", NEW))


def test_settings_are_changed_in_a_fixed_order() -> None:
    after = traffic("0.32.0", NEW | {"watermark": 0.1, "max_running": 4, "blocks": 20})

    _, then, _ = changed(traffic("0.32.0", NEW), after)

    assert ["num_gpu_blocks 40 -> 20", "max_num_seqs 8 -> 4", "watermark 0.0 -> 0.1"] == then
    assert sorted(then, key=lambda words: ORDER.index(words.split()[0])) == then


def test_a_rule_with_a_switch_is_held_off_while_the_release_changes() -> None:
    found = way(traffic("0.18.1", OLD), traffic("0.32.0", NEW))

    switch = SettingChange("scheduler_reserve_full_isl", False, True)
    assert ([], [switch]) == (found.first, found.then)
    assert (("scheduler_reserve_full_isl", False),) == found.held


def test_a_rule_is_turned_on_before_other_settings_are_changed() -> None:
    after = traffic("0.32.0", NEW | {"blocks": 20})

    assert ["scheduler_reserve_full_isl False -> True", "num_gpu_blocks 40 -> 20"] == changed(
        traffic("0.18.1", OLD), after
    )[1]


def test_a_rule_that_the_later_release_lacks_is_turned_off_before_the_release_changes() -> None:
    found = way(traffic("0.32.0", NEW | {"watermark": 0.1}), traffic("0.18.1", OLD))

    assert ["scheduler_reserve_full_isl True -> False", "watermark 0.1 -> 0.0"] == [
        each.words for each in found.first
    ]
    assert [] == found.then
    assert dict(found.held) == {"scheduler_reserve_full_isl": False, "watermark": 0.0}


def test_a_journal_that_lacks_a_switch_has_the_default_of_a_release_with_the_rule() -> None:
    assert effective(traffic("0.24.0", OLD), "scheduler_reserve_full_isl") is True
    assert effective(traffic("0.18.1", OLD), "scheduler_reserve_full_isl") is False


def test_a_switch_of_hybrid_models_is_not_changed_for_a_model_with_one_group() -> None:
    name = "prefix_cache_retention_interval"
    before, after = traffic("0.29.0", NEW | {name: None}), traffic("0.32.0", NEW | {name: 0})
    assert ([], [], []) == changed(before, after)

    several = {"groups": 2}
    before = traffic("0.29.0", NEW | several | {name: None}, "full", "sliding")
    after = traffic("0.32.0", NEW | several | {name: 0}, "full", "sliding")
    found = way(before, after)
    assert [f"{name} None -> 0"] == [each.words for each in found.then]
    assert ((name, None),) == found.held


def test_what_drafts_and_connectors_answered_comes_with_the_traffic() -> None:
    after = traffic("0.32.0", NEW | {"drafts": 3, "connector": "NixlConnector"}, "full", "sliding")

    first, then, together = changed(traffic("0.32.0", NEW), after)

    assert ([], []) == (first, then)
    assert ["drafts None -> 3", "connector None -> NixlConnector", "groups full -> full+sliding"] == together


@pytest.mark.parametrize("name", ORDER)
def test_every_setting_that_is_changed_can_be_simulated(name: str) -> None:
    from kvledger.audit.simulate.settings import parsed

    value: dict[str, Any] = {"scheduling_policy": "priority"}
    assert name == parsed(f"{name}={value.get(name, 1)}")[0]
