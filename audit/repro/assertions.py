"""Which figure of the engine shows a finding, and what is right.

A reproduction asserts a figure that vLLM's own objects have, so a finding needs a :class:`Claim`: a probe,
the figure that the audit says it must read, and the right one. Findings that need a worker, KV contents or
real time have none, and :func:`refusal` says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ..checks.registry import Violation
from ..ledger.account import Account
from ..ledger.blocks.reads import HASHED_OTHERWISE
from ..traffic.script import Check
from . import engine_figures

When = Literal["now", "end", "before"]
"""When the figure is read: after the operation that found it, after the script, or, for a figure that an
earlier operation made wrong, after the first operation that did."""


def _nothing(finding: Violation, account: Account | None) -> Any:
    return 0


def _settled(finding: Violation, account: Account | None) -> Any:
    """Where the first prompt's tokens came from."""
    if account is None or not account.settlements:
        return None
    settled = account.settlements[0]
    return [settled.local, settled.external, settled.computed]


def _valid(finding: Violation, account: Account | None) -> Any:
    """The same, with hits on blocks without valid KV as tokens that the request must compute."""
    if account is None or not account.settlements:
        return None
    settled = account.settlements[0]
    return [settled.local, settled.external, settled.computed + settled.unattained]


def _whole_blocks(finding: Violation, account: Account | None) -> Any:
    """The tokens that have KV, in whole blocks."""
    if finding.figures["why"] == HASHED_OTHERWISE:
        return None
    start, end, limit = (finding.figures[name] for name in ("start", "end", "limit"))
    assert isinstance(start, int) and isinstance(end, int) and isinstance(limit, int)
    return limit // (end - start) * (end - start)


def _figure(name: str) -> Callable[[Violation, Account | None], Any]:
    return lambda finding, account: finding.figures.get(name)


def _promised(finding: Violation, account: Account | None) -> Any:
    return account.promised if account is not None else None


def _not_in_flight(finding: Violation, account: Account | None) -> Any:
    """The computed tokens that a connector can know."""
    computed, recent = finding.figures["computed_tokens"], finding.figures["recent_tokens"]
    assert isinstance(computed, int) and isinstance(recent, int)
    return computed - recent


class Claim(NamedTuple):
    """One way to show a finding. ``engine``: what the probe must read, if the finding says so."""

    probe: str
    right: Callable[[Violation, Account | None], Any]
    says: str
    when: When = "end"
    engine: str = ""


_REPORTED = (Claim("reported", _settled, "local, external and computed tokens of {request}"),)
_COUNTED = (
    Claim(
        "computed_before_step",
        _figure("ledger_tokens"),
        "computed tokens of {request} before its last step",
        "now",
        "computed_tokens",
    ),
    Claim("computed", _figure("ledger_tokens"), "computed tokens of {request}", "now", "computed_tokens"),
)

CLAIMS: Mapping[str, tuple[Claim, ...]] = {
    "tokens/in-flight": (
        Claim("placeholders", _nothing, "output placeholders of {request} when nothing is in flight"),
    ),
    "tokens/negative": _REPORTED,
    "tokens/source-sum": _REPORTED,
    "tokens/set-once": _REPORTED,
    "connector/failed-load-counted": _REPORTED,
    "tokens/balance": _COUNTED,
    "tokens/unexplained-drop": _COUNTED,
    "tokens/stale-lookup": (
        Claim("kept_lookups", _nothing, "lookups kept for requests that do not run", "before"),
    ),
    "blocks/double-allocation": (
        Claim("blocks_in_two_places", _nothing, "blocks in two places of the block tables", "now"),
    ),
    "blocks/read-invalid": (Claim("reported", _valid, "local, external and computed tokens of {request}"),),
    "blocks/uncommitted-hit": (
        Claim("reported", _valid, "local, external and computed tokens of {request}"),
    ),
    "blocks/hash-content": (
        Claim("cached", _whole_blocks, "tokens of {request} that the prefix cache has", "now"),
    ),
    "blocks/leak": (Claim("blocks_held", _nothing, "blocks held when all requests have ended"),),
    "connector/promise-not-loaded": (
        Claim("planned_to_load", _promised, "external tokens of {request} that LMCache was ordered to load"),
    ),
    "connector/save-gap": (
        Claim(
            "planned_to_save",
            _figure("due_tokens"),
            "tokens of {request} that LMCache was ordered to save",
            "now",
        ),
    ),
    "connector/tracker-lag": (
        Claim(
            "tracked",
            _not_in_flight,
            "tokens of {request} that LMCache's tracker knows",
            "now",
            "tracked_tokens",
        ),
    ),
}
"""By finding; the first claim that holds is taken."""

_REFUSED = {
    "content/": "{id} needs the contents of the KV cache, which a journal does not have.",
    "connector/load-unpromised": "{id} happens in a worker, and a reproduction drives the scheduler alone.",
    "connector/never-finished": "{id} needs minutes of real time without an answer of the workers.",
    "weights/": "{id} depends on the weights, of which vLLM's scheduler is not told: no test of it can show "
    "that. `kvledger show JOURNAL REQUEST` says when they changed, and what was read after that.",
    "requests/stalled": "{id} needs real time, and a reproduction has none.",
}


def refusal(finding: str) -> str:
    """Why a finding can't be rebuilt, as a sentence; "" if it may be."""
    for prefix, sentence in _REFUSED.items():
        if finding.startswith(prefix):
            return sentence.format(id=finding)
    if finding not in CLAIMS:
        return f"No figure of the scheduler is known that shows {finding}."
    return ""


def wording(message: str, request: str) -> str:
    """The words of a finding's message without names, figures, remarks in brackets and the s of a plural.

    One finding may have several messages, for different symptoms.
    """
    plain = re.sub(r"\(.*?\)", "", message.replace(request, "") if request else message)
    return " ".join(word.rstrip("s") for word in plain.split() if re.fullmatch(r"[A-Za-z]+[.,:;]?", word))


def claim(
    engine: Any, finding: Violation, account: Account | None, when: When
) -> tuple[Claim, Any, Any] | None:
    """The first claim that holds of the engine as it is: with the engine's figure and the right one."""
    for each in CLAIMS.get(finding.id, ()):
        if each.when != when:
            continue
        right = each.right(finding, account)
        try:
            read = getattr(engine_figures, each.probe)(engine, finding.request or "")
        except (AttributeError, KeyError, LookupError, TypeError):  # the engine has no such figure
            continue
        if right is None or read == right or (each.engine and read != finding.figures.get(each.engine)):
            continue
        return each, read, right
    return None


def check_of(claimed: tuple[Claim, Any, Any], finding: Violation, after: int = -1) -> Check:
    """The assertion of a reproduction."""
    (probe, _, says, *_), read, right = claimed
    request = finding.request or ""
    return Check(probe, request, read, right, says.format(request=request), finding.id, after)
