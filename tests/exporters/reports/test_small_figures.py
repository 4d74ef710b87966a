"""Seconds in tables have their unit, and no figure has an exponent."""

from __future__ import annotations

import pytest
from tests.exporters.reports.printed import text

from kvledger.audit.analysis.block_states import BlockUse
from kvledger.audit.analysis.step_model import Coefficient, StepModel
from kvledger.exporters.answer import written
from kvledger.exporters.reports import block_use, query
from kvledger.exporters.reports.costs import model_text, queued_sentence


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.000 s"),
        (4e-05, "0.04 ms"),
        (4.2e-08, "0.000042 ms"),
        (0.0996, "100 ms"),
        (0.1, "0.100 s"),
        (12.3456, "12.346 s"),
        (1234.56, "1,234.6 s"),
        (None, "-"),
    ],
)
def test_seconds_have_a_unit_and_no_exponent(seconds: float | None, shown: str) -> None:
    assert shown == written(seconds, "s")


def test_the_time_in_the_queue_is_printed_by_cause_longest_first() -> None:
    spent = {"queued_next_step": 10_000, "queued_budget": 30_000, "queued_blocks": 0}
    assert "Queued: 40.0 ms, 30.0 ms budget and 10.0 ms next step." == queued_sentence(spent)
    assert "Queued, mean: 20.0 ms, 15.0 ms budget and 5.0 ms next step." == queued_sentence(spent, 2)


def test_a_model_a_query_and_a_distribution_print_plain_decimals() -> None:
    model = StepModel(
        refused="",
        observations=9,
        absolute_error_seconds=4e-09,
        coefficients={"constant": Coefficient(4e-08, 0.0)},
    )
    assert "0.00004 ms a step" in model_text(model)
    assert "(0.000004 ms)" in model_text(model)

    answered = query.Answered(columns=["small", "large"], rows=[[4e-05, 1234567.0]])
    assert ["0.00004", "1,234,570"] == text(query.answer(answered)).split()[-2:]

    use = BlockUse()
    use.idle.add(99.7)
    use.reuse_seconds.add(4e-05)
    cells = [cell for row in block_use.spreads(block_use.as_report(use)).cells() for cell in row]
    assert not any("e-" in cell or "e+" in cell for cell in cells[1:4] + cells[5:])
