"""Billable lines of tokens, by group and model, from the settled accounts of a period.

The columns are those of FOCUS, the FinOps cost and usage specification (https://focus.finops.org). Whether
a token was read from a cache, and its direction, are properties of ``SkuPriceDetails`` that are proposed
there and may change: https://github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec/pull/2606. A line has
quantities and no prices.

A call counts as in :mod:`kvledger.audit.analysis.calls`: a prompt once, whatever the number of its samples.
KV that a prefill engine handed over is billed where it was computed. A request without a complete account
is *unknown*: it is counted, and none of its tokens is billed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from ...audit.analysis.calls import CallRequest
from ...audit.client_ids import part_of
from ...audit.errors import LedgerError
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import each_account
from ...audit.replay.windows import Window
from ..trace.groups import group_key

READ, UNCACHED = "Read", "Uncached"
INPUT, OUTPUT = "Input", "Output"
KINDS = ((INPUT, READ), (INPUT, UNCACHED), (OUTPUT, None))
PROPOSED = "TokenCacheAction and TokenDirection are proposed (FOCUS_Spec#2606)"

COLUMNS = (
    "BillingPeriodStart",
    "BillingPeriodEnd",
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SkuMeter",
    "SkuPriceDetails",
    "ConsumedQuantity",
    "ConsumedUnit",
    "Tags",
    "x_Proposed",
    "x_Requests",
    "x_UnknownRequests",
    "x_Journals",
)
"""The columns of a line, before those of the chain."""


class _Sums:
    """The tokens and requests of one group and model."""

    def __init__(self) -> None:
        self.tokens = dict.fromkeys(KINDS, 0)
        """Tokens by direction and cache action."""
        self.requests = 0
        """Requests that are billed."""
        self.unknown = 0
        """Requests that are not billed, because their accounts are incomplete."""
        self.journals: dict[str, list[float]] = {}
        """The first and last Unix time at which a request of this line ended, by journal."""


class Period(NamedTuple):
    """From ``start`` up to ``end``, in Unix seconds."""

    start: float
    end: float


def month(text: str) -> Period:
    """A calendar month in UTC, such as ``2026-11``. Raises LedgerError."""
    try:
        start = datetime.strptime(text, "%Y-%m").replace(tzinfo=timezone.utc)
    except ValueError:
        raise LedgerError(f"{text!r} is no month; write 2026-11.") from None
    end = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
    return Period(start.timestamp(), end.timestamp())


def lines(journals: Sequence[Path], period: Period, by: str) -> list[dict[str, Any]]:
    """The lines of the requests that ended in the period, by group and model, without empty ones."""
    groups: dict[tuple[str, str], _Sums] = {}
    for journal in journals:
        _add_journal(groups, journal, period, by)
    return [
        line
        for (group, model), sums in sorted(groups.items())
        for line in _lines(group, model, sums, period, by)
    ]


def _add_journal(groups: dict[tuple[str, str], _Sums], journal: Path, period: Period, by: str) -> None:
    audit = EngineAudit(journal, keep=True, window=Window(period.start, period.end), with_metrics=False)
    samples: dict[tuple[tuple[str, str], str, int], list[CallRequest]] = {}
    group_of = None
    for account in each_account(audit):
        if group_of is None:  # the engine is known with its first account
            group_of, suffixed = group_key(by, audit), audit.random_suffixes
        if account.closed_at < 0:
            continue
        group = group_of(account), audit.model
        sums = groups.setdefault(group, _Sums())
        ended = (audit.began_seconds or 0.0) + account.closed_at / 1e6
        first_last = sums.journals.setdefault(audit.path.name, [ended, ended])
        first_last[:] = min(first_last[0], ended), max(first_last[1], ended)
        statement = account.freeze()
        if statement.unknown is not None or not statement.settlements:
            sums.unknown += 1
            continue
        request = CallRequest(part_of(statement.request_id, suffixed=suffixed), statement)
        sums.requests += 1
        sums.tokens[OUTPUT, None] += request.output_tokens
        if request.part.sample < 0:
            sums.tokens[INPUT, READ] += request.cached
            sums.tokens[INPUT, UNCACHED] += request.computed
        else:  # the samples of one prompt share an id but for their number
            prompt_id = statement.request_id.partition("_")[2]
            samples.setdefault((group, prompt_id, request.part.prompt), []).append(request)
    for (group, _, _), requests in samples.items():
        sums = groups[group]
        most = max(requests, key=lambda each: each.computed)
        sums.tokens[INPUT, READ] += min(each.cached for each in requests)
        sums.tokens[INPUT, UNCACHED] += most.computed


def _lines(group: str, model: str, sums: _Sums, period: Period, by: str) -> Iterator[dict[str, Any]]:
    for direction, action in KINDS:
        tokens = sums.tokens[direction, action]
        if not tokens and not (sums.unknown and (direction, action) == KINDS[-1]):
            continue
        details = {"TokenDirection": direction} | ({"TokenCacheAction": action} if action else {})
        meter = f"{direction} tokens" + (f", {action.lower()}" if action else "")
        values = (
            instant(period.start),
            instant(period.end),
            instant(period.start),
            instant(period.end),
            "Usage",
            "AI and Machine Learning",
            "LLM inference",
            model,
            meter,
            json.dumps(details, sort_keys=True),
            tokens,
            "Tokens",
            json.dumps({by or "group": group}, sort_keys=True) if by else "{}",
            PROPOSED,
            sums.requests,
            sums.unknown,
            json.dumps(
                {
                    name: [instant(first), instant(last)]
                    for name, (first, last) in sorted(sums.journals.items())
                },
                sort_keys=True,
            ),
        )
        yield dict(zip(COLUMNS, values, strict=True))


def instant(seconds: float) -> str:
    """A time in UTC, as FOCUS writes it."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
