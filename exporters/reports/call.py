"""A client's call of several requests: one line per request, their sum, and the call counted once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from ...audit.analysis.calls import DECODE, PREFILL, CallFigures, CallRequest, calls_of, figures
from ...audit.replay.journals import RequestStatement
from ..csv_cells import csv_of
from . import terminal
from .audit_data import statement_data

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


def render(asked: str, statements: Sequence[RequestStatement]) -> Group:
    """All requests that ``asked`` names."""
    calls = _calls(statements)
    return terminal.blocks(*(_call(asked, place, len(calls), call) for place, call in enumerate(calls, 1)))


def data(asked: str, statements: Sequence[RequestStatement]) -> dict[str, object]:
    """The same as plain data, with the whole statement of each request."""
    return {
        "asked": asked,
        "calls": [
            {
                "requests": [{"request_id": each.account.request_id, **_row(each)} for each in call],
                "counted_once": figures(call)._asdict(),
            }
            for call in _calls(statements)
        ],
        "statements": [statement_data(each) for each in statements],
    }


def as_csv(statements: Sequence[RequestStatement]) -> str:
    """One line per request."""
    columns = (
        "call",
        "request",
        "prompt",
        "sample",
        *(name.replace(" ", "_") for name in COLUMNS),
        "outcome",
    )
    rows = (
        (
            each.part.call,
            each.account.request_id,
            each.part.prompt,
            each.part.sample,
            *_row(each).values(),
            each.account.outcome,
        )
        for call in _calls(statements)
        for each in call
    )
    return csv_of(columns, rows)


def _calls(statements: Sequence[RequestStatement]) -> list[list[CallRequest]]:
    return calls_of([each.found for each in statements], suffixed=statements[0].suffixed)


def _call(asked: str, number: int, count: int, requests: Sequence[CallRequest]) -> Group:
    again = f", use {number} of {count} of this id" if count > 1 else ""
    counted = figures(requests)
    made = (
        f"{terminal.counted(counted.requests, 'request')} for {terminal.counted(counted.prompts, 'prompt')}"
    )
    table = terminal.plain_table(header=True)
    engines = list(dict.fromkeys(request.engine for request in requests))
    several = len(engines) > 1
    for name in ("request", "prompt", "sample", *COLUMNS, "outcome"):
        table.add_column(name, justify="left" if name in ("request", "outcome") else "right", no_wrap=True)
    engine = ""
    for request in requests:
        if several and request.engine != engine:
            engine = request.engine
            table.add_section()
            table.add_row(_engine(request), style="bold")
        sample = request.part.sample
        cells = (f"{value:,}" for value in _row(request).values())
        table.add_row(
            request.account.request_id,
            str(request.part.prompt),
            "" if sample < 0 else str(sample),
            *cells,
            request.account.outcome or "open",
        )
    table.add_section()
    sums = [sum(values) for values in zip(*(_row(each).values() for each in requests), strict=True)]
    table.add_row("sum", "", "", *(f"{value:,}" for value in sums), "", style="bold")
    title = Text.assemble(("Call ", "bold"), (asked, "bold"), f": {made}{again}")
    return Group(title, table, Text(_once(counted, paired=any(each.role for each in requests))))


def _engine(request: CallRequest) -> str:
    """The heading of an engine's requests."""
    return f"{request.engine}{ROLES[request.role]}"


def _row(request: CallRequest) -> dict[str, int]:
    values = (
        request.account.prompt_tokens,
        request.local,
        request.external,
        request.computed,
        request.unattained,
        request.output_tokens,
    )
    return dict(zip((name.replace(" ", "_") for name in COLUMNS), values, strict=True))


def _once(counted: CallFigures, *, paired: bool) -> str:
    """The call's figures, each prompt counted once."""
    if not counted.known:
        return "Not every account is complete, so the call's figures are unknown."
    prompt = terminal.counted(counted.prompt_tokens, "prompt token")
    output = terminal.counted(counted.output_tokens, "output token")
    cached = f"{counted.cached:,} cached" if paired else f"no sample computed {counted.cached:,}"
    text = f"Each prompt counted once: {prompt}, of which {cached}; {output}."
    again = ", ".join(f"{count:,} {SAYS[cause]}" for cause, count in counted.not_counted.items())
    return f"{text}\nNot counted again: {again}." if paired and again else text
