"""The time to first output in one sentence, with its causes, longest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ...audit.causes import FIRST_TOKEN
from .terminal import counted, listed


def sentence(microseconds: Mapping[str, int], requests: int) -> str:
    """Of one request, or the mean of several. ``microseconds``: by cause, the sum of all requests."""
    total = sum(microseconds.values())
    begin = (
        "Time to first token"
        if requests == 1
        else f"Time to first token of {counted(requests, 'request')}, mean"
    )
    parts = list(_parts(microseconds, requests))
    return f"{begin}: {_seconds(total, requests)}" + (f", {listed(parts)}." if parts else ".")


def _parts(microseconds: Mapping[str, int], requests: int) -> Iterator[str]:
    for cause in sorted(FIRST_TOKEN, key=lambda cause: -microseconds.get(cause, 0)):
        if spent := microseconds.get(cause, 0):
            yield f"{_seconds(spent, requests)} {cause.replace('_', ' ')}"


def _seconds(microseconds: int, requests: int) -> str:
    """``1.20 s`` or ``34.5 ms``."""
    milliseconds = microseconds / requests / 1e3
    return f"{milliseconds / 1e3:,.2f} s" if milliseconds >= 1000 else f"{milliseconds:.1f} ms"
