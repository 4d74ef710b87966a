"""The catalogue of invariants: complete, tested from both sides, with a page that is up to date."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvledger.audit.checks.registry import FAMILIES, catalogue, explain, invariant
from kvledger.audit.errors import LedgerError

ROOT = Path(__file__).parents[3]
ALL = list(catalogue().values())
IDS = [row.id for row in ALL]


def marked_ids(marker: str) -> set[str]:
    """The invariant ids in the ``@<marker>("id")`` decorators of the tests in this folder."""
    ids: set[str] = set()
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                ids |= {
                    str(call.args[0].value)
                    for call in node.decorator_list
                    if isinstance(call, ast.Call)
                    and isinstance(call.func, ast.Name)
                    and call.func.id == marker
                    and isinstance(call.args[0], ast.Constant)
                }
    return ids


@pytest.mark.parametrize("marker", ["violates", "near_miss"])
def test_every_invariant_has_a_violation_and_a_near_miss(marker: str):
    assert set(IDS) == marked_ids(marker)


@pytest.mark.parametrize("row", ALL, ids=IDS)
def test_every_invariant_defines_what_must_hold_and_what_only_looks_violated(row):
    assert row.must_hold.endswith(".")
    assert row.violated_when
    assert row.near_misses
    assert row.on
    assert row.family in FAMILIES
    assert all(url.startswith("https://github.com/") for _, url in row.references)


def test_an_explanation_has_the_rule_its_violation_and_its_references():
    assert explain("tokens/source-sum").startswith(
        "tokens/source-sum (violation)\n\n"
        "Local, external and computed tokens sum to the prompt.\n\n"
        "Violated when the three were not taken together,"
    )
    assert "https://github.com/vllm-project/vllm/pull/36752" in explain("tokens/source-sum")


@pytest.mark.parametrize("row", ALL, ids=IDS)
def test_an_explanation_fits_a_terminal(row):
    assert 100 >= max(map(len, explain(row.id).splitlines()))


def test_an_unknown_id_suggests_the_closest():
    with pytest.raises(LedgerError, match="did you mean tokens/negative"):
        explain("token/negativ")


def test_an_id_without_a_close_match_suggests_nothing():
    with pytest.raises(LedgerError, match=r"no invariant is called 'zzz'$"):
        explain("zzz")


def test_two_invariants_never_share_an_id():
    with pytest.raises(AssertionError, match="two invariants"):
        invariant("tokens/negative", on=(), message="")(ALL[0].check)
