"""The files of the releases' rules: each is valid, and names what exists."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvledger.audit.engines.configuration import SCHEDULER
from kvledger.audit.faults.catalogue import ReleaseRule, begun, by_switch, release_rules
from kvledger.audit.faults.catalogue import read_rules as read
from kvledger.audit.faults.conditions import CONDITIONS
from kvledger.audit.release_semantics import CONTRACTS
from kvledger.audit.simulate.study import NAMES

RULES = release_rules()
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@each_rule
def test_a_rule_is_described_in_whole_sentences(rule: ReleaseRule) -> None:
    assert not rule.title.endswith(".")
    assert rule.title[0].islower()
    assert rule.says
    assert all(re.fullmatch(r"[A-Z`].*[.]", sentence) for sentence in rule.says)
    assert rule.where


@each_rule
def test_a_rule_names_releases_conditions_settings_and_sources_that_exist(rule: ReleaseRule) -> None:
    spans = rule.releases
    assert {spans.first, spans.last, spans.fixed, *spans.also} - {""} <= set(CONTRACTS["vllm"].examined)
    assert set(rule.conditions) <= set(CONDITIONS)
    assert set(rule.settings) <= {*NAMES, *SCHEDULER}
    assert rule.settings and rule.links
    assert all(re.fullmatch(r"vLLM#\d+", name) for name, _ in rule.named_links)


@each_rule
def test_a_switch_is_a_setting_of_the_rule_whose_default_turns_it_on(rule: ReleaseRule) -> None:
    if rule.switch is not None:
        assert rule.switch.setting in rule.settings
        assert rule.switch.default != rule.switch.off
        assert rule is by_switch()[rule.switch.setting]


def test_the_rules_that_begin_between_two_releases() -> None:
    one_group = {"groups": 1, "connector": None}
    assert ["uncached-blocks-evicted-first"] == [rule.id for rule in begun("0.23.0", "0.24.0", one_group)]
    assert [] == begun("0.24.0", "0.23.0", one_group)
    assert ["whole-prompt-must-fit"] == [rule.id for rule in begun("0.18.1", "0.19.1", one_group)]


def test_settings_rule_out_rules() -> None:
    hybrid = [rule.id for rule in begun("0.22.1", "0.23.0", {"groups": 2, "connector": None})]
    assert ["window-scratch-evicted-first"] == hybrid
    assert [] == begun("0.22.1", "0.23.0", {"groups": 1, "connector": None})


def test_a_build_of_a_release_has_its_rules() -> None:
    assert RULES["uncached-blocks-evicted-first"].holds_in("0.24.0+cpu")
    assert not RULES["uncached-blocks-evicted-first"].holds_in("0.23.1rc1")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [({"titel": "x"}, "unknown field `titel`"), ({"says": "x"}, "`array`"), ({"switch": {}}, "`setting`")],
)
def test_a_file_with_a_mistake_is_not_read(change: dict[str, object], wrong: str) -> None:
    right = {
        "title": "x",
        "says": ["X."],
        "where": "`f`",
        "releases": {"first": "0.9.1"},
        "settings": ["block_size"],
        "links": [],
    }
    assert "x" == read(msgspec.json.encode(right)).title
    with pytest.raises(msgspec.ValidationError, match=wrong):
        read(msgspec.json.encode(right | change))
