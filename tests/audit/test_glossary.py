"""The glossary: complete entries, unique spellings, and a generated page that is up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvledger.audit.errors import LedgerError
from kvledger.audit.glossary import SECTIONS, TERMS, Term, explain, term
from kvledger.exporters.reports.faults import explanation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", TERMS.values(), ids=TERMS)
def test_every_term_has_a_meaning_and_an_example(row: Term) -> None:
    assert row.meaning.endswith(".")
    assert row.meaning.count(". ") <= 1, "one or two sentences"
    assert row.example
    assert 80 >= max(map(len, explain(row).splitlines()))


def test_no_two_terms_share_a_spelling() -> None:
    spellings = [
        spelling for rows in SECTIONS.values() for row in rows for spelling in (row.name, *row.aliases)
    ]

    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize("text", ["repeat hit", "Repeat-Hit", "hit_again", "hit again"])
def test_a_term_is_found_by_name_or_alias(text: str) -> None:
    assert TERMS["repeat hit"] is term(text)


def test_explanation_prints_a_term() -> None:
    assert explanation("admission").startswith("admission (term)\n\nThe scheduler takes a waiting request")


def test_explanation_prints_the_invariant_where_a_term_has_the_same_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvledger.audit.glossary.term", lambda name: TERMS["life"])

    assert explanation("tokens/negative").startswith("tokens/negative (violation)")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("admision", "did you mean admission"), ("token/negativ", "did you mean tokens/negative")],
)
def test_a_mistyped_name_suggests_the_closest_name(name: str, suggestion: str) -> None:
    with pytest.raises(LedgerError, match=suggestion):
        explanation(name)


def test_a_name_without_a_close_match_suggests_nothing() -> None:
    with pytest.raises(LedgerError, match=r"no invariant, term, fault or figure is called 'zzzzz'$"):
        explanation("zzzzz")
