"""`kvledger conformance` with a short name: what it drives, and what it says of what it can't."""

from __future__ import annotations

import pytest

from kvledger.audit.conformance import connector_classes
from kvledger.audit.conformance.connector_classes import RECIPES, Recipe, find_connector
from kvledger.audit.conformance.scorecard import ScoreCard, SituationResult
from kvledger.audit.errors import LedgerError
from kvledger.exporters.reports.conformance import answer
from kvledger.exporters.writers import markdown

pytest.importorskip("vllm")


@pytest.mark.parametrize("name", ["example", "offloading"])
def test_a_recipe_names_the_connector_and_its_options(name: str) -> None:
    found = find_connector(name, None, None)

    assert RECIPES[name].connector == found.name
    assert found.options  # a folder, or a spec that needs no GPU


def test_options_of_the_caller_replace_those_of_the_recipe() -> None:
    assert {"spec_name": "Other"} == find_connector("offloading", None, {"spec_name": "Other"}).options


def test_a_recipe_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Recipe("LMCacheConnectorV1", "no_such_package", limits="Kernels are not reached.")
    monkeypatch.setattr(connector_classes, "RECIPES", {"lmcache": missing})

    with pytest.raises(LedgerError, match=r"needs no_such_package, .* No module named .* Kernels are not"):
        find_connector("lmcache", None, None)


def test_every_recipe_says_what_it_does_not_reach() -> None:
    assert [] == [name for name, recipe in RECIPES.items() if not recipe.limits]


def card(external: int, limits: str = "") -> str:
    row = SituationResult("hit on the whole prompt", "sync", "not reached", external, external, [])
    return markdown(answer(ScoreCard("Some", "vllm", "read", [row], limits=limits)))


def test_a_card_without_any_load_says_why() -> None:
    assert "1 not reached: the connector loaded no token in any situation." in " ".join(card(0).split())
    assert "loaded no token" not in card(96)
    assert "Kernels are not reached." in card(96, "Kernels are not reached.")
