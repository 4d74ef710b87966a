"""Engine-reported prompt figures that are another engine's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engines.observed import audited, findings, observe
from tests.scenarios.driving import Driver, start

from kvledger.audit import events as ev

REMOTE_CACHED = 32


def decode_after_prefill(attach: Any, *, transfer: dict[str, Any] | None) -> Driver:
    """A request whose engine reports the cached tokens of the prefill engine, as vLLM#46898 proposes."""
    driver = start(attach)
    request = driver.add("r", 100, 3, transfer=transfer)
    take = request.take_prefill_stats

    def replaced() -> Any:
        figures = take()
        if figures is not None:
            figures.num_cached_tokens = figures.num_local_cached_tokens = REMOTE_CACHED
        return figures

    request.take_prefill_stats = replaced
    driver.run()
    return driver


def test_figures_of_the_prefill_engine_are_not_compared_with_this_engine() -> None:
    transfer = {"remote_num_cached_tokens": REMOTE_CACHED}
    _, events = observe(decode_after_prefill, transfer=transfer)

    assert [] == [event for event in events if isinstance(event, ev.Reported)]
    assert set() == findings(audited(events))


def test_wrong_figures_of_this_engine_are_found() -> None:
    _, events = observe(decode_after_prefill, transfer=None)

    assert {("tokens/set-once", "r")} <= findings(audited(events))
