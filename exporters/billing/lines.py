"""Billable lines of tokens, by group and model, from the settled accounts of a period.

The columns are those of FOCUS, the FinOps cost and usage specification (https://focus.finops.org). Whether
a token was read from a cache, and its direction, are properties of ``SkuPriceDetails`` that are proposed
there and may change: https://github.com/FinOps-Open-Cost-and-Usage-Spec/FOCUS_Spec/pull/2606. A line has
quantities and no prices.

A call counts as in :mod:`kvledger.audit.analysis.calls`: a prompt once, whatever the number of its samples,
and with two engines the prompt of the prefill engine and the output of the decode engine. Tokens that
engines handled and that are not billed stand beside the lines, by cause. A request without a complete
account is *unknown*: it is counted, and none of its tokens is billed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from ...audit.analysis.calls import (
    DECODE,
    PREFILL,
    CallRequest,
    FoundRequests,
    answering,
    calls_of,
    computing,
    may_be_paired,
    prompts_of,
    recomputed_cause,
)
from ...audit.client_ids import part_of
from ...audit.errors import LedgerError
from ...audit.journal.host_folders import journal_name
from ...audit.ledger.statements import AccountStatement
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import each_account
from ...audit.replay.observers import KeptAccounts
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
    "x_NotBilled",
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
        self.not_billed: Counter[str] = Counter()
        """Tokens that count elsewhere or nowhere, by cause."""
        self.journals: dict[str, list[float]] = {}
        """The first and last Unix time at which a request of this line ended, by journal."""


Group = tuple[str, str]
"""The group and the model of a line."""
Groups = dict[Group, _Sums]
GroupOf = dict[int, Group]
"""The group of each account, by the identity of its object."""
Held = dict[tuple[str, bool], list[tuple[FoundRequests, Group]]]
"""Requests of which other journals may have the same prompt, by the call's id."""


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
    groups: Groups = {}
    held: Held = {}
    for journal in journals:
        _add_journal(groups, held, journal, period, by)
    _add_held(groups, held)
    return [
        line
        for (group, model), sums in sorted(groups.items())
        for line in _lines(group, model, sums, period, by)
    ]


def _add_journal(groups: Groups, held: Held, journal: Path, period: Period, by: str) -> None:
    """Add the requests of a journal to their groups, or to the held ones if their call may have others."""
    audit = EngineAudit(journal, [KeptAccounts], window=Window(period.start, period.end))
    key = None
    for account in each_account(audit):
        if key is None:  # the engine is known with its first account
            key, suffixed = group_key(by, audit), audit.random_suffixes
        if account.closed_at < 0:
            continue
        group, began = (key(account), audit.model), audit.began_seconds or 0.0
        sums = groups.setdefault(group, _Sums())
        ended = began + account.closed_at / 1e6
        first_last = sums.journals.setdefault(journal_name(audit.path), [ended, ended])
        first_last[:] = min(first_last[0], ended), max(first_last[1], ended)
        statement = account.freeze()
        found = FoundRequests(_slim(statement), journal_name(audit.path), audit.kv_role, began)
        part = part_of(statement.request_id, suffixed=suffixed)
        if part.sample >= 0 or may_be_paired(found):
            held.setdefault((part.call, suffixed), []).append((found, group))
        else:
            _bill(groups, [CallRequest(part, statement)], {id(statement): group})


def _slim(statement: AccountStatement) -> AccountStatement:
    """A statement without what no line needs, to be kept until all journals are read."""
    return replace(statement, lives=[], rework={}, discarded={})


def _add_held(groups: Groups, held: Held) -> None:
    """Add calls of which several requests may share a prompt."""
    for (_, suffixed), rows in held.items():
        group_of = {id(found.account): group for found, group in rows}
        for call in calls_of([found for found, _ in rows], suffixed=suffixed):
            for samples in prompts_of(call).values():
                _bill(groups, samples, group_of)


def _bill(groups: Groups, samples: list[CallRequest], group_of: GroupOf) -> None:
    """Add the requests for one prompt of a call: its tokens once, and the others by cause."""
    for request in samples:
        sums = groups[group_of[id(request.account)]]
        sums.requests += request.known
        sums.unknown += not request.known
    known = [each for each in samples if each.known]
    if not known:
        return
    prompt, answers = computing(samples), answering(samples)
    elsewhere = all(each.role == DECODE for each in prompt)
    for request in known:
        sums = groups[group_of[id(request.account)]]
        if request in answers and request.role != PREFILL:
            sums.tokens[OUTPUT, None] += request.output_tokens
        elif request.role == PREFILL:
            sums.not_billed["prefill-output"] += request.output_tokens
        if elsewhere:
            sums.not_billed["prefilled-elsewhere"] += request.cached + request.external + request.computed
        elif request not in prompt:
            sums.not_billed["transferred"] += request.external
            sums.not_billed["decode-hit"] += request.local
            sums.not_billed[recomputed_cause(request)] += request.computed
    payers = [] if elsewhere else [each for each in prompt if each.known]
    if payers:
        most = max(payers, key=lambda each: each.computed)
        cached = min(each.cached for each in payers)
        sums = groups[group_of[id(most.account)]]
        sums.tokens[INPUT, READ] += cached
        sums.tokens[INPUT, UNCACHED] += most.computed
        took = sum(each.cached + each.computed for each in payers)
        sums.not_billed["another-sample"] += took - cached - most.computed


def _lines(group: str, model: str, sums: _Sums, period: Period, by: str) -> Iterator[dict[str, Any]]:
    for direction, action in KINDS:
        tokens = sums.tokens[direction, action]
        rest = sums.unknown or (+sums.not_billed and not any(sums.tokens.values()))
        if not tokens and not (rest and (direction, action) == KINDS[-1]):
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
            json.dumps(dict(+sums.not_billed), sort_keys=True),
        )
        yield dict(zip(COLUMNS, values, strict=True))


def instant(seconds: float) -> str:
    """A time in UTC, as FOCUS writes it."""
    return datetime.fromtimestamp(int(seconds), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
