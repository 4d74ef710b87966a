"""The account statement of one request, laid out as a bank statement.

First where the prompt came from and which invariants the request violates; then each entry with its time,
step, life, text, debit, credit and balance; then the settled figures beside the planned and reported ones.
Consecutive entries that repeat are folded into one line unless every entry is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...audit.ledger.account import AccountStatement, Line, Settlement
from ...audit.replay.journals import RequestStatement
from . import audit_text, terminal
from .audit_data import finding
from .first_token import FirstTokens, later_tokens_sentence, queued_sentence

FOLD = 3
"""The least number of consecutive repeated entries that become one line."""

DATE = "YYYY-MM-DD"
UTC = " UTC"

_LEGEND = (
    "A life lasts from an admission to a preemption or the end. The balance counts the tokens whose KV "
    "exists or is scheduled to exist."
)


def render(request: RequestStatement, *, every_entry: bool = False, findings: bool = True) -> Group:
    """The whole statement; with the request's findings in full unless ``findings`` is false."""
    rows = [finding(violation, request.began_seconds) for violation in request.findings]
    return terminal.blocks(
        Group(*_answer(request)),
        Group(*_statement(request, every_entry)),
        Group(*_figures(request.account)),
        audit_text.findings(rows) if findings else None,
    )


def _answer(request: RequestStatement) -> Iterator[Text]:
    """Whose account it is, where the prompt came from, what is wrong with it, and its times."""
    account = request.account
    yield Text.assemble(("Account of ", "bold"), (account.request_id, "bold"), f"   {request.engine}")
    yield Text(f"{terminal.counted(account.prompt_tokens, 'prompt token')}: {_sources(account)}.")
    ids = list(dict.fromkeys(violation.id for violation in request.findings))
    if ids:
        yield Text(f"Findings: {', '.join(ids)}.", style="bold red")
    lasted = (account.closed_at - account.added_at) / 1e6
    closed = f"closed after {lasted:.3f} s" if account.closed_at >= 0 else "still open"
    outcome = f" ({account.outcome})" if account.outcome else ""
    lives = "1 life" if len(account.lives) == 1 else f"{len(account.lives)} lives"
    preemptions = terminal.counted(account.preemptions, "preemption")
    yield Text(f"Opened {request.when(account.added_at)}, {closed}{outcome}, {lives}, {preemptions}.")
    if account.first_token is not None:
        yield Text(FirstTokens(account.first_token).sentence())
    if account.queued is not None and any(account.queued.values()):
        yield Text(queued_sentence(account.queued))
    if account.output_time is not None and account.later_tokens:
        yield Text(later_tokens_sentence(account.output_time, account.later_tokens))
    if account.unknown is not None:
        yield Text(f"Unknown: {account.unknown}. Figures are as far as seen.", style="yellow")


def _sources(account: AccountStatement) -> str:
    """Where the prompt came from, over all its chunks."""
    if not account.settlements:
        return "not settled yet"
    totals = {
        name: sum(getattr(settlement, name) for settlement in account.settlements)
        for name in ("local", "external", "computed", "unattained")
    }
    return ", ".join(f"{tokens:,} {name}" for name, tokens in totals.items() if tokens) or "none settled"


def _statement(request: RequestStatement, every_entry: bool) -> Iterator[RenderableType]:
    """The entries with their times in UTC: without the date, if all are of one day."""
    times = [request.when(line.at) for line in request.lines]
    days = {time[: len(DATE)] if time.endswith(UTC) else "" for time in times}
    if request.began_seconds is None:
        heading, legend = "seconds", ""
    elif len(days) == 1 and (day := days.pop()):
        heading, legend = "UTC", f" Times are of {day}."
        times = [time[len(DATE) + 1 :] for time in times]
    else:
        heading, legend = "UTC", ""
    yield Text(f"{_LEGEND}{legend}", style="dim")
    shown = [time.removesuffix(UTC).removesuffix(" s") for time in times]
    yield _entries(request.lines, shown, heading, every_entry)


def _entries(lines: list[Line], times: list[str], heading: str, every_entry: bool) -> Table:
    table = terminal.plain_table(header=True)
    for name in ("no.", heading, "step", "life"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("text", min_width=20)
    for name in ("debit", "credit", "balance"):
        table.add_column(name, justify="right", no_wrap=True)
    life = place = 0
    for run in _runs(lines):
        if life and run[0].life != life:
            table.add_section()
            table.add_row()
        life = run[0].life
        if every_entry or len(run) < FOLD:
            for line, time in zip(run, times[place:], strict=False):
                _add(table, line, time, line.text)
        else:
            _add(table, _folded(run), times[place], f"{run[0].text}, {len(run)} times to step {run[-1].step}")
        place += len(run)
    return table


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


def _add(table: Table, line: Line, time: str, text: str) -> None:
    table.add_row(
        str(line.number),
        time,
        str(line.step),
        str(line.life) if line.life else "",
        Text(text, style="" if line.credit or line.debit else "dim"),
        f"{line.debit:,}" if line.debit else "",
        f"{line.credit:,}" if line.credit else "",
        f"{line.balance:,}",
        style="" if line.balance >= 0 else "bold red",
    )


def _figures(account: AccountStatement) -> Iterator[RenderableType]:
    """The closing figures: settled beside planned and reported, and the work."""
    table = terminal.plain_table(header=True)
    table.add_column("prompt tokens", min_width=24)
    for name in ("local", "external", "computed", "unattained"):
        table.add_column(name, justify="right", no_wrap=True)
    for place, settlement in enumerate(account.settlements):
        _settlement_row(table, settlement, place)
    if account.plan is not None:
        prompt = (account.settled or account).prompt_tokens
        local, external = account.plan
        _figures_row(table, "planned", (local, external, prompt - local - external))
    if account.reported is not None:
        _figures_row(table, "reported by the engine", account.reported)
    yield table
    rework = sum(account.rework.values())
    parts = (
        ("first prompt", account.first_prompt),
        ("first output", account.first_output),
        ("rework", rework),
        ("rejected", account.rejected),
        ("overrun", account.overrun),
    )
    if account.scheduled:
        shown = " + ".join(f"{tokens:,} {name}" for name, tokens in parts if tokens)
        yield Text(f"\n{account.scheduled:,} tokens scheduled = {shown}")
    repeats = (("hit", account.hit_again), ("loaded", account.loaded_again))
    for kind, tokens in repeats:
        if tokens:
            yield Text(f"{terminal.counted(tokens, 'token')} {kind} again: the request had lost their KV")


def _settlement_row(table: Table, settlement: Settlement, place: int) -> None:
    label = f"settled, step {settlement.step}" if place == 0 else f"settled, chunk {place + 1}"
    figures = (settlement.local, settlement.external, settlement.computed, settlement.unattained)
    _figures_row(table, label, figures, style="bold")


def _figures_row(table: Table, label: str, figures: tuple[int, ...], style: str = "") -> None:
    table.add_row(label, *(f"{tokens:,}" for tokens in figures), style=style)
