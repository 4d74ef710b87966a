"""What a trainer asks of an observed engine, and tells it: suspect tokens, and that weights changed."""

from __future__ import annotations

from typing import Any

from ..engines.weights_watch import mark_weights
from ..ledger.account import Account
from ..ledger.weights import Weights, WeightsUsed, weights_used

__all__ = ["WeightsOfRequest", "mark_weights", "weights_of_request"]


class WeightsOfRequest(WeightsUsed, frozen=True):
    """Under which weights the tokens of one request were computed, also as NumPy masks."""

    def suspect_mask(self) -> Any:
        """A NumPy array of booleans, one for each output token: whether it is suspect."""
        return _mask(self.suspect, self.output_tokens)

    def unknown_mask(self) -> Any:
        """The same, for the output tokens of which it is not known."""
        return _mask(self.unknown, self.output_tokens)


def weights_of_request(weights: Weights, account: Account) -> WeightsOfRequest:
    """Under which weights the tokens of a request were computed; of a session, those of its present turn."""
    used = weights_used(weights, account)
    return WeightsOfRequest(**{name: getattr(used, name) for name in used.__struct_fields__})


def _mask(ranges: list[tuple[int, int]], length: int) -> Any:
    import numpy

    mask: Any = numpy.zeros(length, dtype=bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask
