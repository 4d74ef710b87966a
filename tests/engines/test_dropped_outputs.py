"""Which outputs in flight an engine up to 0.26 dropped: told by whether the request's outputs grew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvledger.audit.engines.v1_until_0_26 import Lives020


class Outputs:
    """A request in flight when a reset preempted it, and the observer's part for the ends of lives."""

    def __init__(self) -> None:
        self.request = SimpleNamespace(request_id="r", num_output_tokens=0, num_tokens=8)
        scheduler = SimpleNamespace(requests={"r": self.request})
        unused: Any = SimpleNamespace()
        observer: Any = SimpleNamespace(scheduler=scheduler, log=unused, step=1)
        self.lives = Lives020(observer, unused, unused, unused, unused)
        self.lives.draining.add("r")
        self.stale = self.lives.stale({"r": 1})
        self.lives.output = 0, None, [1]

    def dropped(self) -> list[str]:
        return self.lives.dropped(self.stale)


@pytest.mark.parametrize("delivered", [0, 1])
def test_an_output_that_adds_no_token_was_dropped(delivered):
    outputs = Outputs()
    outputs.request.num_output_tokens += delivered

    assert ([] if delivered else ["r"]) == outputs.dropped()


def test_an_output_that_ends_a_turn_was_delivered():
    """The next chunk was there already, and the engine moves the outputs into the prompt."""
    outputs = Outputs()
    outputs.lives.session_extends(outputs.request)

    assert [] == outputs.dropped()


def test_a_chunk_that_came_between_two_outputs_says_nothing_of_the_next_one():
    outputs = Outputs()
    outputs.lives.output = None
    outputs.lives.session_extends(outputs.request)

    assert ["r"] == outputs.dropped()
