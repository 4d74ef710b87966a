"""Every cause has a description, and unknown causes of newer engines are still readable."""

from __future__ import annotations

import pytest

from kvledger.audit import causes


@pytest.mark.parametrize("cause", sorted({*causes.REWORK, *causes.DISCARDS, *causes.PREEMPTIONS}))
def test_every_loss_has_a_description(cause: str) -> None:
    assert causes.LOSSES[cause] == causes.loss(cause)


@pytest.mark.parametrize("cause", sorted(causes.EXTERNAL_LOSS_AT_END.values()))
def test_every_external_loss_at_the_end_of_a_life_has_a_description(cause: str) -> None:
    assert causes.EXTERNAL_LOSSES[cause] == causes.external_loss(cause)


def test_every_end_of_a_life_has_a_loss_for_pending_external_tokens() -> None:
    assert {*causes.DISCARDS, causes.LOST} == causes.EXTERNAL_LOSS_AT_END.keys()


def test_a_cause_without_a_description_is_printed_as_it_is() -> None:
    assert "moved away" == causes.loss("moved_away")
    assert "moved away" == causes.external_loss("moved_away")
