"""``kvledger check usage``: what clients were told, call by call, beside the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from ...audit.analysis.calls import CallRequest
from ...audit.analysis.usage import (
    EQUAL,
    REPEATED,
    UNEXPLAINED,
    UNKNOWN,
    UNTRACED,
    VERDICTS,
    CallIndex,
    Difference,
    Reconciled,
    Usage,
)
from ...audit.replay.engine_audit import EngineAudit
from ...audit.replay.journals import each_account
from ...audit.replay.observers import KeptAccounts
from ...audit.replay.windows import Window
from ...audit.text import tenant_of
from ..answer import BAD, DIM, DOUBT, GOOD, Answer, Lines, Records, Table, Words, counted, signed
from ..usage_logs import UsageLog

SHOWN = 20
"""Calls that differ and are printed without ``-v``."""

SAYS = {
    "one-sample": "the figure of one of n samples; another sample computed what this one hit",
    "one-prompt": "the figure of one of several prompts",
    "plan": "the hits of the first admission, of which some were lost and computed",
    "transfer": "KV that a prefill engine handed over, counted as hits",
    "decode-engine": "the decode engine's own hits; the prefill engine tells where the prompt came from",
    "engine-report": "what the engine reported for the request; kvledger show has its findings",
    "not-told": "the server gave no cached figure. vLLM does with --enable-prompt-tokens-details, SGLang's "
    "OpenAI routes with --enable-cache-report, and neither for a request that never ran",
    "prompt-per-sample": "the prompt counted once for each sample",
    "aborted": "the client left before the last output tokens",
}
"""What each cause means."""

COLUMNS = (
    "call",
    "verdict",
    "causes",
    "told_prompt",
    "prompt",
    "told_cached",
    "cached",
    "told_output",
    "output",
)


def usage(journals: Sequence[Path], log: UsageLog, window: Window) -> Usage:
    """Reconcile the lines of a log with the calls in ``journals``."""
    index: CallIndex | None = None
    for path in journals:
        audit = EngineAudit(path, [KeptAccounts], window=window, invariants=())  # accounts need no checks
        audit.auditor.ledger.counted = lambda account: False  # nor sums
        described, engine = None, ("", "", 0.0)
        for account in each_account(audit):
            if index is None:
                index = CallIndex(log.told, suffixed=audit.random_suffixes)
            if described is not audit.engine or described is None:
                described = audit.engine
                engine = audit.name, audit.kv_role, audit.began_seconds or 0.0
            index.add(account, *engine, tenant_of(account.labels))
    return Usage(log.told, CallIndex(log.told, suffixed=True) if index is None else index)


def verdict(result: Usage) -> str:
    """``violated``: a difference is unexplained. ``unknown``: a call has no complete account, or none is
    told."""
    verdicts = result.verdicts.keys()
    if UNEXPLAINED in verdicts:
        return "violated"
    return "unknown" if verdicts & {UNKNOWN, UNTRACED} or not verdicts else "clean"


CODES = {"clean": 0, "violated": 1, "unknown": 3}


def answer(result: Usage, log: UsageLog, *, verbose: bool = False) -> Answer:
    """The sums by verdict and cause, tokens told and settled by tenant, then the calls that differ."""
    differ = [each for each in VERDICTS if each not in (EQUAL, REPEATED)]
    shown = list(islice(result.calls(differ), None if verbose else SHOWN))
    left = sum(result.verdicts[each] for each in differ) - len(shown)
    told = [
        (
            *(
                row.tenant or (f"{row.group} ?" if row.group else None),
                _toned(row.cause),
                row.figure,
                row.told,
                row.settled,
            ),
            *(signed(row.told - row.settled) or "0", of_a_call(row)),
        )
        for row in result.differences
    ]
    return Answer(
        result,
        list(_sentences(result, log)),
        [
            Table(list(_causes(result)), "cause | calls | what the client was told"),
            Table(told, "tenant | cause | figure | told | ledger | difference | of a call"),
            Table(
                list(map(_cells, shown)),
                "call | verdict | cause | prompt told | ledger | cached told | ledger | output told | ledger",
            ),
            Lines([Words(f"{left} more; -v prints them.", DIM)] if left else []),
        ],
        Records(COLUMNS, map(_cells, result.calls())),
        lambda: data(result, log),
        CODES[verdict(result)],
    )


def _toned(cause: str) -> str:
    return Words(cause, BAD) if cause.startswith(UNEXPLAINED) else cause


def _sentences(result: Usage, log: UsageLog) -> Iterator[str]:
    counts = result.verdicts
    calls = counted(counts.total() - counts[REPEATED], "call")
    parts = ", ".join(f"{counts[each]:,} {each}" for each in VERDICTS if counts[each] or each in VERDICTS[:3])
    tone = {"clean": GOOD, "violated": BAD, "unknown": DOUBT}[verdict(result)]
    yield Words(f"{calls} in the log: {parts}.", tone)
    if ends := Counter(_outcome(call) for call in result.unlogged()):
        listed = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(ends.items()))
        yield f"{counted(ends.total(), 'call')} of the trace in no line of the log: {listed}."
    if counts[REPEATED]:
        yield f"{counted(counts[REPEATED], 'line')} of the log told of a call again; each call counts once."
    if any(row.group for row in result.differences):
        yield (
            "A tenant with ? is a group of request ids or a cache salt, which a client can choose: the log "
            "does not say who pays. --tenant names its field that does."
        )
    for group, payers in result.shared_groups.items():
        yield f"Calls of group {group} are paid by {len(payers)} tenants: {', '.join(payers[:3])}."
    if log.free:
        yield f"{counted(log.free, 'call')} cost 0 in the log: the gateway has no price for the model."
    if log.other_lines:
        yield f"{counted(log.other_lines, 'line')} of the log told of no call; {log.first_other}."


def _outcome(call: Sequence[CallRequest]) -> str:
    outcomes = {each.account.outcome or "open" for each in call}
    return "aborted" if "aborted" in outcomes else "/".join(sorted(outcomes))


def _causes(result: Usage) -> Iterator[tuple[object, ...]]:
    for cause, count in result.causes.most_common():
        what, _, figure = cause.partition(" ")
        says = f"a {figure} figure that has no known cause" if what == UNEXPLAINED else SAYS[cause]
        yield _toned(cause), count, says


def of_a_call(row: Difference) -> str:
    """``+16 in all 30``, or from the smallest to the largest difference of a call."""
    if row.calls == 1:
        return "1 call"
    if row.least == row.most:
        return f"{row.least:+,} in all {row.calls:,}"
    return f"{row.least:+,} to {row.most:+,} in {row.calls:,}"


def _cells(row: Reconciled) -> tuple[Any, ...]:
    ledger = row.ledger if row.ledger is not None and row.verdict != UNKNOWN else None
    return (
        row.told.names[0],
        row.verdict,
        ", ".join(row.causes),
        row.told.prompt_tokens,
        ledger.prompt_tokens if ledger else None,
        row.told.cached,
        ledger.cached if ledger else None,
        row.told.output_tokens,
        ledger.output_tokens if ledger else None,
    )


def data(result: Usage, log: UsageLog) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "verdict": verdict(result),
        "calls": {each: result.verdicts[each] for each in VERDICTS},
        "causes": dict(result.causes),
        "differences": [row._asdict() for row in result.differences],
        "groups_of_several_tenants": result.shared_groups,
        "unlogged": [
            {"call": call[0].part.call, "outcome": _outcome(call), "requests": len(call)}
            for call in result.unlogged()
        ],
        "other_lines": log.other_lines,
        "first_other_line": log.first_other or None,
        "calls_of_cost_0": log.free,
        "rows": [
            dict(zip(COLUMNS, _cells(row), strict=True))
            | {"line": row.told.line, "told_written": row.told.written}
            for row in result.calls()
        ],
    }
