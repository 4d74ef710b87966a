"""The account of one request, laid out as a bank statement; and a client's call of several requests.

First where the prompt came from and which invariants the request violates; then each entry with its time,
step, life, text, debit, credit and balance; then the settled figures beside the planned and reported ones.
Consecutive entries that repeat are folded into one line unless every entry is wanted.

A call has one line per request, their sum, and the call counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...audit import causes
from ...audit.analysis.calls import DECODE, PREFILL, CallFigures, CallRequest, calls_of, figures
from ...audit.ledger.account import AccountStatement, Line
from ...audit.replay.journals import RequestStatement
from ..answer import BAD, DIM, DOUBT, Answer, Lines, Part, Records, Sum, Table, Words, counted, seconds
from . import audit
from .audit import finding
from .costs import FirstTokens, later_tokens_sentence, queued_sentence

FOLD = 3
"""The least number of consecutive repeated entries that become one line."""

DATE = "YYYY-MM-DD"
UTC = " UTC"
SOURCES = ("local", "external", "computed", "unattained")

_LEGEND = (
    "A life lasts from an admission to a preemption or the end. The balance counts the tokens whose KV "
    "exists or is scheduled to exist."
)


def answer(request: RequestStatement, *, every_entry: bool = False) -> Answer:
    """The whole statement, with the request's findings in full."""
    rows = [finding(violation, request.began_seconds) for violation in request.findings]
    return Answer(
        request,
        list(_sentences(request)),
        [*parts(request, every_entry=every_entry), audit.findings(rows)],
        Records(Line._fields, request.lines),
        lambda: plain(request),
    )


def parts(request: RequestStatement, *, every_entry: bool = False) -> list[Part]:
    """The entries, and the closing figures."""
    return [_entries(request, every_entry), *_figures(request.account)]


def plain(statement: RequestStatement) -> dict[str, object]:
    """The account statement of a request as plain data."""
    began = statement.began_seconds
    return {
        "engine": statement.engine,
        "journal": str(statement.path),
        "account": msgspec.to_builtins(statement.account),
        "lines": [line._asdict() for line in statement.lines],
        "findings": [msgspec.to_builtins(finding(each, began)) for each in statement.findings],
    }


def _sentences(request: RequestStatement) -> Iterator[str]:
    """Whose account it is, where the prompt came from, what is wrong with it, and its times."""
    account = request.account
    prompt = counted(account.prompt_tokens, "prompt token")
    yield f"Account of {account.request_id}: {prompt}: {_sources(account)}."
    if ids := list(dict.fromkeys(violation.id for violation in request.findings)):
        yield Words(f"Findings: {', '.join(ids)}.", BAD)
    lasted = (account.closed_at - account.added_at) / 1e6
    closed = f"closed after {lasted:.3f} s" if account.closed_at >= 0 else "still open"
    outcome = f" ({account.outcome})" if account.outcome else ""
    lives, preemptions = len(account.lives), counted(account.preemptions, "preemption")
    opened = f"Opened {request.when(account.added_at)} on {request.engine}, {closed}{outcome}"
    yield f"{opened}, {counted(lives, 'life', 'lives')}, {preemptions}."
    if account.first_token is not None:
        yield FirstTokens(account.first_token).sentence()
    if account.queued is not None and any(account.queued.values()):
        yield queued_sentence(account.queued)
    if account.output_time is not None and account.later_tokens:
        yield later_tokens_sentence(account.output_time, account.later_tokens)
    if account.unknown is not None:
        yield Words(f"Unknown: {account.unknown}. Figures are as far as seen.", DOUBT)


def _sources(account: AccountStatement) -> str:
    """Where the prompt came from, over all its chunks."""
    if not account.settlements:
        return "not settled yet"
    totals = {name: sum(getattr(each, name) for each in account.settlements) for name in SOURCES}
    return ", ".join(f"{tokens:,} {name}" for name, tokens in totals.items() if tokens) or "none settled"


def _entries(request: RequestStatement, every_entry: bool) -> Table:
    """The entries with their times in UTC: without the date, if all are of one day."""
    times = [request.when(line.at) for line in request.lines]
    days = {time[: len(DATE)] if time.endswith(UTC) else "" for time in times}
    heading, legend = "seconds" if request.began_seconds is None else "UTC", _LEGEND
    if heading == "UTC" and len(days) == 1 and (day := days.pop()):
        legend += f" Times are of {day}."
        times = [time[len(DATE) + 1 :] for time in times]
    times = [time.removesuffix(UTC).removesuffix(" s") for time in times]
    rows: list[tuple[Any, ...]] = []
    life = place = 0
    for run in _runs(request.lines):
        if life and run[0].life != life:
            rows.append(())
        life = run[0].life
        if every_entry or len(run) < FOLD:
            rows += [_entry(line, time, line.text) for line, time in zip(run, times[place:], strict=False)]
        else:
            text = f"{run[0].text}, {len(run)} times to step {run[-1].step}"
            rows.append(_entry(_folded(run), times[place], text))
        place += len(run)
    return Table(
        rows, ["no.", heading, "step", "life", "text", "debit", "credit", "balance"], "Entries", legend
    )


def _runs(lines: Iterable[Line]) -> Iterator[list[Line]]:
    """Consecutive lines that are equal but for their time, step and balance."""
    run: list[Line] = []
    for line in lines:
        if run and _kind(line) != _kind(run[0]):
            yield run
            run = []
        run.append(line)
    if run:
        yield run


def _kind(line: Line) -> tuple[object, ...]:
    return (line.life, line.text, line.credit, line.debit)


def _folded(run: list[Line]) -> Line:
    return run[0]._replace(
        credit=sum(line.credit for line in run),
        debit=sum(line.debit for line in run),
        balance=run[-1].balance,
    )


def _entry(line: Line, time: str, text: str) -> tuple[Any, ...]:
    balance = f"{line.balance:,}" if line.balance >= 0 else Words(f"{line.balance:,}", BAD)
    shown = text if line.credit or line.debit else Words(text, DIM)
    return (
        line.number,
        time,
        line.step,
        line.life or "",
        shown,
        line.debit or "",
        line.credit or "",
        balance,
    )


def _figures(account: AccountStatement) -> Iterator[Part]:
    """The closing figures: settled beside planned and reported, and the work."""
    rows: list[tuple[Any, ...]] = []
    for place, each in enumerate(account.settlements):
        label = f"settled, chunk {place + 1}" if place else f"settled, step {each.step}"
        rows.append(Sum((label, *(getattr(each, name) for name in SOURCES))))
    if account.plan is not None:
        prompt = (account.settled or account).prompt_tokens
        local, external = account.plan
        rows.append(("planned", local, external, prompt - local - external))
    if account.reported is not None:
        rows.append(("reported by the engine", *account.reported))
    yield Table(rows, ["prompt tokens", *SOURCES])
    work = {
        "first prompt": account.first_prompt,
        "first output": account.first_output,
        "rework": sum(account.rework.values()),
        "rejected": account.rejected,
        "overrun": account.overrun,
    }
    lines = []
    if account.scheduled:
        shown = " + ".join(f"{tokens:,} {name}" for name, tokens in work.items() if tokens)
        lines.append(f"{account.scheduled:,} tokens scheduled = {shown}")
    repeats = {"hit": account.hit_again, "loaded": account.loaded_again}
    lines += [
        f"{counted(tokens, 'token')} {kind} again: the request had lost their KV"
        for kind, tokens in repeats.items()
        if tokens
    ]
    yield Lines(lines)


# --- a call of several requests -------------------------------------------------------------------------

ROLES = {
    "": "",
    PREFILL: " (prefilled for another engine)",
    DECODE: " (received KV from a prefill engine)",
}
"""What the heading of an engine says of its part in a call."""

SAYS = {
    "another-sample": "of the same prompt in other samples",
    "transferred": "received from the prefill engine",
    "decode-hit": "that the decode engine had in its own cache",
    "recomputed": "computed again by the decode engine",
    "transfer-failed": "computed by the decode engine, because the transfer failed",
    "prefill-output": "of output from the prefill engine",
}
"""Tokens that a call does not count again, by cause."""

COLUMNS = ("prompt tokens", "local", "external", "computed", "unattained", "output")


def answer_of_call(asked: str, statements: Sequence[RequestStatement]) -> Answer:
    """All requests that ``asked`` names: one line per request in CSV, their statements in JSON."""
    found = [each.found._replace(number=number) for number, each in enumerate(statements)]
    calls = calls_of(found, suffixed=statements[0].suffixed)
    names = [name.replace(" ", "_") for name in COLUMNS]
    rows = (
        (
            *(each.part.call, each.account.request_id, each.part.prompt, each.part.sample),
            *_values(each),
            each.account.outcome,
        )
        for call in calls
        for each in call
    )
    sentences, parts = list[str](), list[Part]()
    for number, call in enumerate(calls, 1):
        again = f", use {number} of {len(calls)} of this id" if len(calls) > 1 else ""
        once = figures(call)
        made = f"{counted(once.requests, 'request')} for {counted(once.prompts, 'prompt')}"
        sentences.append(
            f"Call {asked}: {made}{again}. {_once(once, paired=any(each.role for each in call))}"
        )
        parts.append(_requests(call))
        parts += _transfers(call, statements)
    return Answer(
        statements,
        sentences,
        parts,
        Records(("call", "request", "prompt", "sample", *names, "outcome"), rows),
        lambda: {
            "asked": asked,
            "calls": [
                {
                    "requests": [
                        {
                            "request_id": each.account.request_id,
                            **dict(zip(names, _values(each), strict=True)),
                        }
                        for each in call
                    ],
                    "counted_once": figures(call)._asdict(),
                }
                for call in calls
            ],
            "statements": [plain(each) for each in statements],
        },
    )


def _requests(call: Sequence[CallRequest]) -> Table:
    """The requests of a call, below the engine that they ran on, and their sum."""
    rows: list[tuple[Any, ...]] = []
    several, engine = len({each.engine for each in call}) > 1, ""
    for each in call:
        if several and each.engine != engine:
            engine = each.engine
            rows.append(Sum((f"{each.engine}{ROLES[each.role]}",)))
        sample = "" if each.part.sample < 0 else each.part.sample
        name, outcome = each.account.request_id, each.account.outcome or "open"
        rows.append((name, each.part.prompt, sample, *_values(each), outcome))
    sums = map(sum, zip(*map(_values, call), strict=True))
    rows.append(Sum(("sum", "", "", *sums, "")))
    return Table(rows, ["request", "prompt", "sample", *COLUMNS, "outcome"])


def _transfers(call: Sequence[CallRequest], statements: Sequence[RequestStatement]) -> Iterator[Table]:
    """Where the time of each handover from a prefill to a decode engine went."""
    for decode in call:
        if decode.role != DECODE:
            continue
        prefill = next(
            (each for each in call if each.role == PREFILL and each.part[1:] == decode.part[1:]), None
        )
        here, there = statements[decode.number], None if prefill is None else statements[prefill.number]
        times = here.account.first_token or {}
        between = None
        began, before = here.began_seconds, None if there is None else there.began_seconds
        if began is not None and there is not None and before is not None and there.account.closed_at >= 0:
            between = began - before + (here.account.added_at - there.account.closed_at) / 1e6
        phases = {
            "registered: from the end in the prefill engine to the arrival in the decode engine": between,
            "queued: waited there for its admission": _spent(times, causes.QUEUED),
            "transferred: waited for the load": _spent(times, causes.REMOTE_LOAD),
            "ready: waited for a step after the load": _spent(times, causes.READY),
            "notified: until the prefill engine knew": None,
            "lease left: before the prefill engine gives the blocks up": None,
        }
        rows = [(phase, "unknown" if at is None else seconds(at)) for phase, at in phases.items()]
        yield Table(rows, ("phase", "time"), f"Transfer of the KV to {decode.account.request_id}")


def _spent(times: Mapping[str, int], cause: str) -> float | None:
    return times[cause] / 1e6 if cause in times else None


def _values(request: CallRequest) -> tuple[int, ...]:
    """The figures of :data:`COLUMNS`."""
    account = request.account
    return (
        *(account.prompt_tokens, account.local, account.external, account.computed),
        *(account.unattained, account.output_tokens),
    )


def _once(once: CallFigures, *, paired: bool) -> str:
    """The call's figures, each prompt counted once."""
    if not once.known:
        return "Not every account is complete, so the call's figures are unknown."
    cached = f"{once.cached:,} cached" if paired else f"no sample computed {once.cached:,}"
    prompt, output = counted(once.prompt_tokens, "prompt token"), counted(once.output_tokens, "output token")
    text = f"Each prompt counted once: {prompt}, of which {cached}; {output}."
    again = ", ".join(f"{count:,} {SAYS[cause]}" for cause, count in once.not_counted.items())
    return f"{text} Not counted again: {again}." if paired and again else text
